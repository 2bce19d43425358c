"""The folder of a run: the name and the writer of every file in it, and how one is made."""

from __future__ import annotations

import errno
import itertools
import os
import re
import secrets
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rackrun.atomic import translated_os_errors
from rackrun.contract.files import LATEST, RETURNED, SENT_FILES
from rackrun.errors import SaveError

RUNS = Path("runs")
"""The folder of run folders, unless another is asked for."""

RUN_NAME = r"(?P<start>[0-9]{8}-[0-9]{6})-(?P<name>[A-Za-z0-9._-]{1,239})"
"""The grammar of a run folder's name, which other machines may send."""

PRIVATE_MODE, SHARED_MODE = 0o700, 0o777  # of run folders, less the umask

LAUNCHER_FILES = frozenset(
    {
        "run.toml",
        "hosts.json",
        "report.html",
        "state.json",
        "events.jsonl",
        "output.log",
        "checkpoints",
        *SENT_FILES.values(),
    }
)
"""At the top of a run folder, what no host supplies.

`rerun` obeys run.toml, `stop` hosts.json, a browser report.html; a resumed run continues from
checkpoints, and a tracker the run of its own that one of SENT_FILES names.
"""

SUPERVISOR_FILES = frozenset({"plan.json", "result.json", "usage.jsonl", "logs", RETURNED})
"""What the supervisor of a run writes."""

_NODE_SUFFIX = re.compile(r"-node\d+(?=\.)")
_NODE_PLAN = re.compile(r"plan-node([1-9][0-9]{0,5})\.json")


class _File:
    """A file or folder of a run, by its name; with `of_node`, the launcher of each node has one."""

    def __init__(self, name: str, of_node: bool = False) -> None:
        self.stem, self.dot, self.ending = name.partition(".")
        self.of_node = of_node

    def __get__(self, run: RunFolder, owner: type[RunFolder]) -> Path:
        node = f"-node{run.node}" if self.of_node and run.node else ""
        return run.path / f"{self.stem}{node}{self.dot}{self.ending}"


@dataclass(frozen=True)
class RunFolder:
    """Every path of a run: first those that its launcher writes, then those of its first rank."""

    path: Path
    node: int = 0
    """Whose launcher it is, when every node has one of its own: they may share the folder."""
    attempt: int = 1
    """Which attempt writes logs: a restart goes on in the same folder."""

    plan = _File("plan.json", of_node=True)
    """What runs where, written before anything starts."""
    settings = _File("run.toml")
    """The settings file with which the run can be started again."""
    hosts = _File("hosts.json")
    """How its hosts are reached, for `stop`; not there for a run on this machine."""
    result = _File("result.json", of_node=True)
    """The result, written when the run has ended."""
    returned = _File(RETURNED)
    """The folder with what a function returned on each rank."""
    events = _File("events.jsonl", of_node=True)
    """What happened, a JSON object a line; its lock is held as long as the run is supervised."""
    output = _File("output.log", of_node=True)
    """The lines of all ranks, merged, and the launcher's own, as a terminal shows them."""
    usage = _File("usage.jsonl", of_node=True)
    """What the hosts used over time, a JSON object per line."""
    state = _File("state.json", of_node=True)
    """The run at this moment, replaced once a second while it goes on."""
    logs = _File("logs")
    """The folder with a folder per host, and one per attempt in it."""

    config = _File("config.json")
    """The settings and what they were resolved to, written before the first step."""
    metrics = _File("metrics.jsonl")
    """One JSON object per line: training intervals and evaluations."""
    tensorboard = _File("tensorboard")
    """The folder of TensorBoard's event files."""
    checkpoints = _File("checkpoints")
    """The folder of the checkpoints."""
    best = _File("checkpoints/best.pt")
    """The checkpoint with the best validation accuracy."""
    final = _File("final.pt")
    """The trained weights, with everything that `predict` needs."""
    predictions = _File("predictions.npz")
    """A grid of validation images with the predictions of the model."""
    hardest = _File("hardest.npz")
    """The same of those with the highest loss in the last evaluation."""
    first_batch = _File("first_batch.npz")
    """A grid of training images as the model sees them."""
    trace = _File("trace.json.gz")
    """The steps of --profile-steps, as torch.profiler traces them."""
    report = _File("report.html")
    """The report of the run as a page."""

    def log(self, host: str, rank: int | None, stream: str) -> Path:
        """Return the file for one stream of one rank, or of a host's torchrun."""
        source = "torchrun" if rank is None else f"rank-{rank}"
        return self.logs / file_name(host) / str(self.attempt) / f"{source}.{stream}"

    def of_nodes(self) -> list[RunFolder]:
        """Return the files of every node whose launcher writes here, the first node's first."""
        names = [_NODE_PLAN.fullmatch(path.name) for path in self.path.glob("plan-node*.json")]
        nodes = sorted(int(match[1]) for match in names if match)
        return [self, *(replace(self, node=node) for node in nodes)]

    def checkpoint(self, step: int) -> Path:
        """Return the checkpoint that was written after this many steps."""
        return self.checkpoints / f"step-{step:08d}.pt"

    def make(self) -> None:
        """Make the folder and that of the checkpoints; raise SaveError if it cannot be."""
        with translated_os_errors(self.path):
            self.checkpoints.mkdir(parents=True, exist_ok=True)


def is_named(name: str, names: Collection[str]) -> bool:
    """Return True for one of these files, also of another node or in another case."""
    return _NODE_SUFFIX.sub("", name.casefold()) in names


def new_run_folder(runs: Path, name: str, share: bool = False) -> RunFolder:
    """Make `runs/<time>-<name>`, with a number after it when that exists already.

    It is closed to other accounts, unless it is to be shared.
    """
    stem = folder_name(name)
    candidates = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    try:
        is_new = _make_folder(runs, SHARED_MODE)
        if is_new and any((folder / ".git").exists() for folder in runs.resolve().parents):
            (runs / ".gitignore").write_text("*\n")  # it lies in the user's working tree
        mode = SHARED_MODE if share else PRIVATE_MODE
        path = next(runs / name for name in candidates if _make_folder(runs / name, mode))
    except OSError as error:
        raise _no_run_folder(runs, error) from error
    point_latest_to(path)
    return RunFolder(path.resolve())


def join_run_folder(path: Path, share: bool = False) -> None:
    """Make the folder of a run that node 0 has begun; on shared storage, it is there already."""
    try:
        if _make_folder(path, SHARED_MODE if share else PRIVATE_MODE):
            point_latest_to(path)
    except OSError as error:
        raise _no_run_folder(path.parent, error) from error


def _no_run_folder(runs: Path, error: OSError) -> SaveError:
    hint = "--name SHORTER" if error.errno == errno.ENAMETOOLONG else "--runs FOLDER"
    return SaveError(f"cannot make a run folder in {runs}: {error.strerror}; type: {hint}")


def folder_name(name: str) -> str:
    """Return the name of the folder of a run that starts now."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{file_name(name)}"


def file_name(text: str) -> str:
    """Return `text` as a file name: letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9._-]+", "_", text).lstrip(".") or "_"


def point_latest_to(folder: Path) -> None:
    """Make `runs/latest` a link to this run; what is there and is no such link stays."""
    link = folder.with_name(LATEST)
    partial = folder.with_name(f".{LATEST}.{secrets.token_hex(4)}")
    with suppress(OSError):  # a file system without links costs only this convenience
        if os.path.lexists(link) and not re.fullmatch(RUN_NAME, str(link.readlink())):
            return
        partial.symlink_to(folder.name)
        partial.replace(link)


def _make_folder(folder: Path, mode: int) -> bool:
    """Make a folder and its parents; return False where it was there already."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        folder.mkdir(mode)
    except FileExistsError:
        return False
    return True
