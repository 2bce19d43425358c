"""Send a run to a tracker from a thread of rank 0; training never waits for it.

Lines of metrics.jsonl go through a queue. A tracker that does not answer, or fails, is given up
with one line: all that was measured is in metrics.jsonl, and a run that is resumed sends the rest.
tracker-NAME.json in the run's folder has the tracker's run and what it has got of it. The file
stays where it was written: results of a host come back without it.
"""

import json
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.contract.files import SENT_FILES
from rackrun.errors import DataError, MissingPackage
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, Whole, at_most, parsed_file
from rackrun.terminal import one_line
from rackrun.training.stop_requests import StopRequests

Line = dict[str, Any]
"""A line of metrics.jsonl."""
End = tuple[str, dict[str, float]]
"""How a run ended: finished, stopped or failed; and its last and best accuracy, by name."""

NOT_MEASURED = frozenset(
    {"kind", "step", "epoch", "split", "samples", "images", "time", "rank", "why"}
)
START_SECONDS = 10.0
END_SECONDS, STOPPED_SECONDS = 30.0, 5.0  # for the rest of a run that is over, or is to end
MOST_BYTES = 1 << 16
QUIET = {  # these libraries report how they are used, which a closed network would not let through
    "DO_NOT_TRACK": "true",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
    "WANDB_SILENT": "true",
}


@dataclass
class Sent:
    """A run of a tracker, and how much it has received."""

    id: Annotated[str, at_most(200)] = ""
    """The tracker's id of the run; empty: it has none yet."""
    server: Annotated[str, at_most(4096)] = ""
    """The server that has it; empty for files below the run's folder."""
    steps: Annotated[dict[str, Whole], at_most(16)] = field(default_factory=dict)
    """The last step that was sent, by kind of line."""

    def lacks(self, line: Line) -> bool:
        """Return whether a line was not sent yet."""
        return bool(line["step"] > self.steps.get(line["kind"], -1))


class Tracker:
    """Sends the lines of a run, and reports in one line when it fails."""

    def __init__(
        self,
        name: str,
        folder: Path,
        settings: dict[str, Any],
        lines: Sequence[Line],
        say: Callable[[str], None],
    ) -> None:
        """Begin with the lines so far; `settings` are those of config.json."""
        self._name, self._folder, self._settings, self._say = name, folder, settings, say
        self._sent = read_sent(folder, name)
        self._queue = SimpleQueue[Line | End]()
        self._begun, self._problem, self._is_over = False, "", False
        self._deadline = time.monotonic() + START_SECONDS
        os.environ.update({each: value for each, value in QUIET.items() if each not in os.environ})
        for library in (name, "urllib3"):  # a line of ours says what went wrong
            logging.getLogger(library).setLevel(logging.ERROR)
        for line in lines:
            self._queue.put(line)
        self._thread = threading.Thread(target=self._run, name=f"track {name}", daemon=True)
        self._thread.start()

    def log(self, line: Line) -> None:
        """Hand over a line; say so if the tracker has failed, or has not begun in time."""
        self._queue.put(line)
        if not self._begun and time.monotonic() > self._deadline:
            self._problem = self._problem or f"no answer within {START_SECONDS:g} s"
        self._report()

    def end(self, verdict: str, result: dict[str, float]) -> None:
        """Hand over how the run ended, and wait until all was sent, for a bounded time."""
        self._queue.put((verdict, result))
        seconds = END_SECONDS if verdict == "finished" else STOPPED_SECONDS
        deadline = time.monotonic() + (0 if self._is_over else seconds)
        with StopRequests(save_minutes=0) as requests:
            while self._thread.is_alive() and time.monotonic() < deadline and not requests.ending:
                self._thread.join(0.05)
        if self._thread.is_alive():
            self._problem = self._problem or "did not end in time"
        self._report()

    def _report(self) -> None:
        # Once: the tracker is given up with it.
        if self._problem and not self._is_over:
            self._is_over = True
            rest = f"what it did not get is in {RunFolder(self._folder).metrics}"
            self._say(f"--track {self._name}: {self._problem}; {rest}")

    def _run(self) -> None:
        try:
            self._send()
        # Whatever the library raises, or any that it talks to its server by: a run does not end as
        # nobody takes its lines, and one line says why.
        except Exception as error:
            self._problem = self._problem or one_line(str(error))[:300] or repr(error)

    def _send(self) -> None:
        module = import_module(f"rackrun.training.track.{self._name}_run")
        make = getattr(module, f"{self._name.capitalize()}Run")
        run = make(self._folder, self._settings, self._sent)  # begun or continued
        if run.id != self._sent.id:  # a new run has none of the lines of another one
            self._sent = Sent(run.id, run.server)
        self._begun = True
        self._write()
        while not self._is_over:
            lines, end = self._next()
            if lacking := [line for line in lines if self._sent.lacks(line)]:
                run.log(lacking)
                self._sent.steps |= {line["kind"]: line["step"] for line in lacking}
                self._write()
            if end:
                run.end(*end, RunFolder(self._folder).report)
                return

    def _next(self) -> tuple[list[Line], End | None]:
        # All lines that wait, at least one, and the end if it has come.
        lines: list[Line] = []
        while not lines or not self._queue.empty():
            item = self._queue.get()
            if isinstance(item, tuple):
                return lines, item
            lines.append(item)
        return lines, None

    def _write(self) -> None:
        write_whole(path_of(self._folder, self._name), json.dumps(asdict(self._sent)).encode())


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """Return what was measured: {"train/loss": 0.5, ...}."""
    names = line.keys() - NOT_MEASURED
    return {
        f"{line['kind']}/{name}": line[name] for name in sorted(names) if line[name] is not None
    }


def path_of(folder: Path, tracker: str) -> Path:
    """Return the file of a tracker in the folder of a run."""
    return folder / SENT_FILES[tracker]


def read_sent(folder: Path, tracker: str) -> Sent:
    """Return what a tracker has; DataError when the file cannot be understood."""
    path = path_of(folder, tracker)
    if not path.exists():
        return Sent()
    try:
        return parsed_file(path, Sent, MOST_BYTES)
    except Misshapen as error:
        raise DataError(f"{path}: {error}; remove it to begin a new run of {tracker}") from None


def hand_on(earlier: Path, folder: Path, tracker: str) -> None:
    """Let a run go on as the tracker's run of an earlier one."""
    target = path_of(folder, tracker)
    with translated_os_errors(target), suppress(FileNotFoundError, shutil.SameFileError):
        shutil.copyfile(path_of(earlier, tracker), target)


def check_trackers(names: Sequence[str]) -> None:
    """Raise MissingPackage for a tracker that is not installed here."""
    for name in names:
        if find_spec(name) is None:
            raise MissingPackage(name, name)
