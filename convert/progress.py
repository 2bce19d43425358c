"""The progress of a conversion: a bar on a terminal, a plain line every 5 s elsewhere."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from rackrun.convert.readers.records import Listed, Record

LINE_SECONDS = 5.0
METERED = 1000  # records between two readings of the clock

Show = Callable[[int], None]
"""Shows that so many images are done by now."""


@contextmanager
def meter(verb: str, total: int | None) -> Iterator[Show]:
    """Show progress to `total` images, None if it is not known; `verb` is what happens to them."""
    if sys.stderr.isatty():
        with _bar(verb, total) as show:
            yield show
        return
    start = shown = time.monotonic()
    done = 0

    def write(count: str, end: str) -> None:
        rate = f"{done / max(time.monotonic() - start, 1e-3):,.0f}/s"
        sys.stderr.write(f"{verb} {count} images, {rate}{end}\n")
        sys.stderr.flush()

    def show_lines(images: int) -> None:
        nonlocal done, shown
        done, now = images, time.monotonic()
        if now - shown < LINE_SECONDS:
            return
        shown = now
        if total is None:
            write(f"{done:,}", "")
        else:
            seconds = (total - done) * (now - start) / max(1, done)
            write(f"{done:,} of {total:,}", f", {seconds:,.0f} s left")

    yield show_lines
    write(f"{done:,}", f" in {time.monotonic() - start:.1f} s")


@contextmanager
def _bar(verb: str, total: int | None) -> Iterator[Show]:
    """Show a bar, which rich redraws by itself."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.progress import TimeRemainingColumn as Remaining

    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        Remaining(compact=True),
    )
    start = time.monotonic()
    with Progress(*columns, console=Console(stderr=True), expand=True) as bar:
        task = bar.add_task(verb, total=total, rate="")

        def show(images: int) -> None:
            rate = f"{images / max(time.monotonic() - start, 1e-3):,.0f}/s"
            bar.update(task, completed=images, rate=rate)

        yield show


def metered(files: Iterable[Listed], verb: str) -> Iterator[Listed]:
    """Yield these, and show a meter of the images meanwhile; their number is not known before."""
    count = 0
    with meter(verb, None) as show:
        for each in files:
            yield each
            count += isinstance(each, Record)
            if not count % METERED:
                show(count)
        show(count)
