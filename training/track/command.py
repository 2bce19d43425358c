"""A tracker as a process of its own, which follows the files of a run's folder.

    config.json, metrics.jsonl, report.html  ->  wandb, mlflow

    python -m rackrun.training track wandb RUN

The first rank starts it. It sends what was not sent yet and what comes, until standard input ends
with the outcome of the run. A run writes these files anyway and never waits for who reads them: so
a tracker that fails, or hangs, harms no step, and one that is slow loses nothing.
"""

import os
import signal
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Protocol

from rackrun.contract import variables
from rackrun.errors import MissingPackage, Problem
from rackrun.run_folder import RunFolder
from rackrun.run_report.folder import MetricsReader, read_settings
from rackrun.terminal import one_line
from rackrun.training.track.lines import END_SECONDS, Line, Sent, read_sent, summary, write_sent

POLL_SECONDS = 1.0
QUIET = {  # these libraries report how they are used, which a closed network would not let through
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


class TrackedRun(Protocol):
    """A tracker's side of a run."""

    id: str
    location: str

    def log(self, lines: list[Line]) -> None:
        """Send lines of metrics.jsonl."""

    def end(self, verdict: str, result: dict[str, float], report: Path) -> None:
        """Send how the run ended, what it came to, and its page."""


def main(args: list[str]) -> None:
    """Send a run to a tracker: `args` are its name and the folder of the run."""
    tracker, folder = args[0], Path(args[1])
    os.environ.update({name: value for name, value in QUIET.items() if name not in os.environ})
    try:
        send(tracker, folder, RunEnding())
    except (Problem, MemoryError):
        raise
    except Exception as error:  # of a library that talks to a server: any
        raise Problem(f"{tracker}: {one_line(str(error)) or repr(error)}") from error


class RunEnding:
    """How the run ended, once it has: a word on standard input."""

    def __init__(self) -> None:
        self.verdict = "failed"
        self._over = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def wait(self, seconds: float) -> bool:
        """Return whether the run has ended, waiting for `seconds` at most."""
        return self._over.wait(seconds)

    def _listen(self) -> None:
        self.verdict = sys.stdin.read().strip() or "failed"
        signal.alarm(END_SECONDS)  # ends the process whatever the library waits for
        self._over.set()


def send(tracker: str, folder: Path, ending: RunEnding) -> None:
    """Send what a tracker lacks of a run, until the run has ended."""
    sent, metrics = read_sent(folder, tracker), MetricsReader(RunFolder(folder).metrics)
    run = opened(tracker, folder, sent)
    steps = sent.steps if run.id == sent.id else {}  # a new run has none of those of another one
    sent = Sent(run.id, run.location, steps)
    write_sent(folder, tracker, sent)
    over, result = False, dict[str, float]()
    while not over:
        over = ending.wait(POLL_SECONDS)
        while new := metrics.next_lines():
            result = summary(new, result)
            if lacking := [line for line in new if sent.lacks(line)]:
                run.log(lacking)
                sent = sent.plus(lacking)
                write_sent(folder, tracker, sent)
    run.end(ending.verdict, result, RunFolder(folder).report)
    write_sent(folder, tracker, sent)


def opened(tracker: str, folder: Path, sent: Sent) -> TrackedRun:
    """Return the tracker's side of a run, begun or continued."""
    settings = read_settings(folder)
    resolved = settings.get("resolved")
    about = {
        "name": settings.get("name") or folder.absolute().name,
        "run_id": os.environ.get(variables.RUN_ID, ""),
        "git_commit": resolved.get("git_commit", "") if isinstance(resolved, dict) else "",
    }
    try:
        module = import_module(f"rackrun.training.track.{tracker}_run")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == tracker:
            raise MissingPackage(tracker, tracker) from None
        raise
    run: TrackedRun = getattr(module, f"{tracker.capitalize()}Run")(
        folder.absolute(), {**settings, **about}, sent
    )
    return run
