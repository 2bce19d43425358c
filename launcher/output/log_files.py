"""The files of a run that the launcher writes: every byte of every rank, plan, result, report."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.errors import SaveError
from rackrun.launcher.run.events import Output
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result, as_plain
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line

TAIL_BYTES = 1 << 16
SEARCHED_BYTES = 1 << 23  # for the traceback of an exception with a long message
_TRACEBACK = re.compile(rb"^(?:\[rank\d+\]: ?)?Traceback \(most recent call last\):", re.MULTILINE)


class LogFiles:
    """Writes down a run as it happens; a failure of the disk is reported once."""

    def __init__(self, folder: RunFolder, plan: Plan) -> None:
        self.folder = folder
        self.hosts = {host.node: host.name for host in plan.hosts}
        self.refusal = ""
        """Why output is no longer written down; empty while it is."""
        self.waiting: dict[tuple[int, int | None, str], list[bytes]] = {}
        """Output by node, rank and stream, until the next `write`."""
        try:
            with translated_os_errors(folder.path):
                for host in self.hosts.values():
                    folder.log(host, None, "out").parent.mkdir(parents=True, exist_ok=True)
            write_json(folder.plan, dataclasses.asdict(plan), mode=0o600)  # has --env values
        except SaveError as error:
            raise SaveError(f"{error}; or type: --runs FOLDER") from error

    def record(self, event: Output) -> None:
        """Take bytes for the log of their rank and stream."""
        self.waiting.setdefault((event.node, event.rank, event.stream), []).append(event.data)

    def write(self) -> str:
        """Append to the logs what was recorded; return why that failed, the first time."""
        failed_before = self.refusal
        try:
            for source, data in self.waiting.items() if not self.refusal else ():
                # opened each time: a thousand ranks would need two thousand descriptors
                with self.log(*source).open("ab", buffering=0) as file:
                    for piece in data:  # joined, they would no longer be in the processor's cache
                        file.write(piece)
        except OSError as error:
            self.refusal = f"output is not logged any more: {error.strerror}"
        self.waiting.clear()
        return "" if failed_before else self.refusal

    def log(self, node: int, rank: int | None, stream: str) -> Path:
        """Return the log of a rank's stream, or of torchrun's on that host."""
        return self.folder.log(self.hosts[node], rank, stream)

    def tail(self, node: int, rank: int | None, stream: str) -> str:
        """Return the end of a log as text; empty when there is none, or it cannot be read.

        If the last traceback began before that, it begins with the beginning of that traceback:
        the message of an exception may be longer than any end, its type stands before it.
        """
        with suppress(OSError), self.log(node, rank, stream).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            end = _read_at(file, max(0, size - TAIL_BYTES))
            if size > TAIL_BYTES and not _TRACEBACK.search(end):
                end = _last_traceback(_read_at(file, max(0, size - SEARCHED_BYTES))) + end
            return end.decode("utf-8", "replace")
        return ""


def _read_at(file: BinaryIO, offset: int) -> bytes:
    file.seek(offset)
    return file.read()


def _last_traceback(log: bytes) -> bytes:
    # The first bytes of the last traceback that begins before the tail of the log; often nothing.
    end = len(log) - TAIL_BYTES
    before = log[: end + len(b"[rank999999]: Traceback (most recent call last):")]
    begun = [match.start() for match in _TRACEBACK.finditer(before) if match.start() < end]
    return log[begun[-1] : min(begun[-1] + TAIL_BYTES, end)] + b"\n" if begun else b""


def write_result(folder: RunFolder, result: Result) -> str:
    """Write how a run ended; return why that could not be done."""
    try:
        write_json(folder.result, as_plain(result))
    except SaveError as error:
        return str(error)
    return ""


def write_run_page(folder: Path, task: str) -> str:
    """Draw report.html of a task that has ended, also of one that failed before its first step.

    Return why that failed. The user's own program has no page if it measures nothing; `rackrun
    report RUN` draws one of its hosts.
    """
    if not (task or RunFolder(folder).metrics.exists()):
        return ""
    from rackrun.run_report.page import write  # takes a moment, at the end of a run

    try:
        write(folder)
    except Exception as error:  # whatever it is, the run is over
        return f"no report.html: {one_line(str(error))[:300]}"
    return ""


def write_json(path: Path, content: Any, mode: int = 0o666) -> None:
    """Write JSON whole or not at all, with this mode less the umask; SaveError."""
    write_whole(path, (json.dumps(content, indent=2, default=str) + "\n").encode(), mode)
