"""Brings the working tree to the hosts before a run."""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from rackrun.contract import variables
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.files.working_tree import WorkingTree
from rackrun.launcher.remote import upload
from rackrun.launcher.remote.files import PIECE_BYTES, PROJECT_LOCK, file_digest
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import all_or_raise, each
from rackrun.launcher.transport.rpc import LISTING_BYTES, Reply, RpcClient
from rackrun.shapes import Shape, Whole, at_most, between
from rackrun.terminal import one_line

Say = Callable[[str], object]

FILES_PER_LINE = 500
BATCH_BYTES = 1 << 18
MOST_FILES = 1_000_000
DIGEST_SECONDS = 600.0  # a host may read gigabytes to know what differs
INSTALL_SECONDS = 1800.0  # without a line of output: torch alone is some gigabytes
MOST_LINES = 100_000
BRING_WHEELS = ", or copy wheels there with --sync-wheels FOLDER"


@dataclass(frozen=True)
class Destination:
    """Destination of the code on one host."""

    transport: Transport
    workdir: str
    python: str = ""
    image: bool = False
    """The ranks run in an image, which has an environment of its own."""
    is_own_command: bool = False
    """The ranks run the user's own command, for which a torch that is there is enough."""


class Differences(Shape, frozen=True):
    """Differences that a host reports."""

    root: str
    paths: Annotated[tuple[str, ...], at_most(MOST_FILES)]
    surplus: Annotated[int, between(0, MOST_FILES)]
    runs: Annotated[tuple[str, ...], at_most(upload.MOST_RUNS)] = ()
    """The runs whose ranks work in that folder, where files differ."""


class UploadProgress(Shape, frozen=True):
    """Report of a host while it makes the environment, and at the end."""

    line: str | None = None
    code: Whole | None = None


def upload_code(code: WorkingTree, destinations: Sequence[Destination], say: Say) -> None:
    """Make the files of every host equal to ours, all hosts at once; only what differs is sent."""
    all_or_raise(each(partial(_bring, code, say=say), destinations))


def _bring(code: WorkingTree, destination: Destination, say: Say) -> None:
    name = destination.transport.name
    with closing(RpcClient(destination.transport, destination.python)) as client:
        listing = {"files": dict(code.files), "modes": dict(code.modes)}
        client.order("differences", root=destination.workdir, **listing)
        reply = client.reply(DIGEST_SECONDS, LISTING_BYTES)
        differences = client.parsed(_checked(name, reply), Differences)
        if unknown := set(differences.paths) - code.files.keys():
            asked = one_line(min(unknown)[:100])
            raise PreflightRefused(
                f"{name}: requested a file that is not part of the code: {asked}"
            )
        if differences.runs:
            runs, where = (
                one_line(text) for text in (", ".join(differences.runs), differences.root)
            )
            raise PreflightRefused(
                f"{name}: files differ in {where}, which run {runs} is using; type --workdir OTHER,"
                " or type the same command again after its end"
            )
        if differences.paths or differences.surplus:
            _send(client, code, differences, name, say)
            _checked(name, client.reply())
        if not (destination.python or destination.image):  # which have packages of their own
            is_own = destination.is_own_command
            hint = "" if is_own and PROJECT_LOCK in code.files else BRING_WHEELS
            _make_environment(client, differences.root, name, is_own, hint, say)


def _send(
    client: RpcClient, code: WorkingTree, differences: Differences, name: str, say: Say
) -> None:
    batch = bytearray()  # one stream of large pieces: a round trip for each file would take longer
    total = len(differences.paths)
    client.order("unpack", root=differences.root, paths=list(code.files), count=total)
    for number, path in enumerate(differences.paths, start=1):
        for piece in _pieces(code, path):
            batch += piece
            if len(batch) > BATCH_BYTES:
                client.send(bytes(batch))
                batch.clear()
        if number == total or number % FILES_PER_LINE == 0:
            say(f"{name}: {number} of {total} files copied to {one_line(differences.root)}")
    client.send(bytes(batch) + bytes(tarfile.BLOCKSIZE))


def _pieces(code: WorkingTree, path: str) -> Iterator[bytes]:
    # Its part of a tar: header, bytes, zeros up to the next block. A file that has changed since
    # its digest was taken aborts the copy: all hosts must have the same code, which every attempt
    # checks by digest.
    source, info = code.source(path), tarfile.TarInfo(path)
    try:
        if path not in code.modes:
            info.type, info.linkname = tarfile.SYMTYPE, os.fspath(source.readlink())
            yield info.tobuf()
            same = file_digest(os.fspath(source)) == code.files[path]
        else:
            digest = hashlib.sha256()
            with source.open("rb") as file:
                info.mode, info.size = code.modes[path], os.fstat(file.fileno()).st_size
                yield info.tobuf()
                left = info.size
                while left and (piece := file.read(min(left, PIECE_BYTES))):
                    digest.update(piece)
                    left -= len(piece)
                    yield piece
            yield bytes(-info.size % tarfile.BLOCKSIZE)
            same = not left and digest.hexdigest() == code.files[path]
    except OSError as error:
        raise PreflightRefused(f"{path} cannot be copied: {error.strerror}") from error
    if not same:
        raise PreflightRefused(f"{path} changed while it was copied; type the same command again")


def _make_environment(
    client: RpcClient, root: str, name: str, is_own_command: bool, hint: str, say: Say
) -> None:
    chosen = {
        variable: os.environ.get(variable, "") for variable in (variables.OWN_TORCH, variables.LOCK)
    }
    chosen[variables.OWN_COMMAND] = "1" if is_own_command else ""
    client.order("environment", root=root, chosen=chosen)
    last = ""
    for _ in range(MOST_LINES):
        progress = client.parsed(_checked(name, client.reply(INSTALL_SECONDS)), UploadProgress)
        if progress.line is None:
            break
        last = one_line(progress.line)
        say(f"{name}: {last}")
    if progress.line is not None or progress.code:
        where = one_line(root)
        raise PreflightRefused(
            f"{name}: no environment could be created in {where}: {last}; to use another"
            f" interpreter that has torch, write python= in hosts.txt{hint}"
        )


def _checked(name: str, reply: Reply) -> Reply:
    if error := reply.get("error"):
        reason = one_line(str(error)[:500])
        raise PreflightRefused(f"{name}: the code could not be copied there: {reason}")
    return reply
