"""The progress of a conversion: a bar on a terminal, a plain line every 5 s elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LINE_SECONDS = 5.0
METERED = 1000  # records between two readings of the clock

_Record = TypeVar("_Record")


class Progress(NamedTuple):
    """Work done since the last report."""

    images: int
    bytes: int


class Meter(Protocol):
    """Shows the progress of a task."""

    def advance(self, progress: Progress) -> None:
        """Add work that has been done."""


@contextmanager
def meter(verb: str, total: int | None, what: str = "images") -> Iterator[Meter]:
    """Show a meter for `total` images, None if it is not known; `verb` is what happens to them."""
    if not sys.stderr.isatty():
        lines = _Lines(verb, total, what)
        yield lines
        lines.end()
        return
    with _bar(verb, total) as bar:
        yield bar


def metered(records: Iterable[_Record], verb: str) -> Iterator[_Record]:
    """Yield these records, and show a meter of them meanwhile; their number is not known before."""
    count = 0
    with meter(verb, None) as shown:
        for count, record in enumerate(records, start=1):
            yield record
            if not count % METERED:
                shown.advance(Progress(METERED, 0))
        shown.advance(Progress(count % METERED, 0))


class _Lines:
    def __init__(self, verb: str, total: int | None, what: str) -> None:
        self._verb, self._total, self._what = verb, total, what
        self._images = self._bytes = 0
        self._start = self._shown = time.monotonic()

    def advance(self, progress: Progress) -> None:
        """Count, and write a line when it is time for one."""
        self._images += progress.images
        self._bytes += progress.bytes
        now = time.monotonic()
        if now - self._shown >= LINE_SECONDS:
            self._shown = now
            self._say(*self._progress(now - self._start))

    def end(self) -> None:
        """Write the last line."""
        self._say(f"{self._images:,}", f" in {time.monotonic() - self._start:.1f} s")

    def _progress(self, seconds: float) -> tuple[str, str]:
        """Return the number of images so far, and the time left if the total is known."""
        if self._total is None:
            return f"{self._images:,}", ""
        left = (self._total - self._images) * seconds / max(1, self._images)
        return f"{self._images:,} of {self._total:,}", f", {left:,.0f} s left"

    def _say(self, images: str, end: str) -> None:
        seconds = max(time.monotonic() - self._start, 1e-3)
        rate = _rate(self._images, self._bytes, seconds, ", ")
        sys.stderr.write(f"{self._verb} {images} {self._what}, {rate}{end}\n")
        sys.stderr.flush()


def _rate(images: float, read: int, seconds: float, between: str) -> str:
    """Return images per second and, if their bytes were read, MB per second."""
    rate = f"{images / seconds:,.0f}/s"
    return f"{rate}{between}{read / seconds / 1e6:,.0f} MB/s" if read else rate


@contextmanager
def _bar(verb: str, total: int | None) -> Iterator[Meter]:
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
        yield _Bar(bar, verb, total)


class _Bar:
    def __init__(self, bar: "Bar", verb: str, total: int | None) -> None:
        self._bar = bar
        self._task = bar.add_task(verb, total=total, rate="")
        self._bytes = 0

    def advance(self, progress: Progress) -> None:
        """Move the bar."""
        self._bytes += progress.bytes
        task = self._bar.tasks[0]
        seconds = max(task.elapsed or 0, 1e-3)
        rate = _rate(task.completed, self._bytes, seconds, " ")
        self._bar.update(self._task, advance=progress.images, rate=rate)
