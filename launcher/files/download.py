"""Fetches the results of a run from a host.

The host proposes a list of files. A name is accepted only if its path is below the run folder, is
not that of a file of the launcher, and is of a kind that no other program runs or reads as
settings. Number, sizes and time are limited.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated

from rackrun.contract.files import MOST_RETURNED, RETURNED
from rackrun.errors import Problem
from rackrun.launcher.run.job import FunctionCall, Job
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.run.result import Result
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.rpc import LISTING_BYTES, RpcClient
from rackrun.run_folder import LAUNCHER_FILES, SUPERVISOR_FILES, is_named
from rackrun.shapes import Count, Shape, at_most
from rackrun.terminal import one_line
from rackrun.units import data_size, first_few, plural

Say = Callable[[str], object]

MOST_FILES = 100_000
MOST_BYTES = 100_000_000_000
SPARE_BYTES = 1 << 28  # stays free on our disk
LISTING_SECONDS = 30.0
LONG_BYTES = 100_000_000  # a transfer that takes some time is reported
DEEPEST = 32
LONGEST_NAME = 200  # bytes; room for `..partial`

LONGEST_PATH = 4096
NAMED = 3
LARGE = MOST_RETURNED + 1

RESULT_SUFFIXES = frozenset(
    (
        *(".csv", ".err", ".json", ".jsonl", ".log", ".out", ".tsv", ".txt"),
        *(".bin", ".ckpt", ".onnx", ".pt", ".pt2", ".pth", ".safetensors"),
        *(".arrow", ".feather", ".h5", ".hdf5", ".mat", ".npy", ".npz", ".parquet", ".wandb"),
        *(".avif", ".bmp", ".gif", ".jpeg", ".jpg", ".mp4", ".pdf", ".png", ".tif", ".tiff"),
        *(".gz", ".webp", ".xz", ".zst"),
    )
)
"""What comes back: data that only its reader opens. Code, pages and settings stay on the host."""
_OF_TOOLS = re.compile(
    r"(?:cdk|composer|deno|kernel|nodemon|package|cmake(?:user)?presets|compile_commands)\.json"
    r"|(?:babel\.config|[jt]sconfig[\w.-]*)\.json"
    r"|(?:cmakelists|constraints[\w.-]*|entry_points|requirements[\w.-]*)\.txt"
)
"""Names by which another program finds what it is to run, although the suffix is that of data."""
_OF_TRACKERS = re.compile(
    r"(?:.*/)?events\.out\.tfevents\.[\w.-]+"
    r"|wandb/[\w.-]+/files/(?:config\.yaml|requirements\.txt)"
    r"|mlruns/(?:\w+/)*meta\.yaml"
    r"|mlruns/\w+/\w+/(?:metrics|params|tags)/[\w/ -]+"
    r"|mlruns/\w+/\w+/(?:params|tags)/(?:mlflow|rackrun|resolved)\.[\w.]+(?<!\.py)"
)
"""Files of TensorBoard, Weights & Biases and MLflow with other names; not `wandb/settings`."""


class OfferedFiles(Shape, frozen=True):
    """The files that a host has for us, and their sizes."""

    files: Annotated[dict[Annotated[str, at_most(LONGEST_PATH)], Count], at_most(MOST_FILES)]
    odd: Count = 0
    """How many it leaves out because their names are not printable."""


class Header(Shape, frozen=True):
    """Header before the bytes of a file, or an error instead of them."""

    size: Count = 0
    error: str = ""


class TransferEnd(Shape, frozen=True):
    """Trailer after the bytes of a file, and after all files."""

    error: str = ""


@dataclass
class Fetched:
    """Files that came back, and files that did not."""

    host: str
    folder: str
    files: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a summary; empty when there was nothing to fetch."""
        count = plural(len(self.files), "file")
        came = f"{count} came back from {self.host}" if self.files else ""
        some = first_few(self.problems, NAMED)
        left = f"still on {self.host}, in {self.folder}: {some}" if self.problems else ""
        return "; ".join(filter(None, (came, left)))


def left_behind(first: HostPlan) -> str:
    """Return where the results of a run are that were not fetched."""
    return f"the results are still on {first.name}, in {first.folder}"


def fetch_run(
    hosts: Sequence[tuple[Transport, HostPlan]], job: Job, result: Result, say: Say
) -> str:
    """Copy what the first rank's host has in its run folder into ours; return that, or why nothing.

    Of a function, also what it returned on each rank.
    """
    transport, first = hosts[0]
    if result.hosts[first.name] != "clean":
        return left_behind(first)
    try:
        fetched = fetch_results(transport, first, job.run_id, job.folder.path, say=say)
        if isinstance(job.work, FunctionCall):
            for transport, host in hosts:
                if result.hosts[host.name] == "clean":
                    fetch_returned(transport, host, job.run_id, job.folder.returned)
        return str(fetched)
    except (Problem, OSError) as error:
        return f"{left_behind(first)}: {str(error).removeprefix(f'{first.name}: ')}"


def fetch_results(
    transport: Transport,
    plan: HostPlan,
    run_id: str,
    folder: Path,
    kept: Collection[str] = SUPERVISOR_FILES,
    say: Say = lambda text: None,
    only: Collection[str] = (),
) -> Fetched:
    """Copy the run folder of a host into ours, but for `LAUNCHER_FILES` and `kept` at its top.

    `only` are the names of files that may come, none of them large; empty: any. `say` gets how much
    it is, if that is much. Raises Problem when the host offers what it must not, falls silent
    or breaks off; whole files that are here stay.
    """
    with closing(RpcClient(transport, plan.agent_python, reply_seconds=LISTING_SECONDS)) as client:
        kept = LAUNCHER_FILES | set(kept)
        order = {"folder": plan.folder, "run_id": run_id, "kept": sorted(kept), "most": MOST_FILES}
        client.order("results", **order)
        reply = client.reply(most_bytes=LISTING_BYTES)
        if error := reply.get("error"):
            raise Problem(one_line(str(error)[:500]))
        offer = client.parsed(reply, OfferedFiles)
        for path in offer.files:
            _check_path(path, kept)
        files = {path: size for path, size in offer.files.items() if _is_result(path)}
        if only:
            files = {path: files[path] for path in only if files.get(path, LARGE) < LARGE}
        total = sum(files.values())
        _check_room(total, folder)
        if total > LONG_BYTES:
            say(f"fetching {plural(len(files), 'file')}, {data_size(total)}, from {plan.name}")
        problems = [f"{offer.odd} with odd names"] if offer.odd else []
        if others := [] if only else sorted(offer.files.keys() - files.keys()):
            named = first_few(others, NAMED)
            problems.append(f"{len(others)} of kinds that are not fetched ({named})")
        fetched = Fetched(plan.name, plan.folder, problems=problems)
        if files:
            _take_all(client, files, folder, fetched)
        return fetched


def fetch_returned(transport: Transport, plan: HostPlan, run_id: str, folder: Path) -> None:
    """Copy what a function returned on the ranks of this host, and no others, into a folder."""
    folder.mkdir(exist_ok=True)
    ranks = range(plan.first_rank, plan.first_rank + plan.processes)
    source = replace(plan, folder=f"{plan.folder}/{RETURNED}")
    only = [f"rank-{rank}.json" for rank in ranks]
    fetch_results(transport, source, run_id, folder, (), only=only)


def _is_result(path: str) -> bool:
    parts = path.casefold().split("/")
    if any(part.startswith(".") for part in parts):
        return False
    is_data = PurePosixPath(parts[-1]).suffix in RESULT_SUFFIXES
    return bool(
        (is_data and not _OF_TOOLS.fullmatch(parts[-1])) or _OF_TRACKERS.fullmatch("/".join(parts))
    )


def _check_room(total: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if total > MOST_BYTES:
        raise Problem(f"{data_size(total)}, and at most {data_size(MOST_BYTES)} are fetched")
    if total > max(0, free - SPARE_BYTES):
        raise Problem(f"{data_size(total)}, and only {data_size(free)} are free here")


def _check_path(path: str, kept: Collection[str]) -> None:
    # An honest host offers no such path: the whole offer is refused.
    parts = path.split("/")
    named = {"", ".", ".."} & set(parts) or is_named(parts[0], kept) or len(parts) > DEEPEST
    too_long = any(len(os.fsencode(part)) > LONGEST_NAME for part in parts)
    if named or too_long or not path.isprintable():
        raise Problem(f"a host must not send this file: {one_line(path[:200])}")


def _take_all(client: RpcClient, sizes: Mapping[str, int], folder: Path, fetched: Fetched) -> None:
    client.order("send", folder=fetched.folder, paths=list(sizes))
    room = sum(sizes.values()) + SPARE_BYTES // 2  # logs may still grow while they are sent
    for path in sizes:
        header = client.parsed(client.reply(), Header)
        room -= header.size
        if room < 0:
            raise Problem(f"the files have grown since they were listed, {path} for example")
        # a file that cannot be read on the host does not stop the others
        if problem := header.error or _take(client, folder / path, header.size):
            fetched.problems.append(f"{path}: {one_line(problem[:200])}")
        else:
            fetched.files.append(path)


def _take(client: RpcClient, target: Path, size: int) -> str:
    # Writes it whole or not at all; returns why it is missing.
    target.parent.mkdir(parents=True, exist_ok=True)
    incomplete = target.with_name(f".{target.name}.partial")
    try:
        with incomplete.open("wb") as file:
            for piece in client.receive(size):
                file.write(piece)
        ending = client.parsed(client.reply(), TransferEnd)
        if not ending.error:
            incomplete.replace(target)
        return ending.error  # the file became shorter while it was read, for example
    finally:
        incomplete.unlink(missing_ok=True)
