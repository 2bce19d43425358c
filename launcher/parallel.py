"""The same work for many hosts at once: bounded, in order, and failures are values."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from launcher.errors import AccessRefused, LauncherError

AT_ONCE = 64

T = TypeVar("T")
R = TypeVar("R")


def each(work: Callable[[T], R], items: Sequence[T]) -> list[R | LauncherError]:
    """Do `work` for every item, at most 64 at a time; results and errors in the items' order.

    The threads are daemons: Ctrl-C does not wait for the time limits of what they do.
    """
    todo: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, R | LauncherError]] = queue.SimpleQueue()
    for numbered in enumerate(items):
        todo.put(numbered)

    def work_off() -> None:
        while True:
            try:
                number, item = todo.get_nowait()
            except queue.Empty:
                return
            outcome: R | LauncherError = LauncherError("an internal error; its traceback is above")
            try:
                outcome = work(item)
            except LauncherError as error:
                outcome = error
            finally:
                done.put((number, outcome))

    for _ in range(min(len(items), AT_ONCE)):
        threading.Thread(target=work_off, daemon=True).start()
    outcomes = dict(done.get() for _ in items)
    return [outcomes[number] for number in range(len(items))]


def all_or_raise(outcomes: Iterable[R | LauncherError]) -> list[R]:
    """The results; if there are errors among them, one that names them all, a line each."""
    outcomes = list(outcomes)
    failures = [outcome for outcome in outcomes if isinstance(outcome, LauncherError)]
    if failures:
        kinds = [type(failure) for failure in failures]
        kind = AccessRefused if AccessRefused in kinds else kinds[0]
        raise kind("\n".join(map(str, failures)))
    return [outcome for outcome in outcomes if not isinstance(outcome, LauncherError)]
