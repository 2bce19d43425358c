"""The failures of a run, in order of arrival, and which of them is its root cause.

When one rank fails, others fail within a second because their connections break, and then the
launcher ends the rest. The root cause is therefore the first failure to arrive whose log does not
blame a connection, or the first of all if every log does.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from msgspec import structs

from rackrun.contract import phases
from rackrun.launcher.errors import HostLost, PreflightRefused
from rackrun.launcher.run.events import (
    AskedToStop,
    Closed,
    Event,
    Lost,
    PeerFailed,
    RankEnded,
    Stopping,
    TorchrunEnded,
)
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.hangs import Hang

Failure: TypeAlias = RankEnded | TorchrunEnded | AskedToStop | Lost | Stopping | PeerFailed | Hang
Tail: TypeAlias = Callable[[int, int | None, str], str]
"""Returns the end of the log of (node, rank or torchrun, stream)."""

LOST = HostLost.exit_code
_REFUSED = PreflightRefused.exit_code

_RETRY = "type the same command again"
_NO_MEMORY = "the host is out of memory"
_LESS_MEMORY = "a smaller --batch-size or fewer loader workers may fit"
_MESSAGE_LETTERS = 1000  # of an exception: the log has all of it

_CONNECTION_ERROR = re.compile(
    r"Connection (reset|closed|was closed|refused|timed out)|Broken pipe|Socket closed"
    r"|[Cc]onnection closed by peer|remote process exited|ncclRemoteError"
    r"|communicator was aborted|failed to recv|recvBytes|sendBytes|DistNetworkError"
)

_BETWEEN_RANKS = re.compile("gloo|NCCL|nccl")
"""Libraries whose connections lead to other ranks; others may lead anywhere."""

_TRACEBACK = "Traceback (most recent call last):"
_PLACED_ERROR = re.compile(r"^error: (\S.*?:\d+(?: in \S+)?: .+)", re.MULTILINE)
_USAGE = re.compile(r"\S+: error: |Error: ")
"""How argparse and click begin what they say last of words that they do not take."""
_UNGUARDED = "freeze_support()"
"""In what multiprocessing says of a script that starts processes as it is imported."""
_TERMINATED = "terminate called without an active exception"
_COLLECTIVE = re.compile(r"/torch/(distributed|nn/parallel)/|in _engine_run_backward$")


@dataclass(frozen=True)
class Cause:
    """Why a run ended."""

    text: str
    exit_code: int
    node: int | None = None
    rank: int | None = None
    advice: str = ""
    traceback: str = ""
    """As the rank printed it; empty when it printed none."""


class FailureLog:
    """Collects failures, separately before and after the order to end the run."""

    def __init__(self, run: RunState, tail: Tail) -> None:
        """Store `tail`, which reads the end of a log, where the reason for a failure is."""
        self._run = run
        self._tail = tail
        self._before: list[Failure] = []
        self._after: list[Failure] = []

    def __bool__(self) -> bool:
        """Return whether the run has failed."""
        return bool(self._before)

    def add(self, failure: Failure, after_end: bool) -> None:
        """Add a failure; `after_end`: the ranks had already been ordered to end."""
        (self._after if after_end else self._before).append(failure)

    def take(self, event: Event, after_end: bool) -> None:
        """Add the failure in an event, if there is one; a clean exit is not a failure."""
        match event:
            case RankEnded(exit_code=0):
                pass
            case TorchrunEnded() if all(rank.ended for rank in self._run.ranks_of(event.node)):
                pass  # its exit code only repeats how its ranks have ended
            case Lost() | Stopping() | TorchrunEnded() | AskedToStop() | RankEnded():
                self.add(event, after_end)
            case Closed() if not after_end:
                # An agent may end for a failure on its host; without one it has no reason to.
                is_explained = any(
                    not isinstance(failure, PeerFailed) and failure.node == event.node
                    for failure in self._before
                )
                ranks = self._run.ranks_of(event.node)
                if not is_explained and any(rank.ended is None for rank in ranks):
                    self.add(Lost(event.node, "its agent ended before its ranks did"), after_end)

    def root_cause(self) -> Cause:
        """Return the root cause; there must be a failure.

        A rank that waited for another one, or lost it, may have been left by one that had ended
        well and too early: that is added.
        """
        failure = find_root_failure(self._before, self._after, self._tail)
        cause = cause_of(failure, self._tail)
        secondary = is_secondary(failure, self._tail)
        if not isinstance(failure, Hang) and not secondary:
            return cause
        left = self._early_leavers()
        if secondary and not left and _BETWEEN_RANKS.search(cause.text):
            text = f"a connection between ranks broke, and no rank or host was lost: {cause.text}"
            advice = f"see firewall, MTU and cables; {_RETRY}"
            return replace(cause, text=text, exit_code=LOST, advice=advice)
        return replace(cause, text=f"{cause.text}{left}")

    def _early_leavers(self) -> str:
        """Return which ranks had ended with 0 before the run was done, as the end of a sentence."""

        furthest = max(max(rank.step, rank.fields.get("steps", 0)) for rank in self._run.ranks)
        left = [
            rank
            for rank in self._run.ranks
            if rank.ended and not rank.ended.exit_code and rank.phase != phases.DONE
            if rank.step < furthest or not rank.step
        ]
        if not left or len(left) == len(self._run.ranks):
            return ""
        first = left[0]
        host = self._run.plan.host(first.node).name
        more = f", and {len(left) - 1} more ranks with 0" if len(left) > 1 else ""
        at = f" at step {first.step}" if first.phase else ""
        return f"; rank {first.rank} on {host} had ended with 0{at}{more}"

    @property
    def is_secondary(self) -> bool:
        """Return whether all failures here probably follow from one on another node."""
        return all(is_secondary(failure, self._tail) for failure in self._before) and not any(
            is_independent(failure, self._tail) for failure in self._after
        )


def find_root_failure(before: Sequence[Failure], after: Sequence[Failure], tail: Tail) -> Failure:
    """Return the first failure that no other one explains; both lists are in order of arrival.

    `after` are the failures after the order to end: the root cause may arrive over a slower
    connection, or from a rank that is slow to fail.
    """
    # "Connection reset" in the first log to arrive says only that another rank was faster to die.
    primary = [failure for failure in before if not is_secondary(failure, tail)]
    late = [failure for failure in after if is_independent(failure, tail)]
    root = (primary or late or list(before))[0]
    if not primary and late and isinstance(root, RankEnded) and root.signal and root.ordered:
        return structs.replace(root, code=1, signal=0)  # as it would have ended without our signals
    return root


def is_secondary(failure: Failure, tail: Tail) -> bool:
    """Return whether a rank failed because it lost another rank or the network."""
    if isinstance(failure, PeerFailed):
        return failure.secondary
    if not isinstance(failure, RankEnded):
        return False
    text = tail(failure.node, failure.rank, "err")
    return not as_raised(failure, text).signal and _blames_connection(text)


def is_independent(failure: Failure, tail: Tail) -> bool:
    """Return whether a failure after the order to end would have happened without it.

    If the agent had already signaled the rank, only an exception in its log proves that.
    """
    match failure:
        case RankEnded():
            text = tail(failure.node, failure.rank, "err")
            if not failure.ordered:
                return not is_secondary(failure, tail)
            return bool(_exception_of(text)) and not _blames_connection(text)
        case TorchrunEnded():
            return not failure.ordered
        case PeerFailed():
            return not failure.secondary
        case _:
            return isinstance(failure, Lost)


def as_raised(ended: RankEnded, tail: str) -> RankEnded:
    """Return the failure as an exception if a thread of gloo aborted the interpreter after it.

    Then only "terminate called without an active exception" follows the traceback, and the rank
    dies of SIGABRT (pytorch/pytorch#190489).
    """
    exception = _exception_of(tail)
    is_aborted = tail.rfind(_TERMINATED) > tail.rfind(exception)
    if ended.signal == signal.SIGABRT and exception and is_aborted:
        return structs.replace(ended, code=1, signal=0)
    return ended


def cause_of(failure: Failure, tail: Tail) -> Cause:
    """Return what to report about one failure."""
    match failure:
        case RankEnded():
            return _cause_of_rank(failure, tail(failure.node, failure.rank, "err"))
        case TorchrunEnded():
            return _cause_of_torchrun(failure, tail(failure.node, None, "err"))
        case AskedToStop():
            name = signal_name(failure.signal)
            return Cause(f"torchrun passed on a {name}", LOST, failure.node, advice=_RETRY)
        case Lost():
            advice = _RETRY if failure.exit_code == LOST else ""
            return Cause(failure.reason, failure.exit_code, failure.node, advice=advice)
        case Stopping():
            return Cause(failure.reason, LOST, failure.node, advice=_RETRY)
        case PeerFailed():
            return Cause(f"on {failure.name}: {failure.text}", failure.exit_code)
        case Hang():
            return _cause_of_hang(failure, tail)


def _cause_of_rank(ended: RankEnded, tail: str) -> Cause:
    ended = as_raised(ended, tail)
    cause = Cause("", ended.exit_code, ended.node, ended.rank)
    if ended.signal == signal.SIGKILL:  # leaves nothing in the log; the kernel counts OOM kills
        if ended.oom:
            return replace(cause, text=f"killed by SIGKILL: {_NO_MEMORY}", advice=_LESS_MEMORY)
        return replace(cause, text="killed by SIGKILL", advice="out of memory? see the kernel log")
    if ended.signal:
        location = _location_of(_stack_of(tail))
        return replace(cause, text=f"killed by {signal_name(ended.signal)}{location}")
    exception = _exception_of(tail)
    if ended.code == 127 and "rackrun: cannot start" in tail:  # the shim found no such program
        return replace(cause, text=_last_line(tail).removeprefix("rackrun: "))
    if not exception:
        is_said = len(tail.splitlines()) == 1 or _USAGE.match(_last_line(tail))
        said = f": {_last_line(tail)}" if is_said else ""
        return replace(cause, text=_cut(f"exit code {ended.code}{said}"))
    advice = "a smaller --batch-size may fit" if "out of memory" in exception else ""
    if _UNGUARDED in tail:
        advice = "what starts processes must be below if __name__ == '__main__':"
    return replace(cause, text=_cut(exception), advice=advice, traceback=_cut_traceback_of(tail))


def _cause_of_torchrun(ended: TorchrunEnded, tail: str) -> Cause:
    cause = Cause("", LOST, ended.node, advice=_RETRY)
    if ended.signal:
        text = f"torchrun was killed by {signal_name(ended.signal)}"
        if ended.oom:
            return replace(cause, text=f"{text}: {_NO_MEMORY}", advice=_LESS_MEMORY)
        return replace(cause, text=text)
    reason = _exception_of(tail) or _last_line(tail) or f"exit code {ended.code}"
    text = f"torchrun ended: {_cut(reason)}"
    return Cause(text, _REFUSED, ended.node, traceback=_cut_traceback_of(tail))


def _cause_of_hang(hang: Hang, tail: Tail) -> Cause:
    cause = Cause(hang.text, LOST, hang.node, hang.rank, advice=_RETRY)
    if not hang.suspects:
        return cause
    tails = [tail(suspect.node, suspect.rank, "err") for suspect in hang.suspects]
    stacks = [_stack_of(text) for text in tails]
    waits = [
        _is_in_a_collective(stack) if stack else _blames_connection(text)
        for stack, text in zip(stacks, tails, strict=True)
    ]
    # Those in a collective wait for the one that is not: it has not come, and holds them all up.
    # The steps, by which suspects are ordered, prove less: most ranks do not report every step.
    culprit = waits.index(False) if False in waits else 0
    suspect, stack = hang.suspects[culprit], stacks[culprit]
    text = f"{suspect.text},{_location_of(stack)}" if stack else suspect.text
    alike = len(set(waits)) == 1 and len({suspect.step for suspect in hang.suspects}) == 1
    if alike and len(waits) > 1:
        text += f", like all {len(waits)} ranks that run: look at their stacks, and at the network"
    return replace(cause, text=text, node=suspect.node, rank=suspect.rank, traceback=stack)


# -- what a log says


def _blames_connection(tail: str) -> bool:
    """Return whether the last exception of a log is about a connection to another rank."""
    exception = _exception_of(tail)
    return bool(exception and _CONNECTION_ERROR.search(tail, tail.rfind(exception)))


def _is_in_a_collective(stack: str) -> bool:
    """Return whether a stack ends in a call that waits for the same call on other ranks."""
    innermost = re.search(r"^  File .*", stack, re.MULTILINE)
    return bool(innermost and _COLLECTIVE.search(innermost[0]))


def _stack_of(tail: str) -> str:
    """Return the stack that Python's fault handler wrote of the thread with the fatal signal."""
    stack = r"^Current thread .*\(most recent call first\):\n(?:  File .*\n?)+"
    matches = re.findall(stack, tail, re.MULTILINE)
    return str(matches[-1]).rstrip() if matches else ""


def _location_of(stack: str) -> str:
    """Return the innermost line of a stack, as the end of a sentence."""
    where = re.search(r'  File "(.+)", line (\d+) in (\S+)', stack)
    return f" at {where[1]}:{where[2]} in {where[3]}" if where else ""


def _exception_of(tail: str) -> str:
    """Return the last error line of a log: that of an exception, or one with `error:`; or ""."""
    if trace := _traceback_of(tail):
        # An error in the user's code is followed by our own line with the place in that code.
        if placed := _PLACED_ERROR.findall(tail, tail.rfind(_TRACEBACK)):
            return str(placed[-1])
        return next(line for line in reversed(trace.splitlines()) if not line.startswith(" "))
    errors = re.findall(r"^error: (.+)", tail, re.MULTILINE)
    return str(errors[-1]) if errors else ""


def _traceback_of(tail: str) -> str:
    """Return the last traceback in a log, with the line of its exception; or ""."""
    plain = re.sub(r"^\[rank\d+\]: ?", "", tail, flags=re.MULTILINE)  # torch's own excepthook
    matches = re.findall(
        r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*$", plain, re.MULTILINE
    )
    return str(matches[-1]) if matches else ""


def _cut_traceback_of(tail: str) -> str:
    return "\n".join(map(_cut, _traceback_of(tail).splitlines()))


def _cut(line: str) -> str:
    more = " ... (cut: the log has all of it)"
    return line if len(line) <= _MESSAGE_LETTERS else line[:_MESSAGE_LETTERS] + more


def _last_line(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""


def signal_name(number: int) -> str:
    """Return SIGTERM for 15; real-time signals have only numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
