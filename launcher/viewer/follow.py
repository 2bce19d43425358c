"""The entries of a run, from its folders on this machine: one for each attempt.

The ids of all attempts begin alike. Outputs are in the logs: an entry has only their sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.launcher.viewer.entries import Began, Ended, Entry, EntryReader, Wrote
from rackrun.run_folder import RunFolder
from rackrun.runs import folders_of, is_supervised
from rackrun.shapes import Misshapen, parsed_json

LINE_BYTES = 1 << 24  # a plan names every host


def entries_of(folder: RunFolder, follow: bool) -> Iterator[tuple[Entry, bytes] | None]:
    """Yield the entries of all attempts, with the bytes of outputs; None while nothing comes.

    Ends with the run or with its controller; without `follow`, with what is there.
    """
    attempts: dict[Path, AttemptEntries] = {}
    while True:
        for path in folders_of(folder.path):
            attempts.setdefault(path, AttemptEntries(RunFolder(path)))
        # asked before entries are read: what is written in between is read in the next round
        newest = list(attempts.values())[-1].folder.events
        is_alive = newest.exists() and is_supervised(newest)
        came = False
        for attempt in attempts.values():
            for entry, data in attempt.new():
                came = True
                yield entry, data
                if isinstance(entry, Ended):
                    return
        if not came:
            if not (follow and is_alive):
                return
            yield None


class AttemptEntries:
    """The entries of one attempt, as far as they have been read."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
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
                attempt = replace(entry.attempt, folder=str(self.folder.path))
                entry = replace(entry, attempt=attempt)
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
