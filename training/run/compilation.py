"""Report compilation as a separate phase: with --compile, a step may take minutes.

The first step compiles for batches of any size, and so do the first step with larger images and the
first batch of an evaluation. (Batches of one image or none are exceptions: torch compiles for them
separately.)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rackrun.contract import phases
from training.run.progress import ProgressReporter


@contextmanager
def compilation_reported(progress: ProgressReporter, compiles: bool) -> Iterator[None]:
    """Report the phase "compile" while torch compiles, and afterwards the previous phase again."""
    if not compiles:
        yield
        return
    from torch._dynamo.callback import callback_handler  # takes a second, only with --compile

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
