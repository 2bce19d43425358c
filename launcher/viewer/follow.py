"""The entries of a run, from its folder on this machine.

Outputs are in the logs of their attempt: an entry has only their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from msgspec import structs

from rackrun.errors import UsageError
from rackrun.launcher.viewer.entries import Began, Ended, Entry, EntryReader, Wrote
from rackrun.run_folder import RunFolder
from rackrun.runs import is_supervised
from rackrun.shapes import Misshapen, parsed_json

LINE_BYTES = 1 << 24  # a plan names every host


def entries_of(folder: RunFolder, follow: bool) -> Iterator[tuple[Entry, bytes] | None]:
    """Yield the entries of a run, with the bytes of outputs; None while nothing comes.

    Ends with the run or with its controller; without `follow`, with what is there.
    """
    entries = RunEntries(folder)
    while True:
        # asked before entries are read: what is written in between is read in the next round
        is_alive = is_supervised(folder)
        came = False
        for entry, data in entries.new():
            came = True
            yield entry, data
            if isinstance(entry, Ended):
                return
        if not came:
            if not (follow and is_alive):
                return
            yield None


class RunEntries:
    """The entries of a run, as far as they have been read."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = replace(folder, attempt=0)
        self._reader = EntryReader()
        self._read: dict[Path, int] = {}
        """Bytes of each file that have been read."""

    def new(self) -> Iterator[tuple[Entry, bytes]]:
        """Yield what has come since the last time."""
        for line in self._lines():
            try:
                entry = self._reader.entry(parsed_json(line, LINE_BYTES))
            except Misshapen as error:
                raise UsageError(f"{self.folder.events}: {error}") from None
            if isinstance(entry, Began):
                self.folder = replace(self.folder, attempt=self.folder.attempt + 1)
                attempt = structs.replace(entry.attempt, folder=str(self.folder.path))
                entry = structs.replace(entry, attempt=attempt)
            yield entry, self._output(entry) if isinstance(entry, Wrote) else b""

    def _lines(self) -> Iterator[bytes]:
        # whole lines only: the last one may still be in the making
        with suppress(FileNotFoundError), self.folder.events.open("rb") as file:
            file.seek(self._read.get(self.folder.events, 0))
            while (line := file.readline(LINE_BYTES)).endswith(b"\n"):
                self._read[self.folder.events] = file.tell()
                yield line

    def _output(self, entry: Wrote) -> bytes:
        # fewer bytes than were written where the disk was full
        node, rank, stream, size = entry.output
        assert self._reader.plan is not None
        path = self.folder.log(self._reader.plan.hosts[node].name, rank, stream)
        with suppress(OSError), path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            data = file.read(size)
            self._read[path] = file.tell()
            return data
        return b""
