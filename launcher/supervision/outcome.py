"""The outcome of a run: its result, from the root cause and the last state of hosts and ranks."""

from __future__ import annotations

import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rackrun.commands import called
from rackrun.launcher.output.log_files import LogFiles
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import CUT_OFF, HOSTS_BACK, Result, moved
from rackrun.launcher.run.state import RunState
from rackrun.launcher.supervision.hangs import Hang
from rackrun.launcher.supervision.root_cause import LOST, Cause, FailureLog, signal_name
from rackrun.launcher.supervision.signals import STOP_SIGNAL, TAKE_IN, TIME_LIMIT
from rackrun.runs import how_to_continue
from rackrun.terminal import one_line

OUT_OF_TIME = 124  # as timeout(1)
_REPORTED = ("accuracy", "best", "loss", "images_per_second", "epoch", "step", "final", "report")


def result_of(
    job: Job, run: RunState, cause: Cause, log_files: LogFiles, interrupted: bool, now: float
) -> Result:
    """Build the final result of a run whose logs are complete."""
    first = run.lead.fields
    saved = max((rank.fields.get("checkpoint", 0) for rank in run.ranks), default=0)
    host = run.plan.host(run.lead.node)
    is_continuable = bool(saved and run.plan.task and job.folder.settings.exists())
    verdict = "interrupted" if interrupted else "failed" if cause.exit_code else "done"
    return Result(
        verdict=verdict,
        exit_code=cause.exit_code,
        cause=cause.text,
        host=None if cause.node is None else run.plan.host(cause.node).name,
        rank=cause.rank,
        log=_log_of(cause, log_files),
        advice=cause.advice,
        traceback=cause.traceback,
        codes={rank.rank: rank.ended.exit_code if rank.ended else None for rank in run.ranks},
        hosts={host.plan.name: host.end_state for host in run.hosts},
        seconds=round(now - run.started_at, 3),
        report={
            name: moved(first[name], Path(host.folder), job.folder.path)
            for name in _REPORTED
            if name in first
        },
        folder=job.folder.path,
        saved=saved,
        resume=how_to_continue(job.folder) if is_continuable and verdict != "done" else "",
    )


def final_cause(run: RunState, failures: FailureLog, interrupted: int) -> Cause:
    """Return why a run ended; `interrupted` is the signal that ended it, or 0."""
    if interrupted:
        interruption = _interruption(interrupted)
        text = interruption.cause or f"stopped by {interruption.sender}"
        return Cause(text, interruption.exit_code)
    if run.is_cut_off:
        return Cause(CUT_OFF, LOST)
    if failures:
        return failures.root_cause()
    if run.succeeded:
        return Cause("done", 0)
    return Cause("the ranks ended without an exit code", LOST)


def describe(cause: Cause | Hang, plan: Plan) -> str:
    """Return rank, host and text of a cause in one line."""
    text = one_line(cause.text)
    if cause.node is None:
        return text
    host = plan.host(cause.node).name
    return f"{host}: {text}" if cause.rank is None else f"rank {cause.rank} on {host}: {text}"


@dataclass(frozen=True)
class _Interruption:
    """What a signal means that ends a run."""

    sender: str
    """What sends it, for the cause of the end."""
    exit_code: int
    line: str = ""
    """What is shown when it arrives; by default that its sender is stopping the run."""
    cause: str = ""


def _interruption(number: int) -> _Interruption:
    interruptions: dict[int, _Interruption] = {
        signal.SIGINT: _Interruption("Ctrl-C", 130, "stopping, Ctrl-C again to force"),
        signal.SIGPIPE: _Interruption(
            "the reader of its output, which has gone", 128 + signal.SIGPIPE
        ),
        signal.SIGUSR1: _Interruption("SIGUSR1", LOST),  # a scheduler starts the run again
        STOP_SIGNAL: _Interruption(called("stop"), 128 + signal.SIGINT),  # as at Ctrl-C
        TIME_LIMIT: _Interruption("--time-limit", OUT_OF_TIME, "time limit reached: stopping"),
        TAKE_IN: _Interruption("", LOST, cause=HOSTS_BACK),
    }
    # The launcher of another node names the signal that it got, so it may be any number.
    return interruptions.get(number, _Interruption(signal_name(number), 128 + number))


def stopping_line(number: int) -> str:
    """Return the line at the first signal: what stops the run, and what would hasten that."""
    interruption = _interruption(number)
    return interruption.line or f"stopping: {interruption.sender}"


def _log_of(cause: Cause, log_files: LogFiles) -> Path | None:
    if cause.node is None:
        return None
    logs = [log_files.log(cause.node, cause.rank, stream) for stream in ("err", "out")]
    for log in logs:
        with suppress(OSError):  # its disk may not answer any more
            if log.exists():
                return log
    return logs[0].parent
