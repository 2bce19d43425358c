"""The ledger of a run: which samples each rank trained on, and the proof that epochs are exact.

    <run>/ledger/00000120-00000240.npz    the steps between two checkpoints
        counts   int32 (ranks, steps): samples per rank and step
        rows     int32: the rows of the index, step by step of rank 0, then of rank 1, …
        samples  rows in the index; epoch_steps, steps that make an epoch

Entries are what reached the optimiser, not what was planned. They are gathered when a checkpoint
is written, and stand beside it on every node. What was trained after the last checkpoint and lost
in an interruption is in no file, as it is in no weights: the run trains it again.
"""

import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from shards.errors import DataError, UsageError
from shards.whole import write_whole

if TYPE_CHECKING:
    from training.distributed import Ranks

NAME = re.compile(r"(\d{8,})-(\d{8,})\.npz")
NAMED = 5  # rows that a complaint names

Rows = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Interval:
    """What was trained from step `first` on (counted from 0) to `last` (without it)."""

    first: int
    last: int
    counts: Rows  # (ranks, steps)
    rows: Rows
    samples: int
    epoch_steps: int

    @property
    def steps(self) -> Rows:
        """By entry of `rows`, its step."""
        ranks, steps = self.counts.shape
        return np.repeat(np.tile(np.arange(self.first, self.last), ranks), self.counts.ravel())


class Ledger:
    """Notes what this rank trains on; all ranks together write it down with every checkpoint."""

    def __init__(self, folder: Path, ranks: "Ranks", samples: int, epoch_steps: int) -> None:
        self.folder = folder
        self._ranks = ranks
        self._samples = samples
        self._epoch_steps = epoch_steps
        self._first = 0
        self._noted: list[Rows] = []

    def note(self, rows: Rows) -> None:
        """The rows of this rank's batch of the next step."""
        self._noted.append(rows)

    def write(self) -> None:
        """Write what all ranks noted since the last call, on every node."""
        if not self._noted:
            return
        counts = self._ranks.gathered(np.array([rows.size for rows in self._noted], np.int32))
        rows = self._ranks.gathered(np.concatenate(self._noted).astype(np.int32))
        last = self._first + len(self._noted)
        if self._ranks.writes:
            save(
                self.folder,
                Interval(
                    self._first,
                    last,
                    np.stack(counts),
                    np.concatenate(rows),
                    self._samples,
                    self._epoch_steps,
                ),
            )
        self._first, self._noted = last, []

    def go_on(self, step: int, earlier: Path, source: int) -> None:
        """Continue at this step with the ledger that rank `source` has in an earlier run."""
        here = self._ranks.rank == source
        payload = pack(read(earlier), step) if here else None
        intervals = unpack(self._ranks.share_bytes(payload, source))
        if self._ranks.writes:  # on a disk that nodes share, each of them does the same
            kept = {page_name(interval): interval for interval in intervals}
            for path in self.folder.glob("*.npz"):
                if path.name not in kept:
                    path.unlink(missing_ok=True)
            for interval in kept.values():
                save(self.folder, interval)
        self._first = step


def save(folder: Path, interval: Interval) -> None:
    """Write an interval to its file, whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / page_name(interval), as_file(interval))


def page_name(interval: Interval) -> str:
    """The name of an interval's file: its first step, and the one after its last."""
    return f"{interval.first:08d}-{interval.last:08d}.npz"


def read(folder: Path) -> list[Interval]:
    """The intervals in a folder, in order."""
    found = sorted(path for path in folder.glob("*.npz") if NAME.fullmatch(path.name))
    return [as_interval(path.read_bytes(), path) for path in found]


def as_file(interval: Interval) -> bytes:
    """An interval as the bytes of its file."""
    buffer = io.BytesIO()
    np.savez(
        buffer,
        counts=interval.counts,
        rows=interval.rows,
        first=interval.first,
        last=interval.last,
        samples=interval.samples,
        epoch_steps=interval.epoch_steps,
    )
    return buffer.getvalue()


def as_interval(data: bytes, path: Path) -> Interval:
    """The interval in a file; DataError when it is damaged."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as table:
            counts, rows = table["counts"], table["rows"]
            first, last, samples, epoch_steps = (
                int(table[name]) for name in ("first", "last", "samples", "epoch_steps")
            )
    except (ValueError, KeyError, OSError, EOFError) as error:
        raise DataError(f"{path}: not a page of a ledger: {error}") from None
    return Interval(first, last, counts, rows, samples, epoch_steps)


def pack(intervals: Iterable[Interval], before: int) -> bytes:
    """All intervals up to a step as one piece of bytes."""
    return b"".join(
        len(page).to_bytes(8, "big") + page
        for page in (as_file(part) for part in intervals if part.last <= before)
    )


def unpack(data: bytes) -> list[Interval]:
    """What `pack` packed."""
    intervals, place = [], 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "big")
        intervals.append(as_interval(data[place + 8 : place + 8 + length], Path("ledger")))
        place += 8 + length
    return intervals


@dataclass(frozen=True)
class Verdict:
    """What the ledger says about an epoch (counted from 0)."""

    epoch: int
    steps: int  # of the epoch, written down so far
    epoch_steps: int
    samples: int
    ranks: tuple[int, ...]  # numbers of ranks, in the order in which they came
    missing: Rows
    extra: Rows

    @property
    def exact(self) -> bool:
        """Whether the epoch, or what there is of it, is what it must be."""
        return not self.missing.size and not self.extra.size

    def __str__(self) -> str:
        whole = self.steps == self.epoch_steps
        words = f"epoch {self.epoch + 1}: "
        if not whole:
            words += f"{self.steps} of {self.epoch_steps} steps, "
        words += f"{self.samples:,} samples on {_series(self.ranks)} ranks"
        if self.exact:
            return words + (
                ", every sample as often as it must be" if whole else ", none too often"
            )
        for what, rows in (("missing", self.missing), ("too often", self.extra)):
            if rows.size:
                few = ", ".join(map(str, rows[:NAMED].tolist()))
                words += f"; {rows.size:,} {what}: rows {few}" + (
                    ", …" if rows.size > NAMED else ""
                )
        return words


def verdicts(intervals: list[Interval], expected: dict[int, Rows] | None = None) -> list[Verdict]:
    """Hold each epoch against the data set: every row once, or as often as `expected` says.

    `expected` has by epoch how often each row must come.
    """
    found = []
    last = max((interval.last for interval in intervals), default=0)
    for epoch in range(-(-last // intervals[0].epoch_steps) if intervals else 0):
        found.append(_verdict(epoch, intervals, (expected or {}).get(epoch)))
    return found


def _verdict(epoch: int, intervals: list[Interval], expected: Rows | None) -> Verdict:
    samples, epoch_steps = intervals[0].samples, intervals[0].epoch_steps
    begin, end = epoch * epoch_steps, (epoch + 1) * epoch_steps
    times = np.zeros(samples, np.int32)
    ranks: list[int] = []
    covered = np.zeros(epoch_steps, bool)
    for interval in intervals:
        first, last = max(interval.first, begin), min(interval.last, end)
        if first >= last:
            continue
        covered[first - begin : last - begin] = True
        steps = interval.steps
        rows = interval.rows[(steps >= begin) & (steps < end)]
        times += np.bincount(rows, minlength=samples).astype(np.int32)
        if ranks[-1:] != [len(interval.counts)]:
            ranks.append(len(interval.counts))
    wanted = np.ones(samples, np.int32) if expected is None else expected
    whole = bool(covered.all())
    return Verdict(
        epoch=epoch,
        steps=int(covered.sum()),
        epoch_steps=epoch_steps,
        samples=int(times.sum()),
        ranks=tuple(ranks),
        missing=np.flatnonzero(times < wanted).astype(np.int32) if whole else np.empty(0, np.int32),
        extra=np.flatnonzero(times > wanted).astype(np.int32),
    )


def _series(numbers: tuple[int, ...]) -> str:
    return ", then ".join(map(str, numbers)) or "no"


def ledger_of(run: Path) -> Iterator[Verdict]:
    """The verdicts on the epochs of a run folder; UsageError when it has no ledger."""
    intervals = read(run / "ledger")
    if not intervals:
        raise UsageError(f"{run}: no ledger in it; train with --exact-epochs --ledger to have one")
    yield from verdicts(intervals)
