"""The root cause of a failed run.

When one rank fails, others fail within a second because their connections break, and then the
launcher ends the rest. The root cause is therefore the first failure to arrive whose log does not
blame a connection, or the first of all if every log does.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from launcher.errors import HostLost, PreflightRefused
from launcher.run.events import (
    AskedToStop,
    Broken,
    Lost,
    PeerFailed,
    RankEnded,
    Stopping,
    TorchrunEnded,
)
from launcher.supervision.hangs import Hang
from rackrun.light_dataclass import dataclass

Failure: TypeAlias = (
    RankEnded | TorchrunEnded | AskedToStop | Lost | Stopping | PeerFailed | Hang | Broken
)
Tail: TypeAlias = Callable[[int, int | None, str], str]
"""Returns the end of the log of (node, rank or torchrun, stream)."""

_RETRY = "type the same command again"
_NO_MEMORY = "the host is out of memory"
_LESS_MEMORY = "a smaller --batch-size or fewer loader workers may fit"
_MESSAGE_LETTERS = 1000  # of an exception: the log has all of it
LOST = HostLost.exit_code
_REFUSED = PreflightRefused.exit_code

_CONNECTION_ERROR = re.compile(
    r"Connection (reset|closed|was closed|refused|timed out)|Broken pipe|Socket closed"
    r"|[Cc]onnection closed by peer|remote process exited|ncclRemoteError"
    r"|communicator was aborted|failed to recv|recvBytes|sendBytes|DistNetworkError"
)

_TRACEBACK = "Traceback (most recent call last):"
_PLACED_ERROR = re.compile(r"^error: (\S.*?:\d+(?: in \S+)?: .+)", re.MULTILINE)
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


def find_root_failure(before: Sequence[Failure], after: Sequence[Failure], tail: Tail) -> Failure:
    """Return the first failure that no other one explains; both lists are in order of arrival.

    `after` are the failures after the order to end: the root cause may arrive over a slower
    connection, or from a rank that is slow to fail.
    """
    # "Connection reset" in the first log to arrive says only that another rank was faster to die.
    primary = [failure for failure in before if not is_secondary(failure, tail)]
    late = [_without_signal(failure) for failure in after if is_independent(failure, tail)]
    return (primary or late or list(before))[0]


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
    raised, aborted = tail.rfind(_exception_of(tail)), tail.rfind(_TERMINATED)
    if ended.signal == signal.SIGABRT and _exception_of(tail) and aborted > raised:
        return replace(ended, code=1, signal=0)
    return ended


def _without_signal(failure: Failure) -> Failure:
    """Return a late failure as it would have ended without our signals: with code 1."""
    if isinstance(failure, RankEnded) and failure.signal and failure.ordered:
        return replace(failure, code=1, signal=0)
    return failure


def _blames_connection(tail: str) -> bool:
    """Return whether the last exception of a log is about a connection to another rank."""
    exception = _exception_of(tail)
    return bool(exception and _CONNECTION_ERROR.search(tail, tail.rfind(exception)))


def cause_of(failure: Failure, tail: Tail) -> Cause:
    """Return what to report about one failure."""
    match failure:
        case RankEnded():
            return _cause_of_rank(failure, tail(failure.node, failure.rank, "err"))
        case TorchrunEnded():
            return _cause_of_torchrun(failure, tail(failure.node, None, "err"))
        case Broken():
            return Cause(failure.error, LOST, failure.node, failure.rank, advice=_RETRY)
        case AskedToStop():
            name = _signal_name(failure.signal)
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
    """Return why a rank failed, from its exit and the end of its log."""
    ended = as_raised(ended, tail)
    cause = Cause("", ended.exit_code, ended.node, ended.rank)
    if ended.signal == signal.SIGKILL:
        return _killed(cause, ended.oom)
    if ended.signal:
        return _crashed(cause, _signal_name(ended.signal), tail)
    exception = _exception_of(tail)
    if ended.code == 127 and "rackrun: cannot start" in tail:
        return replace(cause, text=_last_line(tail).removeprefix("rackrun: "))
    if not exception:
        only = _last_line(tail) if len(tail.splitlines()) == 1 else ""
        return replace(cause, text=f"exit code {ended.code}{only and f': {only}'}")
    advice = "a smaller --batch-size may fit" if "out of memory" in exception else ""
    return replace(cause, text=_cut(exception), advice=advice, traceback=_cut_traceback_of(tail))


def _killed(cause: Cause, oom: bool) -> Cause:
    """Return the cause of a SIGKILL, which leaves no log, from the kernel's count of OOM kills."""
    if oom:
        return replace(cause, text=f"killed by SIGKILL: {_NO_MEMORY}", advice=_LESS_MEMORY)
    return replace(cause, text="killed by SIGKILL", advice="out of memory? see the kernel log")


def _crashed(cause: Cause, name: str, tail: str) -> Cause:
    """Return the cause of a fatal signal, with the place that Python's fault handler wrote."""
    return replace(cause, text=f"killed by {name}{_location_of(_stack_of(tail))}")


def _cause_of_hang(hang: Hang, tail: Tail) -> Cause:
    """Return the rank that hangs, and where: the first whose stack is not in a collective.

    The steps of the ranks are a weaker hint, because most ranks do not report every step.
    """
    cause = Cause(hang.text, LOST, hang.node, hang.rank, advice=_RETRY)
    if not hang.suspects:
        return cause
    tails = [tail(one.node, one.rank, "err") for one in hang.suspects]
    stacks = [_stack_of(text) for text in tails]
    idle = [
        _is_in_a_collective(stack) if stack else _blames_connection(text)
        for stack, text in zip(stacks, tails, strict=True)
    ]
    # Those in a collective wait for the one that is not: it has not come, and holds them all up.
    named = idle.index(False) if False in idle else 0
    one, stack = hang.suspects[named], stacks[named]
    text = f"{one.text},{_location_of(stack)}" if stack else one.text
    alike = len(set(idle)) == 1 and len({suspect.step for suspect in hang.suspects}) == 1
    if alike and len(idle) > 1:
        text += f", like all {len(idle)} ranks that run: look at their stacks, and at the network"
    return replace(cause, text=text, node=one.node, rank=one.rank, traceback=stack)


def _is_in_a_collective(stack: str) -> bool:
    """Return whether a stack ends in a call that waits for the same call on other ranks."""
    innermost = re.search(r"^  File .*", stack, re.MULTILINE)
    return bool(innermost and _COLLECTIVE.search(innermost[0]))


def _stack_of(tail: str) -> str:
    """Return the stack that Python's fault handler wrote of the thread with the fatal signal."""
    stack = r"^Current thread .*\(most recent call first\):\n(?:  File .*\n?)+"
    matches = re.findall(stack, tail, re.MULTILINE)
    return str(matches[-1]).rstrip() if matches else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have only numbers
        return f"signal {number}"


def _location_of(stack: str) -> str:
    """Return the innermost line of a stack, as the end of a sentence."""
    where = re.search(r'  File "(.+)", line (\d+) in (\S+)', stack)
    return f" at {where[1]}:{where[2]} in {where[3]}" if where else ""


def _cause_of_torchrun(ended: TorchrunEnded, tail: str) -> Cause:
    """Return why torchrun ended before its ranks, or never started any."""
    cause = Cause("", LOST, ended.node, advice=_RETRY)
    if ended.signal:
        text = f"torchrun was killed by {_signal_name(ended.signal)}"
        if ended.oom:
            return replace(cause, text=f"{text}: {_NO_MEMORY}", advice=_LESS_MEMORY)
        return replace(cause, text=text)
    reason = _exception_of(tail) or _last_line(tail) or f"exit code {ended.code}"
    text = f"torchrun ended: {_cut(reason)}"
    return Cause(text, _REFUSED, ended.node, traceback=_cut_traceback_of(tail))


def _exception_of(tail: str) -> str:
    """Return the last error line of a log: that of an exception, or one with `error:`; or "".

    Below the traceback of an exception in the user's code, `error:` has its place as well.
    """
    trace = _traceback_of(tail)
    if trace:
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
    """Return the last traceback in a log, with as much of its message as a person reads; or ""."""
    return "\n".join(map(_cut, _traceback_of(tail).splitlines()))


def _cut(line: str) -> str:
    more = " ... (cut: the log has all of it)"
    return line if len(line) <= _MESSAGE_LETTERS else line[:_MESSAGE_LETTERS] + more


def _last_line(tail: str) -> str:
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
