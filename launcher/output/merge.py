"""From the bytes of many ranks to lines for people: cut, cleaned, folded.

The logs keep every byte; this is only what a terminal gets. Equal lines that several ranks write
within a moment become one. More than a person could read passes through as one block.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from rackrun.launcher.run.events import Output, Stream
from rackrun.terminal import UNSAFE, clean

FOLD_SECONDS = 0.3
TRACEBACK = "Traceback (most recent call last):"
TRACEBACK_SECONDS = 10.0  # a rank may take its time to end: then the end shows it, once
FLOOD_BYTES = 1 << 14  # more than this of one source at one moment is not cut into lines
UNFINISHED_SECONDS = 10.0  # until a line without an end is shown, such as a progress bar
LINE_BYTES = 1 << 13  # a longer line is cut for the screen

MOVES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
"""What colors text, erases it, and moves the cursor."""
NESTED_BAR = re.compile(rb"\n+(\r[^\n]*?)(?:\x1b\[A)+")
"""A progress bar below another one, from which the cursor goes up again."""

_UNSAFE_BYTES = [bytes([code]) for code in (*range(0x20), 0x7F) if code not in b"\t\n"]


class LogSource(NamedTuple):
    """Origin of a line."""

    node: int
    rank: int | None
    stream: Stream


class Line(NamedTuple):
    """A line of text, or several of one source, and all who wrote it."""

    text: str
    sources: tuple[LogSource, ...]


@dataclass
class _Traceback:
    """Lines of a rank's standard error, held back from the start of a traceback on."""

    since: float
    lines: list[str] = field(default_factory=list)


class LogMerger:
    """Takes output as it comes, gives lines back a moment later."""

    def __init__(self, fold: bool) -> None:
        """Wait for equal lines of other ranks if `fold` is set."""
        self._fold_seconds = FOLD_SECONDS if fold else 0.0
        self._raw: dict[LogSource, list[bytes]] = {}
        self._rest: dict[LogSource, tuple[bytes, float]] = {}
        """The lines that have no end yet, and when they began."""
        self._waiting: dict[tuple[str, int], list[LogSource]] = {}
        """A text -> all who wrote it. Of what a rank repeats, the n-th joins the others' n-th."""
        self._waiting_since = 0.0
        self._counts: dict[tuple[LogSource, str], int] = {}
        """How often each source has written each text that waits."""
        self._tracebacks: dict[LogSource, _Traceback] = {}
        self._failed: set[int] = set()
        self.last: dict[int, str] = {}
        """The newest line of each node, finished or not."""

    def forget(self, rank: int) -> None:
        """Drop the traceback of a rank that has failed: the last lines show it."""
        self._failed.add(rank)

    def feed(self, event: Output) -> None:
        """Take some bytes of a rank."""
        source = LogSource(event.node, event.rank, event.stream)
        self._raw.setdefault(source, []).append(event.data)

    def take(self, now: float, everything: bool = False) -> list[Line]:
        """Return what can be shown now, in order of arrival; `everything`: all that waits."""
        lines: list[Line] = []
        for source, pieces in self._raw.items():
            begun, since = self._rest.pop(source, (b"", now))
            data = b"".join((begun, *pieces))
            end = data.rfind(b"\n")
            if len(data) > FLOOD_BYTES and end >= 0:
                lines += self._release()  # or earlier lines would come after these
                lines.append(Line(readable_lines(data[:end]), (source,)))
                data = data[end + 1 :]
            self._cut(source, data, since, now)
        self._raw.clear()
        for source, (data, since) in list(self._rest.items()):
            if everything or now - since >= UNFINISHED_SECONDS:
                del self._rest[source]
                self._add(source, data, now)
        self._end_tracebacks(now, everything)
        if everything or now - self._waiting_since >= self._fold_seconds:
            lines += self._release()
        return lines

    def _cut(self, source: LogSource, data: bytes, since: float, now: float) -> None:
        *lines, unfinished = NESTED_BAR.sub(rb"\1", data).split(b"\n")
        for line in lines:
            self._add(source, line, now)
        if len(unfinished) > LINE_BYTES and b"\r" not in unfinished:
            self._add(source, unfinished, now)
            unfinished = b""
        if b"\r" in unfinished[:-1]:  # a progress bar that draws over itself
            unfinished = unfinished[unfinished.rindex(b"\r", 0, -1) + 1 :]
            self.last[source.node] = readable(unfinished)
        if unfinished:
            self._rest[source] = (unfinished, now if lines else since)

    def _add(self, source: LogSource, line: bytes, now: float) -> None:
        text = readable(line)
        if text:
            self.last[source.node] = text
        is_begin = source.stream == "err" and text.endswith(TRACEBACK)
        if is_begin or source in self._tracebacks:
            self._tracebacks.setdefault(source, _Traceback(now)).lines.append(text)
        else:
            self._wait(source, text, now)

    def _end_tracebacks(self, now: float, everything: bool) -> None:
        # a rank that still runs has survived its traceback; a failed one's is shown at the end
        for source, traceback in list(self._tracebacks.items()):
            if everything or now - traceback.since > TRACEBACK_SECONDS:
                del self._tracebacks[source]
                for text in traceback.lines if source.rank not in self._failed else ():
                    self._wait(source, text, now)

    def _wait(self, source: LogSource, text: str, now: float) -> None:
        if not self._waiting:
            self._waiting_since = now
        number = self._counts[source, text] = self._counts.get((source, text), 0) + 1
        self._waiting.setdefault((text, number), []).append(source)

    def _release(self) -> list[Line]:
        lines = [Line(text, tuple(sources)) for (text, _), sources in self._waiting.items()]
        self._waiting.clear()
        self._counts.clear()
        return lines


def readable_lines(data: bytes) -> str:
    """Return lines that a terminal shows and does not obey; most are that, however many."""
    with suppress(UnicodeDecodeError):
        if not any(byte in data for byte in _UNSAFE_BYTES):
            text = data.decode()
            if text.isascii() or not UNSAFE.search(text.replace("\n", "")):
                return text
    return "\n".join(map(readable, data.split(b"\n")))


def readable(line: bytes) -> str:
    """Return a line that a terminal shows and does not obey; the last state of a redrawn one."""
    text = line[: LINE_BYTES + 1].decode("utf-8", "replace").rstrip("\r")
    text = clean(MOVES.sub("", text.rpartition("\r")[2]))
    return f"{text} ... ({len(line)} bytes)" if len(line) > LINE_BYTES else text
