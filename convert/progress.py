"""The progress of a conversion: a bar on a terminal, a plain line every 5 s elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LINE_SECONDS = 5.0
METERED = 1000  # records between two readings of the clock

_Record = TypeVar("_Record")


class Progress(NamedTuple):
    """Work done since the last report."""

    images: int
    bytes: int = 0


class Meter:
    """Counts what is done, and writes a line about it every few seconds."""

    def __init__(self, verb: str, total: int | None, what: str) -> None:
        self._verb, self._total, self._what = verb, total, what
        self._images = self._bytes = 0
        self._start = self._shown = time.monotonic()

    def advance(self, progress: Progress) -> None:
        """Add work that has been done."""
        self._images += progress.images
        self._bytes += progress.bytes
        now = time.monotonic()
        if now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        count, left = f"{self._images:,}", ""
        if self._total is not None:
            seconds = (self._total - self._images) * (now - self._start) / max(1, self._images)
            count, left = f"{count} of {self._total:,}", f", {seconds:,.0f} s left"
        self._write(count, left)

    def end(self) -> None:
        """Write the last line."""
        self._write(f"{self._images:,}", f" in {time.monotonic() - self._start:.1f} s")

    def _write(self, count: str, end: str) -> None:
        sys.stderr.write(f"{self._verb} {count} {self._what}, {self._rate(', ')}{end}\n")
        sys.stderr.flush()

    def _rate(self, separator: str) -> str:
        seconds = max(time.monotonic() - self._start, 1e-3)
        rate = f"{self._images / seconds:,.0f}/s"
        # Work that reads no images, such as comparing hashes, reports no bytes.
        return f"{rate}{separator}{self._bytes / seconds / 1e6:,.0f} MB/s" if self._bytes else rate


class _BarMeter(Meter):
    """Moves a bar of rich instead, which redraws itself."""

    def __init__(self, bar: "Bar", verb: str, total: int | None) -> None:
        super().__init__(verb, total, "")
        self._bar, self._task = bar, bar.add_task(verb, total=total, rate="")

    def advance(self, progress: Progress) -> None:
        """Count, and move the bar."""
        self._images += progress.images
        self._bytes += progress.bytes
        self._bar.update(self._task, completed=self._images, rate=self._rate(" "))


@contextmanager
def meter(verb: str, total: int | None, what: str = "images") -> Iterator[Meter]:
    """Show a meter for `total` images, None if it is not known; `verb` is what happens to them."""
    if not sys.stderr.isatty():
        lines = Meter(verb, total, what)
        yield lines
        lines.end()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
    )
    with Bar(*columns, console=Console(stderr=True), expand=True) as bar:
        yield _BarMeter(bar, verb, total)


def metered(records: Iterable[_Record], verb: str) -> Iterator[_Record]:
    """Yield these records, and show a meter of them meanwhile; their number is not known before."""
    count = 0
    with meter(verb, None) as shown:
        for count, record in enumerate(records, start=1):
            yield record
            if not count % METERED:
                shown.advance(Progress(METERED))
        shown.advance(Progress(count % METERED))
