"""What a run folder holds, read and checked: nothing in it is trusted.

metrics.jsonl, config.json, plan.json, result.json, usage.jsonl, grids of images -> Story
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from rackrun.commands import called
from rackrun.errors import DataError, UsageError
from rackrun.run_files import LARGEST, RunEnd, RunPlan, with_all_nodes
from rackrun.run_folder import RunFolder
from rackrun.run_history import LINE_BYTES, MOST_USAGE_BYTES, HostUsage, usage_line
from rackrun.run_report.grids import (
    Predictions,
    TrainingImages,
    read_predictions,
    read_training_images,
)
from rackrun.shapes import Misshapen, at_most, between, parsed_file, shaped
from rackrun.terminal import say

FIELDS = {  # fields of a line of metrics.jsonl, by its kind
    "start": ("step", "epoch"),
    "train": ("step", "epoch", "loss", "accuracy", "images_per_second", "rate"),
    "evaluate": ("step", "epoch", "loss", "top1", "samples"),
    "waits": ("step", "epoch", "rank", "waited", "network"),
    "shares": ("step", "epoch", "time"),
}
WHOLE = ("step", "samples")
SETTINGS = "the settings of a run"
MOST_JSON_BYTES = 1 << 25
MOST_RANKS = 1 << 12
Images = Annotated[int, between(0, 2**31)]
PLAIN = (str, int, float, type(None))
Line = dict[str, Any]
Values = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class RunSegment:
    """The lines of a run from its begin, or from where it was resumed, to the next resume."""

    step: int
    epoch: float
    seconds: float
    train: list[Line]

    @property
    def speed(self) -> float:
        """Return the images per second of its steps together."""
        return mean_speed(self.train, self.step)


@dataclass(frozen=True)
class Story:
    """Contents of a run folder."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    train: list[Line] = field(default_factory=list)
    validation: list[Line] = field(default_factory=list)
    predictions: Predictions | None = None
    hardest: Predictions | None = None
    """The images with the highest loss, highest first."""
    first_batch: TrainingImages | None = None
    plan: RunPlan = RunPlan()
    end: RunEnd = RunEnd()
    usage: list[HostUsage] = field(default_factory=list)
    parts: list[RunSegment] = field(default_factory=list)
    """More than one of a run that was resumed."""
    shares: list[Line] = field(default_factory=list)
    """When ranks got other numbers of images of a step (--balance auto); none if always even."""
    begun: float = 0.0
    """The time of the first line that was written."""

    @property
    def seconds(self) -> float:
        """Return how long all parts together took; of the last one, from start to end."""
        return sum(part.seconds for part in self.parts) or self.end.seconds

    @property
    def settings(self) -> dict[str, Any]:
        """Return the settings of training."""
        return {name: value for name, value in self.config.items() if name != "resolved"}

    @property
    def best(self) -> Line | None:
        """Return its best evaluation; None without one, and for noise."""
        of_images = () if self.config.get("synthetic") else self.validation
        return max(of_images, key=lambda line: float(line["top1"]), default=None)

    @property
    def accuracy(self) -> float | None:
        """Return the best accuracy of its evaluations, or what it has reported; None for noise."""
        if self.config.get("synthetic"):
            return None
        if self.best:
            return float(self.best["top1"])
        best = self.end.number("best")
        return self.end.number("accuracy") if best is None else best

    @property
    def speed(self) -> float | None:
        """Return the images per second of all steps, or what it has reported last."""
        return mean_speed(self.train) if self.train else self.end.number("images_per_second")

    @property
    def judged_by(self) -> str:
        """Return the split that was evaluated, in words."""
        return "test" if self.config.get("eval_split") == "test" else "validation"


def read(folder: Path) -> Story:
    """Return all that a run has left so far; UsageError for a folder that is none of a run."""
    files = RunFolder(folder)
    needed = (files.metrics, files.plan, files.config)
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such run; {called('ps')} lists the runs")
    if not any(path.exists() for path in needed):
        missing = "{}, {} and {} are missing".format(*(path.name for path in needed))
        raise UsageError(f"{folder}: not the folder of a run: {missing}")
    lines, usage = list(_lines(files.metrics, _metric_line, "metrics")), read_usage(folder)
    end = _document(files.result, RunEnd, "the result of a run")
    times = [line["time"] for line in lines if "time" in line]
    return Story(
        name=folder.absolute().name,
        config=_document(files.config, dict[str, Any], SETTINGS),
        train=[line for line in lines if line["kind"] == "train"],
        validation=[line for line in lines if line["kind"] == "evaluate"],
        predictions=read_predictions(files.predictions),
        hardest=read_predictions(files.hardest),
        first_batch=read_training_images(files.first_batch),
        plan=with_all_nodes(_document(files.plan, RunPlan, "the plan of a run"), files),
        end=end,
        usage=usage,
        parts=_parts(lines, end.seconds),
        shares=_uneven([line for line in lines if line["kind"] == "shares"]),
        begun=min([*times, *(line.time for line in usage)], default=0.0),
    )


def _parts(lines: Sequence[Line], last_seconds: float) -> list[RunSegment]:
    """Return the parts of a run in which it took steps; a part ends with its last line.

    How long the last one took, its launcher knows best, if it has ended.
    """
    parts = []
    starts = [number for number, line in enumerate(lines) if line["kind"] == "start"]
    for first, after in itertools.pairwise([*starts, len(lines)]):
        start, train = lines[first], [one for one in lines[first:after] if one["kind"] == "train"]
        if train:
            ended = lines[after - 1].get("time", 0.0)
            seconds = max(0.0, ended - start.get("time", ended))
            parts.append(RunSegment(start["step"], start["epoch"], seconds, train))
    if parts and last_seconds:
        parts[-1] = replace(parts[-1], seconds=last_seconds)
    return parts


def _uneven(shares: list[Line]) -> list[Line]:
    """Return the lines about each rank's images of a step; none if they were always equal."""
    uneven = any(max(ones := line["images"].values()) > min(ones) + 1 for line in shares)
    return shares if uneven else []


def read_usage(folder: Path) -> list[HostUsage]:
    """Return what hosts used over time."""
    nodes = RunFolder(folder).of_nodes()
    return [line for node in nodes for line in _lines(node.usage, usage_line, "usage")]


def _lines(path: Path, decoded: Callable[[str], T], kind: str) -> Iterator[T]:
    """Yield the lines of a file; the last one may be cut short where the run was.

    Of a file beyond the limit only its beginning is read: a host may have sent it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        content = file.read(MOST_USAGE_BYTES)
        if file.read(1):
            say(f"{path}: longer than {MOST_USAGE_BYTES} bytes; the rest is left out")
    for number, line in enumerate(content.splitlines(keepends=True), start=1):
        try:
            yield decoded(line.decode(errors="replace"))
        except (ValueError, KeyError, TypeError, OverflowError):
            if line.endswith(b"\n") or len(line) > LINE_BYTES:
                raise DataError(f"{path}: line {number} is not a line of {kind}") from None


def _metric_line(text: str) -> Line:
    if len(text) > LINE_BYTES:
        raise ValueError("too long")
    try:
        content = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError("no object")
    line: Line = {name: value for name, value in content.items() if isinstance(value, PLAIN)}
    for name in FIELDS[line["kind"]]:
        value = float(line[name])
        line[name] = int(value) if name in WHOLE else value
    if line["kind"] == "shares":  # how many images of a step each rank gets
        images = shaped(content["images"], dict[Annotated[str, at_most(8)], Images])
        if not images or len(images) > MOST_RANKS or not all(map(str.isdecimal, images)):
            raise ValueError("no images by rank")
        line["images"] = {int(rank): count for rank, count in images.items()}
    if not 0 <= float(line.get("time", 0)) <= LARGEST:
        raise ValueError(line["time"])
    return line


def _document(path: Path, shape: type[T], kind: str) -> T:
    """Return what of a JSON file is shown, an empty one where it is missing."""
    if not path.exists():
        return shape()
    try:
        return parsed_file(path, shape, MOST_JSON_BYTES)
    except Misshapen as error:
        raise DataError(f"{path}: not {kind}: {error}") from None


def values(lines: Sequence[Line], name: str) -> Values:
    """Return one quantity of lines."""
    return np.array([line[name] for line in lines], dtype=np.float64)


def mean_speed(train: Sequence[Line], first_step: int = 0) -> float:
    """Return the images per second of all steps together, as the run's last line has them."""
    steps = np.maximum(np.diff(values(train, "step"), prepend=float(first_step)), 1.0)
    speeds = np.maximum(values(train, "images_per_second"), 1e-9)
    return float(steps.sum() / (steps / speeds).sum())


def smoothed(course: Values, parts: int = 24) -> Values:
    """Return means over a neighborhood, a share of all values, which narrows at both ends."""
    reach = len(course) // parts
    sums = np.concatenate([[0.0], np.cumsum(course)])
    index = np.arange(len(course))
    near = np.minimum(np.minimum(index, index[::-1]), reach)
    means: Values = (sums[index + near + 1] - sums[index - near]) / (2 * near + 1)
    return means
