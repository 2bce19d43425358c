"""Why a run ended: the first true cause among everything that went wrong.

When one rank fails, others follow within a second, because their connections break, and then the
launcher ends the rest. So the cause is the first trouble to arrive whose own words do not blame a
connection; only when all do, it is the first of those.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from launcher.errors import HostLost, PreflightRefused
from launcher.run.events import AskedToStop, Lost, PeerFailed, RankEnded, Stopping, TorchrunEnded
from launcher.supervision.hangs import Hang

Trouble: TypeAlias = RankEnded | TorchrunEnded | AskedToStop | Lost | Stopping | PeerFailed | Hang
Tail: TypeAlias = Callable[[int, int | None, str], str]
"""The end of the log of (node, rank or torchrun, stream)."""

AGAIN = "type the same command again"
LOST = HostLost.exit_code
REFUSED = PreflightRefused.exit_code

SECONDARY = re.compile(
    r"Connection (reset|closed|was closed|refused|timed out)|Broken pipe|Socket closed"
    r"|[Cc]onnection closed by peer|remote process exited|ncclRemoteError"
    r"|communicator was aborted|failed to recv|recvBytes|sendBytes|DistNetworkError"
)

TERMINATED = "terminate called without an active exception"
COLLECTIVE = re.compile(r"/torch/(distributed|nn/parallel)/|in _engine_run_backward$")


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


def first_cause(troubles: Sequence[Trouble], aftermath: Sequence[Trouble], tail: Tail) -> Cause:
    """The first trouble that no other one explains; each list is in order of arrival.

    The aftermath is what we heard after the end was ordered. News of the true cause may have come
    by a slower way, or from a rank that takes its time to fail.
    """
    own = [trouble for trouble in troubles if not is_secondary(trouble, tail)]
    late = [unsignalled(trouble) for trouble in aftermath if is_own(trouble, tail)]
    return cause_of((own or late or list(troubles))[0], tail)


def is_secondary(trouble: Trouble, tail: Tail) -> bool:
    """Whether a rank failed because another one, or the network, was gone."""
    if isinstance(trouble, PeerFailed):
        return trouble.secondary
    if not isinstance(trouble, RankEnded):
        return False
    text = tail(trouble.node, trouble.rank, "err")
    return not as_meant(trouble, text).signal and blames_connection(text)


def is_own(trouble: Trouble, tail: Tail) -> bool:
    """Whether something heard after the order to end would have happened without it.

    A rank that its agent had told to end is believed only if it says why it failed.
    """
    match trouble:
        case RankEnded():
            text = tail(trouble.node, trouble.rank, "err")
            if not trouble.told:
                return not is_secondary(trouble, tail)
            return bool(exception_of(text)) and not blames_connection(text)
        case TorchrunEnded():
            return not trouble.told
        case PeerFailed():
            return not trouble.secondary
        case _:
            return isinstance(trouble, Lost)


def as_meant(ended: RankEnded, tail: str) -> RankEnded:
    """An end by an exception, although the interpreter met a thread of gloo on its way out.

    "terminate called without an active exception" is all that then comes after the traceback, and
    the rank dies of SIGABRT (pytorch/pytorch#190489).
    """
    raised, aborted = tail.rfind(exception_of(tail)), tail.rfind(TERMINATED)
    if ended.signal == signal.SIGABRT and exception_of(tail) and aborted > raised:
        return replace(ended, code=1, signal=0)
    return ended


def unsignalled(trouble: Trouble) -> Trouble:
    """A late trouble as it would have ended without our signals: an exception's code is 1."""
    if isinstance(trouble, RankEnded) and trouble.signal and trouble.told:
        return replace(trouble, code=1, signal=0)
    return trouble


def blames_connection(tail: str) -> bool:
    """Whether the last exception of a log is about a connection to another rank."""
    exception = exception_of(tail)
    return bool(exception and SECONDARY.search(tail, tail.rfind(exception)))


def cause_of(trouble: Trouble, tail: Tail) -> Cause:
    """What to tell the user about one trouble."""
    match trouble:
        case RankEnded():
            return cause_of_rank(trouble, tail(trouble.node, trouble.rank, "err"))
        case TorchrunEnded():
            return cause_of_torchrun(trouble, tail(trouble.node, None, "err"))
        case AskedToStop():
            name = signal_name(trouble.signal)
            return Cause(f"torchrun passed on a {name}", LOST, trouble.node, advice=AGAIN)
        case Lost():
            advice = AGAIN if trouble.exit_code == LOST else ""
            return Cause(trouble.reason, trouble.exit_code, trouble.node, advice=advice)
        case Stopping():
            return Cause(trouble.reason, LOST, trouble.node, advice=AGAIN)
        case PeerFailed():
            return Cause(f"on {trouble.name}: {trouble.text}", trouble.exit_code)
        case Hang():
            return cause_of_hang(trouble, tail)


def cause_of_rank(ended: RankEnded, tail: str) -> Cause:
    """Why a rank failed, from how it ended and its last words."""
    ended = as_meant(ended, tail)
    cause = Cause("", ended.exit_code, ended.node, ended.rank)
    if ended.signal == signal.SIGKILL:
        return killed(cause, ended.oom)
    if ended.signal:
        return crashed(cause, signal_name(ended.signal), tail)
    exception = exception_of(tail)
    if ended.code == 127 and "rackrun: cannot start" in tail:
        return replace(cause, text=last_line(tail).removeprefix("rackrun: "))
    if not exception:
        return replace(cause, text=f"exit code {ended.code}")
    advice = "a smaller --batch-size may fit" if "out of memory" in exception else ""
    return replace(cause, text=exception, advice=advice, traceback=traceback_of(tail))


def killed(cause: Cause, oom: bool) -> Cause:
    """SIGKILL leaves no words; the kernel's count of OOM kills may speak."""
    if oom:
        advice = "a smaller --batch-size or fewer loader workers may fit"
        return replace(cause, text="killed by SIGKILL: the host is out of memory", advice=advice)
    return replace(cause, text="killed by SIGKILL", advice="out of memory? see the kernel log")


def crashed(cause: Cause, name: str, tail: str) -> Cause:
    """A fatal signal; Python's fault handler may have said where."""
    return replace(cause, text=f"killed by {name}{place_of(stack_of(tail))}")


def cause_of_hang(hang: Hang, tail: Tail) -> Cause:
    """Who hangs, and where, once the fault handlers have told: whoever waits for others does not.

    How far ranks are is a weaker hint: most do not report every step.
    """
    cause = Cause(hang.text, LOST, hang.node, hang.rank, advice=AGAIN)
    if not hang.suspects:
        return cause
    tails = [tail(one.node, one.rank, "err") for one in hang.suspects]
    stacks = [stack_of(text) for text in tails]
    idle = [
        waits_for_others(stack) if stack else blames_connection(text)
        for stack, text in zip(stacks, tails, strict=True)
    ]
    named = idle.index(False) if False in idle else 0
    one, stack = hang.suspects[named], stacks[named]
    text = f"{one.text},{place_of(stack)}" if stack else one.text
    alike = len(set(idle)) == 1 and len({suspect.step for suspect in hang.suspects}) == 1
    if alike and len(idle) > 1:
        text += f", like all {len(idle)} ranks that run: look at their stacks, and at the network"
    return replace(cause, text=text, node=one.node, rank=one.rank, traceback=stack)


def waits_for_others(stack: str) -> bool:
    """Whether a rank is in a call of torch that returns only when other ranks have called too."""
    innermost = re.search(r"^  File .*", stack, re.MULTILINE)
    return bool(innermost and COLLECTIVE.search(innermost[0]))


def stack_of(tail: str) -> str:
    """The stack of the thread that took a fatal signal, as Python's fault handler writes it."""
    stack = r"^Current thread .*\(most recent call first\):\n(?:  File .*\n?)+"
    found = re.findall(stack, tail, re.MULTILINE)
    return str(found[-1]).rstrip() if found else ""


def signal_name(number: int) -> str:
    """SIGTERM for 15; real-time signals have no names but their numbers."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def place_of(stack: str) -> str:
    """Where a stack begins, as the end of a sentence."""
    where = re.search(r'  File "(.+)", line (\d+) in (\S+)', stack)
    return f" at {where[1]}:{where[2]} in {where[3]}" if where else ""


def cause_of_torchrun(ended: TorchrunEnded, tail: str) -> Cause:
    """Why torchrun left its ranks alone, or never started them."""
    if ended.signal:
        text = f"torchrun was killed by {signal_name(ended.signal)}"
        return Cause(text, LOST, ended.node, advice=AGAIN)
    reason = exception_of(tail) or last_line(tail) or f"exit code {ended.code}"
    return Cause(f"torchrun ended: {reason}", REFUSED, ended.node, traceback=traceback_of(tail))


def exception_of(tail: str) -> str:
    """The line of a log that says what went wrong; empty when none does."""
    trace = traceback_of(tail)
    if trace:
        return next(line for line in reversed(trace.splitlines()) if not line.startswith(" "))
    errors = re.findall(r"^error: (.+)", tail, re.MULTILINE)
    return str(errors[-1]) if errors else ""


def traceback_of(tail: str) -> str:
    """The last traceback in a log, up to and with the line of its exception."""
    plain = re.sub(r"^\[rank\d+\]: ?", "", tail, flags=re.MULTILINE)  # torch's own excepthook
    found = re.findall(
        r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+\S.*$", plain, re.MULTILINE
    )
    return str(found[-1]) if found else ""


def last_line(tail: str) -> str:
    """The last line of a log with something in it."""
    lines = [line for line in tail.splitlines() if line.strip()]
    return lines[-1].strip() if lines else ""
