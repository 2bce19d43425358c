"""What one loader worker of one rank reads of an epoch, planned a portion at a time.

A reader keeps the pieces of its own lanes, and which samples it gives to other ranks or gets from
them; an epoch of 14 million samples on 8 ranks with 16 workers is 6,000 pieces. Of these it plans
the samples and reads of the next PORTION samples when the last ones are used up.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rackrun.training.data.order.cut import Cut, Lanes, moves
from rackrun.training.data.order.epoch import EpochOrder, Numbers, Pieces, Positions, mixed, ranges

PORTION = 1 << 16  # samples of a reader that are planned at a time: 6 MB while it lasts

READ = np.dtype([("row", np.int32), ("samples", np.int32)])  # neighbours, read at once
SAMPLE = np.dtype([
    ("row", np.int32),
    ("position", np.int32),
    ("brought_by", np.int32),  # the first position that needs the same read
    ("read", READ),
])  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """A loader worker of a rank."""

    rank: int = 0
    cut: Cut = Cut.even(1)  # noqa: RUF009 - frozen
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True)
class ReaderPart:
    """The share of one reader in some steps, one after the other.

    Four parallel arrays by sample, in the order of use: its row, its position in the epoch, its
    index in the rank's batch, and the position that is the first to need the same read. `reads`
    lists the reads in the order of first use, `ends` how many samples the reader has after each
    step.
    """

    rows: Positions
    positions: Positions
    batch_indices: Positions
    brought_by: Positions
    reads: npt.NDArray[np.void]
    ends: Numbers


class Reading:
    """The share of one reader in an epoch, from position `start` on, in steps of `batch`."""

    def __init__(self, order: EpochOrder, start: int, batch: int, reader: Reader) -> None:
        self._span = (start, order.samples, batch)
        self._lanes, self._reader, self._stream = order.lanes, reader, order.stream()
        self._owned = Lanes(reader.cut, order.lanes)
        self._served = self._owned.ordinals % reader.workers == reader.worker
        self._has = self._served & (self._owned.owners == reader.rank)
        self._leave, self._come = self._moves()
        pieces = self._pieces(order)
        self._drawn = order.drawn
        if not isinstance(order.drawn, range):  # keep the rows of these pieces only
            self._drawn = order.drawn[ranges(pieces["start"], pieces["samples"])]
            pieces["start"] = np.cumsum(pieces["samples"]) - pieces["samples"]
        self._waiting = pieces[np.argsort(pieces["position"], kind="stable")]

    def parts(self) -> Iterator[ReaderPart]:
        """Yield the share part by part; a part has whole steps."""
        start, stop, batch = self._span
        readers = self._reader.cut.world * self._reader.workers
        portion = max(1, PORTION * readers // batch) * batch
        planned = np.empty(0, SAMPLE)
        for first in range(start, stop, portion):
            last = min(first + portion, stop)
            # Pieces that begin in this portion reach into later ones: the rest stays planned.
            planned = np.concatenate([planned, self._opened(last)])
            planned = planned[np.argsort(planned["position"])]
            count = np.searchsorted(planned["position"], last)
            yield self._part(planned[:count], np.append(np.arange(first, last, batch), last))
            planned = planned[count:].copy()  # a view would keep all of the portion

    def _moves(self) -> tuple[Numbers, Numbers]:
        # Positions that leave this reader's lanes, and that come to its rank: from any lane, since
        # `_before` counts them.
        reader, (start, stop, batch) = self._reader, self._span
        leave, come = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for positions, givers, receivers in moves(start, stop, batch, self._owned, reader.cut):
            served = self._served[positions % self._lanes]
            leave.append(positions[(givers == reader.rank) & served])
            come.append(positions[receivers == reader.rank])
        return np.concatenate(leave), np.concatenate(come)

    def _pieces(self, order: EpochOrder) -> Pieces:
        lane_pieces = order.pieces_of(np.flatnonzero(self._has[order.slots]))
        last = lane_pieces["position"] + (lane_pieces["samples"] - 1) * np.int64(self._lanes)
        served = self._come[self._served[self._come % self._lanes]]
        return np.concatenate([lane_pieces[last >= self._span[0]], order.pieces_at(served)])

    def _opened(self, last: int) -> npt.NDArray[np.void]:
        # The samples of the pieces that begin before position `last`, with their reads.
        begun = np.searchsorted(self._waiting["position"], last)
        pieces, self._waiting = self._waiting[:begun], self._waiting[begun:]
        pieces = pieces[np.argsort(pieces["sequence_index"])]
        number, rows, positions = mixed(pieces, self._drawn, self._lanes, self._stream)
        needed = positions >= self._span[0]
        if self._leave.size or self._come.size:
            in_own_lane = self._has[positions % self._lanes]
            needed &= np.where(
                in_own_lane, ~_among(positions, self._leave), _among(positions, self._come)
            )
        return _with_reads(number[needed], rows[needed], positions[needed])

    def _part(self, samples: npt.NDArray[np.void], edges: Numbers) -> ReaderPart:
        positions = samples["position"].copy()
        ends = np.searchsorted(positions, edges[1:])
        before = self._before(positions) - self._before(edges[:-1]).repeat(np.diff(ends, prepend=0))
        return ReaderPart(
            rows=samples["row"].copy(),
            positions=positions,
            batch_indices=before.astype(np.int32),
            brought_by=samples["brought_by"].copy(),
            reads=samples["read"][samples["brought_by"] == positions],
            ends=ends,
        )

    def _before(self, positions: npt.NDArray[np.integer]) -> Numbers:
        """Count the samples of the rank before these positions of it, or the edges of steps.

        What leaves a rank are the last samples of a step, which count at no edge of another one's.
        """
        in_lanes = self._owned.before(positions.astype(np.int64), self._reader.rank)
        return in_lanes + np.searchsorted(self._come, positions)


def _among(positions: Positions, sorted_positions: Numbers) -> npt.NDArray[np.bool_]:
    # np.isin would sort both, for every part.
    nearest = np.append(sorted_positions, -1)[np.searchsorted(sorted_positions, positions)]
    is_member: npt.NDArray[np.bool_] = nearest == positions
    return is_member


def _with_reads(number: Positions, rows: Positions, positions: Positions) -> npt.NDArray[np.void]:
    # Neighbours in a piece share a read.
    samples = np.empty(rows.size, SAMPLE)
    if not rows.size:
        return samples
    begins = (np.diff(rows) != 1) | (np.diff(number) != 0)
    first = np.flatnonzero(np.append(True, begins))
    counts = np.diff(np.append(first, rows.size))
    samples["row"], samples["position"] = rows, positions
    samples["brought_by"] = np.repeat(np.minimum.reduceat(positions, first), counts)
    samples["read"]["row"] = np.repeat(rows[first], counts)
    samples["read"]["samples"] = np.repeat(counts, counts)
    return samples
