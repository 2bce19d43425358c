"""Read samples from a source: a whole shard, some of its rows, or a few adjacent rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from rackrun.errors import DataError, Unavailable
from shards.index import Shard
from shards.source import Range, Source, Stored
from shards.verify import Sample, as_fault, checked_rows, sample_of

if TYPE_CHECKING:
    import numpy as np


def samples(source: Source, split: str, number: int) -> Iterator[Sample]:
    """Yield every sample of one shard in order, each verified, and at the end the whole shard."""
    shard = source.manifest.split(split).shards[number]
    for row, data in stored_samples(source, split, number):
        yield sample_of(source, shard, row, data)


def portions(
    source: Source, requests: Iterable[tuple[Shard, np.ndarray]]
) -> Iterator[list[Sample]]:
    """Yield samples portion by portion, while the next portions are being fetched.

    A portion is consecutive rows of the index of a shard; each sample is verified by its row. A
    damaged or missing sample has a fault; Unavailable is raised.
    """
    waiting = deque(requests)
    while waiting:  # after a portion that cannot be read, begin anew with the one after it
        reads = source.reads([_range_of(*portion) for portion in waiting])
        try:
            for data in reads:
                shard, rows = waiting.popleft()
                yield _checked(source, shard, rows, data)
        except Unavailable:
            raise
        except DataError as error:
            yield [as_fault(row, error) for row in waiting.popleft()[1]]


def neighbours(source: Source, shard: Shard, rows: np.ndarray) -> list[Sample]:
    """Return the samples of a single portion."""
    try:
        return _checked(source, shard, rows, source.read(*_range_of(shard, rows)))
    except Unavailable:
        raise
    except DataError as error:
        return [as_fault(row, error) for row in rows]


def _range_of(shard: Shard, rows: np.ndarray) -> Range:
    start = int(rows[0]["offset"])
    return shard, start, int(rows[-1]["offset"] + rows[-1]["length"]) - start


def _checked(source: Source, shard: Shard, rows: np.ndarray, data: Stored) -> list[Sample]:
    """Return the samples of a portion; if one is damaged, the portion is read once more."""
    where, adopted = f"{source.location}: {shard.name}", source.manifest.adopted
    portion = checked_rows(rows, data, where, adopted)
    if not any(sample.fault for sample in portion):
        return portion
    try:
        data = source.reread(*_range_of(shard, rows))
    except Unavailable:
        raise
    except DataError:
        return portion
    return checked_rows(rows, data, where, adopted)


def stored_samples(source: Source, split: str, number: int) -> Iterator[tuple[Any, Stored]]:
    """Yield the rows of one shard, each with its bytes of the tar, for `sample_of` to check.

    At the end the whole shard is verified; if it is wrong it is read once more, as samples are.
    """
    shard = source.manifest.split(split).shards[number]
    rows = source.index(split)
    blocks = source.stream(shard)
    block = memoryview(b"")
    for row in rows[rows["shard"] == number]:
        length = int(row["length"])
        if len(block) >= length:
            data, block = block[:length], block[length:]
        else:
            data, block = _across(block, blocks, length)
        yield row, data
    try:
        _to_the_end(blocks)
    except Unavailable:
        raise
    except DataError:
        _to_the_end(source.stream(shard))


def _to_the_end(blocks: Iterator[Stored]) -> None:
    """Read the remaining blocks, so that length and digest are verified."""
    for _ in blocks:
        pass


def _across(
    rest: memoryview, blocks: Iterator[Stored], length: int
) -> tuple[memoryview, memoryview]:
    """Return `length` bytes from the rest of a block and the next ones, and the new rest."""
    parts, missing = [rest], length - len(rest)
    while missing:
        block = memoryview(next(blocks))  # DataError where the shard is too short
        parts.append(block[:missing])
        rest = block[missing:]
        missing -= len(parts[-1])
    return memoryview(b"".join(parts)), rest
