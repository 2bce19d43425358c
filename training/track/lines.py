"""The lines of metrics.jsonl as loggers take them: their numbers, and which a tracker has got.

The latter is in tracker-NAME.json in the run's folder. With it a resumed run goes on as the same
run of the tracker, and nothing is sent twice. It stays where it was written: results of a host come
back without it (rackrun.run_folder.LAUNCHER_FILES).
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import unquote

from rackrun.atomic import translated_os_errors, write_whole
from rackrun.contract.files import SENT_FILES
from rackrun.errors import DataError, UsageError
from rackrun.shapes import AtMost, Misshapen, parsed_file
from rackrun.terminal import one_line

Line = dict[str, Any]

NOT_MEASURED = frozenset({"kind", "step", "epoch", "split", "samples", "images", "time"})
OF_STRAGGLERS = frozenset({"rank", "why"})
MOST_BYTES = 1 << 16
END_SECONDS = 30  # for a tracker to send the rest of a run that has ended


def scalars(line: Line) -> dict[str, float]:
    """Return what was measured: {"train/loss": 0.5, ...}."""
    names = line.keys() - NOT_MEASURED - OF_STRAGGLERS
    return {
        f"{line['kind']}/{name}": line[name] for name in sorted(names) if line[name] is not None
    }


def summary(lines: list[Line], before: Mapping[str, float]) -> dict[str, float]:
    """Return the last and the best accuracy of a run after these lines; {} before an evaluation.

    `before` is the summary of the lines before them. The names are those of result.json.
    """
    accuracies = [line["top1"] for line in lines if line["kind"] == "evaluate"]
    if not accuracies:
        return dict(before)
    return {
        "accuracy": accuracies[-1],
        "best": max([*accuracies, before.get("best", accuracies[0])]),
    }


@dataclass(frozen=True)
class Sent:
    """A run of a tracker, and how much it has received."""

    id: Annotated[str, AtMost(200)] = ""
    """The tracker's id of the run; empty: it has none yet."""
    location: Annotated[str, AtMost(4096)] = ""
    """Where the tracker keeps it, if it may be in several places."""
    steps: Annotated[dict[str, int], AtMost(16)] = field(default_factory=dict)
    """The last step that was sent, by kind of line."""

    def lacks(self, line: Line) -> bool:
        """Return whether a line was not sent yet."""
        return bool(line["step"] > self.steps.get(line["kind"], -1))

    def plus(self, lines: Sequence[Line]) -> "Sent":
        """Return the same after these lines were sent."""
        return replace(self, steps={**self.steps, **{line["kind"]: line["step"] for line in lines}})


def path_of(folder: Path, tracker: str) -> Path:
    """Return the file of a tracker in the folder of a run."""
    return folder / SENT_FILES[tracker]


def files_of(folder: Path, sent: Sent, name: str) -> str:
    """Return the folder `name` of a run, or of the run beside it that it continues, as a URL.

    Neither the record of what was sent nor a folder that came back with a host's results is
    trusted: another place would get the credentials in the environment, or have files overwritten.
    UsageError for a server in the record, and for a folder without a record.
    """
    if not sent.location and (folder / name).exists():
        hint = "look at it as it is, or name a server in the tracker's variable"
        raise UsageError(f"{folder / name}: came with the results of a host; {hint}")
    if sent.location and not sent.location.startswith("file:"):
        tracker_url = one_line(sent.location)[:200]
        hint = "if it may have this one as well, name it in the tracker's variable"
        raise UsageError(f"{folder}: the run was sent to {tracker_url}; {hint}")
    named = PurePosixPath(unquote(sent.location)).parent.name
    beside, in_run = (run.absolute() / name for run in (folder.parent / named, folder))
    return (beside if beside.as_uri() == sent.location and named != ".." else in_run).as_uri()


def read_sent(folder: Path, tracker: str) -> Sent:
    """Return what a tracker has; DataError when the file cannot be understood."""
    path = path_of(folder, tracker)
    if not path.exists():
        return Sent()
    try:
        return parsed_file(path, Sent, MOST_BYTES)
    except Misshapen as error:
        raise DataError(f"{path}: {error}; remove it to begin a new run of {tracker}") from None


def write_sent(folder: Path, tracker: str, sent: Sent) -> None:
    """Remember what a tracker has."""
    write_whole(path_of(folder, tracker), json.dumps(asdict(sent)).encode())


def hand_on(earlier: Path, folder: Path, tracker: str) -> None:
    """Let a run go on as the tracker's run of an earlier one."""
    target = path_of(folder, tracker)
    with translated_os_errors(target), suppress(FileNotFoundError, shutil.SameFileError):
        shutil.copyfile(path_of(earlier, tracker), target)
