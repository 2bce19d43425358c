"""The ledger of a run: which samples each rank trained on, and the proof that epochs are exact.

    <run>/ledger/00000120-00000240.npz    the steps between two checkpoints
        counts   int32 (ranks, steps): samples per rank and step
        rows     int32: the rows of the index, step by step of rank 0, then of rank 1, …
        samples  rows in the index; epoch_steps, steps that make an epoch
        generation  the number of the ranks' group in an elastic run, else 0
        data     uint8 (32,): the digest of the version of the data set that the rows are of
        begun    the step at which the run began with that version

Entries are the samples that reached the optimizer, not those that were planned. Ranks exchange
them during each step, so that the share of a rank that is lost later is not lost with it. Pages
are written when a checkpoint is, and kept with it on every disk. Steps after the last checkpoint
that were lost in an interruption are in no file, as they are in no weights: the run repeats them.
"""

import io
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import numpy as np
import numpy.typing as npt

from rackrun import npy
from rackrun.atomic import write_whole
from rackrun.errors import DataError
from rackrun.terminal import one_line
from rackrun.units import plural

if TYPE_CHECKING:
    from training.ranks import Ranks

NAME = re.compile(r"(\d{8,})-(\d{8,})\.npz")
NO_DATA = "0" * 64  # of synthetic images
NAMED = 5  # rows that a complaint names
MOST_STEPS = 10**9
ZIP_ERRORS = (  # errors of zipfile for a damaged or malicious page
    *(ValueError, KeyError, OSError, EOFError, RuntimeError, OverflowError),
    *(BadZipFile, struct.error),
)

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Interval:
    """Samples trained from step `first` (counted from 0) to before `last`."""

    first: int
    last: int
    counts: Rows  # (ranks, steps)
    rows: Rows
    samples: int
    epoch_steps: int
    generation: int = 0
    data: str = NO_DATA
    """The digest of the data set's version."""
    begun: int = 0
    """The step at which the run began with it."""

    @property
    def fits(self) -> bool:
        """Return True when the numbers can be those of a run."""
        ranges = 0 <= self.begun <= self.first < self.last <= MOST_STEPS
        ranges = ranges and 0 < self.samples < 2**31 and len(self.data) == len(NO_DATA)
        return (
            ranges
            and 0 < self.epoch_steps <= MOST_STEPS
            and self.generation >= 0
            and self.counts.shape[0] > 0
            and self.counts.shape[1] == self.last - self.first
            and bool((self.counts >= 0).all())
            and int(self.counts.sum(dtype=np.int64)) == self.rows.size
            and bool(((self.rows >= 0) & (self.rows < self.samples)).all())
        )

    @property
    def steps(self) -> Rows:
        """By entry of `rows`, its step."""
        ranks, steps = self.counts.shape
        return np.repeat(np.tile(np.arange(self.first, self.last), ranks), self.counts.ravel())


class Note(NamedTuple):
    """The samples of a step: how many each rank of a group had, and their rows, by rank."""

    generation: int
    counts: Rows
    rows: Rows


class Ledger:
    """Notes the samples of all ranks; with every checkpoint, a rank of each disk writes a page."""

    def __init__(
        self,
        folder: Path,
        ranks: "Ranks",
        writes: bool,
        samples: int,
        epoch_steps: int,
        data: str = "",
    ) -> None:
        self.folder = folder
        self._samples = samples
        self._epoch_steps = epoch_steps
        self._notes: dict[int, Note] = {}
        self._data = data or NO_DATA
        self._begun = 0
        self.enter(ranks, writes)

    def enter(self, ranks: "Ranks", writes: bool) -> None:
        """Go on in a group, as the rank that writes to a disk or as another one."""
        self._ranks = ranks
        self._writes = writes

    def note(self, step: int, counts: Rows, rows: Rows) -> None:
        """Note the samples of a step; they count once it is taken, and are noted again if not."""
        # By step: one that was lost with a rank is trained again, and then overwrites its note.
        self._notes[step] = Note(self._ranks.generation, counts, rows)

    def write(self, step: int) -> None:
        """Write what was noted since the last call, up to this step, once per disk."""
        noted = [item for item in sorted(self._notes.items()) if item[0] < step]
        # A page has steps of one group of ranks. Before a resume, there may have been another one.
        by_group = groupby(noted, lambda item: (item[1].generation, item[1].counts.size))
        for (generation, _), items in by_group if self._writes else ():
            steps, notes = zip(*items, strict=True)
            page = Interval(
                first=steps[0],
                last=steps[-1] + 1,
                counts=np.stack([note.counts for note in notes], 1),
                rows=_by_rank(notes),
                samples=self._samples,
                epoch_steps=self._epoch_steps,
                generation=generation,
                data=self._data,
                begun=self._begun,
            )
            save(self.folder, page)
        self._notes = {}

    def state_dict(self) -> dict[str, npt.NDArray[np.integer[Any]]]:
        """Return what was noted and is in no page yet, for a rank that has missed it."""
        notes = [
            [step, note.generation, note.counts.size, note.rows.size]
            for step, note in self._notes.items()
        ]
        empty = np.empty(0, np.int32)
        return {
            "notes": np.array(notes, np.int64).reshape(-1, 4),
            "counts": np.concatenate([empty, *(note.counts for note in self._notes.values())]),
            "rows": np.concatenate([empty, *(note.rows for note in self._notes.values())]),
        }

    def load_state_dict(self, state: dict[str, npt.NDArray[np.integer[Any]]]) -> None:
        """Take over what `state_dict` returned."""
        steps, generations, worlds, sizes = state["notes"].T
        counts = np.split(state["counts"], np.cumsum(worlds)[:-1])
        rows = np.split(state["rows"], np.cumsum(sizes)[:-1])
        notes = map(Note, generations.tolist(), counts, rows)
        # Not strict: of nothing, np.split makes one empty part.
        self._notes = dict(zip(steps.tolist(), notes, strict=False))

    def begin(self, step: int) -> None:
        """Begin at this step, with another version of the data than before it."""
        self._begun = step

    def go_on(self, step: int, earlier: Path, source: int) -> None:
        """Continue at this step with the ledger that rank `source` has in an earlier run.

        A page at a time: a ledger of ninety epochs of ImageNet has 460 MB.
        """
        intervals = pages(earlier) if self._ranks.rank == source else iter(())
        sent = (as_file(interval) for interval in intervals if interval.last <= step)
        self.replace(iter(lambda: self._ranks.broadcast_bytes(next(sent, None), source), b""))

    def replace(self, files: Iterator[bytes]) -> None:
        """Write these pages, if this rank writes, in place of all that are there."""
        kept = set[str]()
        for data in files:
            if self._writes:
                interval = as_interval(data, Path("ledger"))
                self._begun = interval.begun
                save(self.folder, interval)
                kept.add(page_name(interval))
        for path in self.folder.glob("*.npz") if self._writes else ():
            if path.name not in kept:
                path.unlink(missing_ok=True)


def _by_rank(notes: Sequence[Note]) -> Rows:
    # Step by step of rank 0, then of rank 1, …
    parts = [np.split(note.rows, np.cumsum(note.counts)[:-1]) for note in notes]
    by_rank = [rows for of_rank in zip(*parts, strict=True) for rows in of_rank]
    return np.concatenate(by_rank).astype(np.int32)


def save(folder: Path, interval: Interval) -> None:
    """Write an interval to its file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / page_name(interval), as_file(interval))


def page_name(interval: Interval) -> str:
    """Return the name of an interval's file: its first step, and the one after its last."""
    return f"{interval.first:08d}-{interval.last:08d}.npz"


def read(folder: Path) -> list[Interval]:
    """Return the intervals in a folder, in order."""
    return list(pages(folder))


def page_paths(folder: Path) -> list[Path]:
    """Return the pages in a folder, in order."""
    return sorted(path for path in folder.glob("*.npz") if NAME.fullmatch(path.name))


def pages(folder: Path) -> Iterator[Interval]:
    """Yield the intervals in a folder, in order, each read when it is asked for."""
    run: tuple[int, int, str, int] | None = None
    for path in page_paths(folder):
        interval = as_interval(path.read_bytes(), path)
        of_interval = interval.samples, interval.epoch_steps, interval.data, interval.begun
        run = run or of_interval
        if of_interval != run:
            raise DataError(f"{folder}: pages of different runs")
        yield interval


def as_file(interval: Interval) -> bytes:
    """Return an interval as the bytes of its file."""
    buffer = io.BytesIO()
    digest = np.frombuffer(bytes.fromhex(interval.data), np.uint8)
    np.savez(buffer, **{**vars(interval), "data": digest})
    return buffer.getvalue()


def as_interval(data: bytes, path: Path) -> Interval:
    """Return the interval in a file; DataError when it is damaged."""
    try:
        with ZipFile(io.BytesIO(data)) as pages:
            counts, rows = _table(pages, "counts", "<i4", 2), _table(pages, "rows", "<i4", 1)
            first, last, samples, epoch_steps, generation, begun = (
                int(_table(pages, name, "<i8", 0))
                for name in ("first", "last", "samples", "epoch_steps", "generation", "begun")
            )
            digest = _table(pages, "data", "|u1", 1).tobytes().hex()
    except ZIP_ERRORS as error:
        raise DataError(f"{path}: not a page of a ledger: {one_line(str(error))[:200]}") from None
    sizes = samples, epoch_steps, generation, digest, begun
    interval = Interval(first, last, counts, rows, *sizes)
    if not interval.fits:
        raise DataError(f"{path}: a page of a ledger whose numbers do not fit together")
    return interval


def _table(pages: ZipFile, name: str, descr: str, dimensions: int) -> Any:
    # As numpy stores it, uncompressed: so it is no larger than the page that was read.
    entry = pages.getinfo(f"{name}.npy")
    if entry.compress_type != ZIP_STORED:
        raise ValueError(f"{name} is compressed")
    array = npy.array(pages.read(entry), descr)
    if array.ndim != dimensions:
        raise ValueError(f"{name} has {array.ndim} dimensions")
    return array


@dataclass(frozen=True)
class Verdict:
    """Verdict on an epoch (counted from 0)."""

    epoch: int
    steps: int  # that are written down
    due: int  # steps that should be: all of the epoch, or as many as the run has done
    epoch_steps: int
    samples: int
    ranks: tuple[int, ...]  # how many there were, in the order in which that changed
    generations: tuple[int, ...]  # of their groups in an elastic run
    missing: Rows  # rows that did not come, or not often enough, in an epoch that is over
    extra: Rows  # rows that came too often

    @property
    def exact(self) -> bool:
        """Return True when the epoch, as far as it came, is exact."""
        return self.steps == self.due and not self.missing.size and not self.extra.size

    def __str__(self) -> str:
        ranks = ", then ".join(map(str, self.ranks)) or "no"
        noun = "rank" if ranks.endswith(" 1") or ranks == "1" else "ranks"
        samples = plural(self.samples, "sample")
        parts = [f"epoch {self.epoch + 1}: {samples} on {ranks} {noun}"]
        if self.generations:
            groups = "group" if len(self.generations) == 1 else "groups"
            parts[0] += f" ({groups} {', '.join(map(str, self.generations))})"
        if self.steps < self.epoch_steps:
            parts.append(f"{self.steps:,} of {plural(self.epoch_steps, 'step')}")
        if self.steps < self.due:
            parts.append(f"not in the ledger: {plural(self.due - self.steps, 'step')}")
        parts += _named("missing", self.missing) + _named("too often", self.extra)
        if self.exact:
            over = self.due == self.epoch_steps
            parts.append("each as often as planned" if over else "none too often so far")
        return "; ".join(parts)


def verdicts(intervals: list[Interval], expected: dict[int, Rows] | None = None) -> list[Verdict]:
    """Compare each epoch with the data set: every row once, or as often as in `expected`.

    `expected` has by epoch how often each row must come.
    """
    last = max((interval.last for interval in intervals), default=0)
    epochs = -(-last // intervals[0].epoch_steps) if intervals else 0
    begun = intervals[0].begun // intervals[0].epoch_steps if intervals else 0
    return [_verdict(epoch, intervals, last, expected) for epoch in range(begun, epochs)]


def _verdict(
    epoch: int, intervals: list[Interval], last: int, expected: dict[int, Rows] | None
) -> Verdict:
    samples, epoch_steps = intervals[0].samples, intervals[0].epoch_steps
    begin, end = epoch * epoch_steps, min((epoch + 1) * epoch_steps, last)
    expected_times = expected[epoch] if expected else np.ones(samples, np.int32)
    times = np.zeros(samples, np.int32)
    steps: set[int] = set()
    ranks: list[int] = []
    generations: list[int] = []
    for interval in intervals:
        overlap = range(max(interval.first, begin), min(interval.last, end))
        if overlap:
            steps.update(overlap)
            rows = interval.rows[(interval.steps >= begin) & (interval.steps < end)]
            times += np.bincount(rows, minlength=samples).astype(np.int32)
            ranks += [len(interval.counts)] if ranks[-1:] != [len(interval.counts)] else []
            generations += [interval.generation] if interval.generation else []
    over = end - begin == epoch_steps
    return Verdict(
        epoch=epoch,
        steps=len(steps),
        due=end - begin,
        epoch_steps=epoch_steps,
        samples=int(times.sum()),
        ranks=tuple(ranks),
        generations=tuple(dict.fromkeys(generations)),
        missing=np.flatnonzero(times < expected_times if over else []).astype(np.int32),
        extra=np.flatnonzero(times > expected_times).astype(np.int32),
    )


def _named(what: str, rows: Rows) -> list[str]:
    if not rows.size:
        return []
    few = [str(row) for row in rows[:NAMED]] + ["…"] * (rows.size > NAMED)
    return [f"{rows.size:,} {what}: rows {', '.join(few)}"]
