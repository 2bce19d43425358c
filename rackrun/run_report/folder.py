"""What a run folder holds, read and checked: nothing in it is believed.

metrics.jsonl, config.json, predictions.npz, plan.json, result.json, usage.jsonl -> Story
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar
from zipfile import ZIP_DEFLATED, ZIP_STORED, BadZipFile, ZipFile

import numpy as np
from numpy.typing import NDArray

from rackrun.errors import DataError, UsageError
from rackrun.run_report import npy
from rackrun.run_report.usage import LINE_BYTES, MOST_BYTES, HostUsage, usage_line
from rackrun.shapes import Misshapen, parsed_file, shaped
from rackrun.terminal import one_line, say

PAGE = "report.html"
FIELDS = {  # fields of a line of metrics.jsonl, by its kind
    "train": ("step", "epoch", "loss", "accuracy", "images_per_second", "rate"),
    "evaluate": ("step", "epoch", "loss", "top1", "samples"),
    "waits": ("step", "epoch", "rank", "waited", "network"),
}
WHOLE = ("step", "samples")
LAST_MOMENT = 1e11  # in seconds: beyond what clocks show
PLANNED, ENDED = "the plan of a run", "the result of a run"
METRICS = "metrics"
MOST_JSON_BYTES = 1 << 25
PIECE_BYTES = 1 << 20  # of metrics.jsonl, read at once while it grows; many times LINE_BYTES
MOST_ARCHIVE_BYTES = 1 << 25  # compressed, of predictions
MOST_PREDICTION_BYTES = 1 << 28
WHOLE_NUMBERS, FRACTIONS = ("<i8", "<i4"), ("<f4", "<f8", "<f2")
TEXTS = re.compile(rb"'descr': '(<U\d{1,4})'")
DAMAGE = (  # what a damaged archive, or one that was made to harm, makes of zipfile
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, OverflowError, TypeError),
    *(MemoryError, BadZipFile, zlib.error),
)

PLAIN = (str, int, float, type(None))
Line = dict[str, Any]
Values = NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True)
class Said:
    """Validation images and the model's answers."""

    images: NDArray[np.uint8]  # (N, height, width, channels)
    labels: NDArray[np.int64]
    predicted: NDArray[np.int64]
    probability: NDArray[np.float32]
    classes: list[str]
    confusion: NDArray[np.int64] | None = None
    """(classes, classes): validation images by label and by prediction."""

    def check(self) -> None:
        """Raise ValueError unless the parts fit together."""
        count, classes = len(self.images), range(len(self.classes))
        if self.images.ndim != 4 or self.images.shape[3] not in (1, 3):
            raise ValueError(f"images of shape {self.images.shape}")
        if {len(self.labels), len(self.predicted), len(self.probability)} != {count}:
            raise ValueError(f"not as many answers as there are images ({count})")
        if not all(int(label) in classes for label in (*self.labels, *self.predicted)):
            raise ValueError(f"a label outside the {len(classes)} classes")
        if self.confusion is not None and self.confusion.shape != (len(classes), len(classes)):
            raise ValueError(f"a confusion matrix of shape {self.confusion.shape}")


@dataclass(frozen=True)
class RunHost:
    """A host of plan.json."""

    name: str = ""
    processes: int = 0
    command: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    gpu_model: str = ""


@dataclass(frozen=True)
class RunPlan:
    """What of plan.json is shown; empty where there is none."""

    run_id: str = ""
    world_size: int = 0
    hosts: tuple[RunHost, ...] = ()


@dataclass(frozen=True)
class RunEnd:
    """What of result.json is shown; empty where there is none yet."""

    verdict: str = ""
    exit_code: int | None = None
    cause: str = ""
    seconds: float = 0.0
    hosts: dict[str, str] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    """What ranks have reported last, by name."""

    def number(self, name: str) -> float | None:
        """Return a number that ranks have reported; None if they have not."""
        value = self.report.get(name)
        if isinstance(value, int | float) and abs(value) < LAST_MOMENT:
            return float(value)
        return None


@dataclass(frozen=True)
class Story:
    """Contents of a run folder."""

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    train: list[Line] = field(default_factory=list)
    validation: list[Line] = field(default_factory=list)
    said: Said | None = None
    plan: RunPlan = RunPlan()
    end: RunEnd = RunEnd()
    usage: list[HostUsage] = field(default_factory=list)

    @property
    def judged_by(self) -> str:
        """Return the split that was evaluated, in words."""
        return "test" if self.config.get("eval_split") == "test" else "validation"


def read(folder: Path) -> Story:
    """Return all that a run has left so far; UsageError for a folder that is none of a run."""
    names = ("metrics.jsonl", "plan.json", "config.json")
    if not any((folder / name).exists() for name in names):
        missing = f"{', '.join(names[:-1])} and {names[-1]} are missing"
        raise UsageError(f"{folder}: not the folder of a run: {missing}")
    lines = list(_lines(folder / "metrics.jsonl", _metric_line, METRICS))
    return Story(
        name=folder.absolute().name,
        config=read_settings(folder),
        train=[line for line in lines if line["kind"] == "train"],
        validation=[line for line in lines if line["kind"] == "evaluate"],
        said=read_predictions(folder / "predictions.npz"),
        plan=_plan(folder / "plan.json"),
        end=_picked(_object(folder / "result.json", ENDED), RunEnd, folder / "result.json", ENDED),
        usage=read_usage(folder),
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Return config.json, an empty one where it is missing; DataError for what is none."""
    return _object(folder / "config.json", "the settings of a run")


def read_usage(folder: Path) -> list[HostUsage]:
    """Return what hosts used over time."""
    return list(_lines(folder / "usage.jsonl", usage_line, "usage"))


def _lines(path: Path, decoded: Callable[[str], T], kind: str) -> Iterator[T]:
    """Yield the lines of a file; the last one may be cut short where the run was.

    Of a file beyond the limit only its beginning is read: a host may have sent it.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        number, left = 0, MOST_BYTES
        while text := file.readline(LINE_BYTES + 1):
            number, left = number + 1, left - len(text)
            if left < 0:
                say(f"{path}: longer than {MOST_BYTES} bytes; the rest is left out")
                return
            try:
                yield _line(path, number, text, decoded, kind)
            except DataError:
                if text.endswith(b"\n") or len(text) > LINE_BYTES:
                    raise


def _line(path: Path, number: int, text: bytes, decoded: Callable[[str], T], kind: str) -> T:
    """Return a line of a file; DataError with its number where it is malformed."""
    try:
        return decoded(text.decode(errors="replace"))
    except (ValueError, KeyError, TypeError, OverflowError):
        raise DataError(f"{path}: line {number} is not a line of {kind}") from None


class MetricsReader:
    """Reads the lines that are appended to metrics.jsonl while a run writes it."""

    def __init__(self, path: Path) -> None:
        """Start at the beginning; the file may not be there yet."""
        self.path = path
        self._place = 0
        self._lines = 0

    def next_lines(self) -> list[Line]:
        """Return whole lines that came since the last call, a bounded number; [] for none.

        Raises DataError for a malformed line, or a longer one than a run writes.
        """
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._place)
            piece = file.read(PIECE_BYTES)
        *whole, rest = piece.split(b"\n")
        if len(rest) > LINE_BYTES:
            whole.append(rest)
        first, self._lines = self._lines + 1, self._lines + len(whole)
        self._place += len(piece) - len(rest)
        return [
            _line(self.path, number, text, _metric_line, METRICS)
            for number, text in enumerate(whole, first)
        ]


def _metric_line(text: str) -> Line:
    """Return a line of metrics.jsonl, whose numbers are numbers; ValueError and others else."""
    if len(text) > LINE_BYTES:
        raise ValueError("too long")
    try:
        told = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(told, dict):
        raise ValueError("no object")
    line: Line = {name: value for name, value in told.items() if isinstance(value, PLAIN)}
    for name in FIELDS[line["kind"]]:
        value = float(line[name])
        line[name] = int(value) if name in WHOLE else value
    if not 0 <= float(line.get("time", 0)) <= LAST_MOMENT:
        raise ValueError(line["time"])
    return line


def _object(path: Path, kind: str) -> dict[str, Any]:
    """Return a JSON object; an empty one where the file is missing."""
    if not path.exists():
        return {}
    try:
        return parsed_file(path, dict[str, Any], MOST_JSON_BYTES)
    except Misshapen as error:
        raise DataError(f"{path}: not {kind}: {error}") from None


def _plan(path: Path) -> RunPlan:
    found = _object(path, PLANNED)
    hosts = found.get("hosts", [])
    if isinstance(hosts, list):
        found["hosts"] = [
            {name: host[name] for name in _names(RunHost) if name in host}
            for host in hosts
            if isinstance(host, dict)
        ]
    return _picked(found, RunPlan, path, PLANNED)


def _picked(found: dict[str, Any], shape: type[T], path: Path, kind: str) -> T:
    """Return those fields of an object that are shown; DataError where they are malformed."""
    known = {name: found[name] for name in _names(shape) if name in found}
    try:
        picked: T = shaped(known, shape)
    except Misshapen as error:
        raise DataError(f"{path}: not {kind}: {error}") from None
    return picked


def _names(shape: Any) -> list[str]:
    return [one.name for one in fields(shape)]


def read_predictions(path: Path) -> Said | None:
    """Return the images with answers, or None where there are none; DataError for damage."""
    if not path.exists():
        return None
    try:
        if path.stat().st_size > MOST_ARCHIVE_BYTES:
            raise ValueError(f"more than {MOST_ARCHIVE_BYTES} bytes")
        with ZipFile(path) as archive:
            if sum(part.file_size for part in archive.infolist()) > MOST_PREDICTION_BYTES:
                raise ValueError(f"more than {MOST_PREDICTION_BYTES} bytes")
            said = Said(
                images=_array(archive, "images", "|u1"),
                labels=_array(archive, "labels", *WHOLE_NUMBERS),
                predicted=_array(archive, "predicted", *WHOLE_NUMBERS),
                probability=_array(archive, "probability", *FRACTIONS),
                classes=_texts(archive, "classes"),
                confusion=_array(archive, "confusion", *WHOLE_NUMBERS)
                if "confusion.npy" in archive.namelist()
                else None,
            )
        said.check()
    except DAMAGE as error:
        why = one_line(str(error))[:200]
        raise DataError(f"{path}: not a grid of predictions: {why}") from None
    return said if len(said.images) else None


def _array(archive: ZipFile, name: str, *descrs: str) -> NDArray[Any]:
    """Return an array of one of these types from an archive of numpy's."""
    return npy.array(_content(archive, name), *descrs)


def _texts(archive: ZipFile, name: str) -> list[str]:
    """Return an array of text, whose type has the length of the longest."""
    data = _content(archive, name)
    if not (descr := TEXTS.search(data, 0, npy.LONGEST_HEADER)):
        raise ValueError(f"{name} is no text")
    found: list[str] = shaped(npy.array(data, descr[1].decode()).tolist(), list[str], name)
    return found


def _content(archive: ZipFile, name: str) -> bytes:
    entry = archive.getinfo(f"{name}.npy")
    if entry.compress_type not in (ZIP_STORED, ZIP_DEFLATED):
        raise ValueError(f"{name} is compressed in another way than by numpy")
    return archive.read(entry)


def values(lines: Sequence[Line], name: str) -> Values:
    """Return one quantity of lines."""
    return np.array([line[name] for line in lines], dtype=np.float64)


def mean_speed(train: Sequence[Line]) -> float:
    """Return the images per second of all steps together, as the run's last line has them."""
    steps = np.maximum(np.diff(values(train, "step"), prepend=0.0), 1.0)
    speeds = np.maximum(values(train, "images_per_second"), 1e-9)
    return float(steps.sum() / (steps / speeds).sum())


def smoothed(course: Values, parts: int = 24) -> Values:
    """Return means over a neighbourhood, a share of all values, which narrows at both ends."""
    reach = len(course) // parts
    sums = np.concatenate([[0.0], np.cumsum(course)])
    place = np.arange(len(course))
    near = np.minimum(np.minimum(place, place[::-1]), reach)
    means: Values = (sums[place + near + 1] - sums[place - near]) / (2 * near + 1)
    return means
