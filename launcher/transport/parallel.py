"""The same work for many hosts at once: bounded, in order, and failures are values."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from rackrun.errors import Problem
from rackrun.launcher.errors import AccessRefused
from rackrun.launcher.run.host_names import said_once

AT_ONCE = 64

T = TypeVar("T")
R = TypeVar("R")


def each(
    work: Callable[[T], R],
    items: Sequence[T],
    seconds: float | None = None,
    late: Callable[[T], Problem] = lambda item: Problem(f"{item}: too late"),
) -> list[R | Problem]:
    """Do `work` for every item, at most 64 at a time; results and errors in the items' order.

    Items that are not done after `seconds` get the error that `late` returns. The threads are
    daemons, so neither that nor Ctrl-C waits for them.
    """
    todo: queue.SimpleQueue[tuple[int, T]] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, R | Problem]] = queue.SimpleQueue()
    for numbered in enumerate(items):
        todo.put(numbered)

    def work_off() -> None:
        while True:
            try:
                number, item = todo.get_nowait()
            except queue.Empty:
                return
            outcome: R | Problem = Problem("an internal error; its traceback is above")
            try:
                outcome = work(item)
            except Problem as error:
                outcome = error
            finally:
                done.put((number, outcome))

    for _ in range(min(len(items), AT_ONCE)):
        threading.Thread(target=work_off, daemon=True).start()
    outcomes = dict(_until(done, len(items), seconds))
    return [
        outcomes[number] if number in outcomes else late(item) for number, item in enumerate(items)
    ]


def _until(done: queue.SimpleQueue[T], count: int, seconds: float | None) -> Iterator[T]:
    deadline = None if seconds is None else time.monotonic() + seconds
    for _ in range(count):
        try:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            yield done.get(timeout=left)
        except queue.Empty:
            return


def all_or_raise(outcomes: Iterable[R | Problem]) -> list[R]:
    """Return the results; if there are errors, raise one with a line for each."""
    outcomes = list(outcomes)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Problem)]
    if failures:
        kinds = [type(failure) for failure in failures]
        kind = AccessRefused if AccessRefused in kinds else kinds[0]
        messages = (str(failure).partition(": ")[::2] for failure in failures)
        raise kind(said_once(dict.fromkeys(messages)))  # hosts behind a gateway share its error
    return [outcome for outcome in outcomes if not isinstance(outcome, Problem)]
