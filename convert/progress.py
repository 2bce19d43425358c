"""The progress of a conversion: a bar on a terminal, a plain line every 5 s elsewhere."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rackrun.convert.readers.records import Listed, Record

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

LINE_SECONDS = 5.0
METERED = 1000  # records between two readings of the clock


class Meter:
    """Writes a line every few seconds about the images that are done."""

    def __init__(self, verb: str, total: int | None) -> None:
        self._verb, self._total, self._images = verb, total, 0
        self._start = self._shown = time.monotonic()

    def show(self, images: int) -> None:
        """Show that so many are done by now."""
        self._images = images
        now = time.monotonic()
        if now - self._shown < LINE_SECONDS:
            return
        self._shown = now
        count, left = f"{images:,}", ""
        if self._total is not None:
            seconds = (self._total - images) * (now - self._start) / max(1, images)
            count, left = f"{count} of {self._total:,}", f", {seconds:,.0f} s left"
        self._write(count, left)

    def end(self) -> None:
        """Write the last line."""
        self._write(f"{self._images:,}", f" in {time.monotonic() - self._start:.1f} s")

    @property
    def rate(self) -> str:
        """Images per second."""
        return f"{self._images / max(time.monotonic() - self._start, 1e-3):,.0f}/s"

    def _write(self, count: str, end: str) -> None:
        sys.stderr.write(f"{self._verb} {count} images, {self.rate}{end}\n")
        sys.stderr.flush()


class _BarMeter(Meter):
    """Moves a bar of rich instead, which redraws itself."""

    def __init__(self, bar: "Bar", verb: str, total: int | None) -> None:
        super().__init__(verb, total)
        self._bar, self._task = bar, bar.add_task(verb, total=total, rate="")

    def show(self, images: int) -> None:
        """Move the bar."""
        self._images = images
        self._bar.update(self._task, completed=images, rate=self.rate)


@contextmanager
def meter(verb: str, total: int | None) -> Iterator[Meter]:
    """Show a meter for `total` images, None if it is not known; `verb` is what happens to them."""
    if not sys.stderr.isatty():
        lines = Meter(verb, total)
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


def metered(files: Iterable[Listed], verb: str) -> Iterator[Listed]:
    """Yield these, and show a meter of the images meanwhile; their number is not known before."""
    count = 0
    with meter(verb, None) as shown:
        for each in files:
            yield each
            count += isinstance(each, Record)
            if not count % METERED:
                shown.show(count)
        shown.show(count)
