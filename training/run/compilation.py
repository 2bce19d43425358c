"""Compilation as a phase of its own: with --compile any step may take minutes.

The first step compiles for batches of any size, and so does one with larger images, and the first
batch of an evaluation. (Batches of one image or
none are exceptions: torch compiles for them alone.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rackrun.contract import phases
from training.run.progress import ProgressReporter


@contextmanager
def compilation_reported(progress: ProgressReporter, compiles: bool) -> Iterator[None]:
    """Report the phase "compile" while torch compiles, and then the one that it interrupted."""
    if not compiles:
        yield
        return
    from torch._dynamo.callback import callback_handler  # a second that other runs save

    interrupted = []

    def begin(_: Any) -> None:
        interrupted.append(progress.current_phase)
        progress.phase(phases.COMPILE)

    def end(_: Any) -> None:
        progress.phase(interrupted.pop())

    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(begin)
        callback_handler.remove_end_callback(end)
