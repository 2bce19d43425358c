"""From the bytes of many ranks to lines for people: cut, cleaned, folded, and never too many.

The logs keep every byte; this is only what the screen gets. Equal lines that several ranks write
within a moment become one. What is more than a person could read becomes a `Flood`, whose cost
does not depend on the number of its lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from rackrun.launcher.run.events import Output, Stream
from rackrun.terminal import UNSAFE, clean

FOLD_SECONDS = 0.3
TRACEBACK = "Traceback (most recent call last):"
TRACEBACK_SECONDS = 10.0  # a rank may take its time to end: then the end shows it, once
FLOOD_BYTES = 1 << 15  # more than this of one source at one moment is a flood
DELUGE_BYTES = 1 << 18  # more than this of all: an eighth of that is one already
BAR_SECONDS = 10.0  # between two looks at a progress bar that draws over itself
LINE_BYTES = 1 << 13  # a longer line is cut for the screen

_UNSAFE_BYTES = [bytes([code]) for code in (*range(0x20), 0x7F) if code not in b"\t\n"]


class LogSource(NamedTuple):
    """Origin of a line."""

    node: int
    rank: int | None
    stream: Stream


@dataclass(frozen=True)
class Line:
    """A line of text, and all who wrote it."""

    text: str
    sources: tuple[LogSource, ...]


@dataclass(frozen=True)
class Flood:
    """Whole lines of one source, as they came: more than a person reads."""

    data: bytes
    sources: tuple[LogSource, ...]

    @property
    def count(self) -> int:
        """Return the number of lines."""
        return self.data.count(b"\n")

    def lines(self) -> Iterator[str]:
        """Yield each of them, cleaned."""
        return (readable(line) for line in self.data[:-1].split(b"\n"))

    @property
    def clean(self) -> bool:
        """Return True when a terminal may have the bytes unchanged."""
        return is_clean(self.data)


Shown: TypeAlias = Line | Flood


@dataclass
class _PendingLine:
    """A line that waits a moment for its equals."""

    number: int
    since: float
    sources: list[LogSource] = field(default_factory=list)


@dataclass
class _HeldLines:
    """Lines of a rank's standard error, held from the start of a traceback on."""

    since: float
    lines: list[str] = field(default_factory=list)


@dataclass
class _EqualLines:
    """The waiting lines of one text: the n-th of each source are one line."""

    lines: deque[_PendingLine] = field(default_factory=deque)
    released: int = 0
    counts: dict[LogSource, int] = field(default_factory=dict)
    """How often each source has written it."""


class LogMerger:
    """Takes output as it comes, gives lines back a moment later."""

    def __init__(self, fold: bool) -> None:
        """Wait for equal lines of other ranks if `fold` is set."""
        self.fold_seconds = FOLD_SECONDS if fold else 0.0
        self.raw: dict[LogSource, list[bytes]] = {}
        self.raw_bytes = 0
        self.rest: dict[LogSource, bytes] = {}
        self.bars: dict[LogSource, float] = {}
        """When a progress bar of a source was shown last, or first seen."""
        self.waiting: dict[str, _EqualLines] = {}
        self.number = 0
        self.held: dict[LogSource, _HeldLines] = {}
        self.failed: set[int] = set()
        self.last: dict[int, str] = {}
        """The newest line of each node, finished or not."""

    def forget(self, rank: int) -> None:
        """Drop the traceback of a rank that has failed: the last lines show it."""
        self.failed.add(rank)

    def feed(self, event: Output) -> None:
        """Take some bytes of a rank."""
        source = LogSource(event.node, event.rank, event.stream)
        self.raw.setdefault(source, []).append(event.data)
        self.raw_bytes += len(event.data)

    def take(self, now: float, everything: bool = False) -> list[Shown]:
        """Return what can be shown now: all that has waited long enough, in order of arrival."""
        shown: list[Shown] = []
        flood_bytes = FLOOD_BYTES if self.raw_bytes < DELUGE_BYTES else FLOOD_BYTES // 8
        for source, raw in self.raw.items():
            data = b"".join((self.rest.pop(source, b""), *raw))
            if len(data) > flood_bytes:
                shown += self._release(now, source)  # or its earlier lines would come after these
                end = data.rfind(b"\n") + 1
                if end:
                    shown.append(Flood(data[:end], (source,)))
                data = data[end:]
            self._cut(source, data, now)
        self.raw.clear()
        self.raw_bytes = 0
        if everything:
            for source, data in self.rest.items():
                self._add(source, data, now)
            self.rest.clear()
        self._let_go(now, everything)
        waiting = 0.0 if everything else self.fold_seconds
        return shown + self._release(now - waiting)

    def _cut(self, source: LogSource, data: bytes, now: float) -> None:
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._add(source, line, now)
        if len(rest) > LINE_BYTES and b"\r" not in rest:
            self._add(source, rest, now)
            rest = b""
        if b"\r" in rest[:-1]:  # a progress bar that draws over itself
            rest = rest[rest.rindex(b"\r", 0, -1) + 1 :]
            self.last[source.node] = readable(rest)
            if now - self.bars.setdefault(source, now) >= BAR_SECONDS:
                self.bars[source] = now
                self._wait(source, readable(rest), now)
        if rest:
            self.rest[source] = rest

    def _add(self, source: LogSource, line: bytes, now: float) -> None:
        text = readable(line)
        if text:
            self.last[source.node] = text
        if source.stream == "err" and (text.endswith(TRACEBACK) or source in self.held):
            self.held.setdefault(source, _HeldLines(now)).lines.append(text)
        else:
            self._wait(source, text, now)

    def _let_go(self, now: float, everything: bool) -> None:
        # a rank that still runs has survived its traceback; a failed one's is shown at the end
        for source, held in list(self.held.items()):
            if everything or now - held.since > TRACEBACK_SECONDS:
                del self.held[source]
                for text in held.lines if source.rank not in self.failed else ():
                    self._wait(source, text, now)

    def _wait(self, source: LogSource, text: str, now: float) -> None:
        # A rank that prints a text twice is not two ranks: the n-th one joins the others' n-th, but
        # for those that are on the screen already.
        same = self.waiting.setdefault(text, _EqualLines())
        nth = max(same.counts.get(source, 0), same.released)
        same.counts[source] = nth + 1
        if nth == same.released + len(same.lines):
            self.number += 1
            same.lines.append(_PendingLine(self.number, now))
        same.lines[nth - same.released].sources.append(source)

    def _release(self, until: float, source: LogSource | None = None) -> list[Shown]:
        # lines that have waited since `until` or longer; of one source, with equal lines of others
        due: list[tuple[int, Line]] = []
        for text, same in list(self.waiting.items()):
            if source is not None and source not in same.counts:
                continue
            while same.lines and same.lines[0].since <= until:
                line = same.lines.popleft()
                same.released += 1
                due.append((line.number, Line(text, tuple(line.sources))))
            if not same.lines:
                del self.waiting[text]
        return [line for _, line in sorted(due, key=lambda pair: pair[0])]


def is_clean(lines: bytes) -> bool:
    """Return True for lines that a terminal may have unchanged."""
    if any(byte in lines for byte in _UNSAFE_BYTES):
        return False
    try:
        text = lines.decode()
    except UnicodeDecodeError:
        return False
    return text.isascii() or not UNSAFE.search(text.replace("\n", ""))


def readable(line: bytes) -> str:
    """Return a line that a terminal shows and does not obey; the last state of a redrawn one."""
    text = line[: LINE_BYTES + 1].decode("utf-8", "replace").rstrip("\r")
    text = clean(text.rpartition("\r")[2])
    return f"{text} ... ({len(line)} bytes)" if len(line) > LINE_BYTES else text
