"""The order of an epoch in memory that the loader workers of a rank share."""

import fcntl
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from rackrun.training.data.order.epoch import EpochOrder

HEAD_NUMBERS = 6  # epoch, counted from 1; seed; lanes; blocks; rows; 1 if the rows follow
HEAD_BYTES = 8 * HEAD_NUMBERS


class SharedOrder:
    """The order of one epoch at a time.

    The first worker that comes to an epoch plans it; the others wait for that, and map the result.
    A worker maps it only while it takes its own part (see `of`).
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("order")

    def __getstate__(self) -> Any:
        return DupFd(self._memory)

    def __setstate__(self, duplicate: Any) -> None:
        self._memory = duplicate.detach()

    def __del__(self) -> None:
        os.close(self._memory)

    @contextmanager
    def of(self, epoch: int, plan: Callable[[int], EpochOrder]) -> Iterator[EpochOrder]:
        """Give the order of an epoch, which is planned unless it lies here already.

        Its arrays must not be used later: another process may be at the next epoch.
        """
        fcntl.lockf(self._memory, fcntl.LOCK_EX)  # the kernel's: it ends with a killed process
        try:
            head = os.pread(self._memory, 8, 0)
            if int.from_bytes(head, "little") != epoch + 1:
                self._write(plan(epoch))
            yield self._read()
        finally:
            fcntl.lockf(self._memory, fcntl.LOCK_UN)

    def _write(self, order: EpochOrder) -> None:
        rows = () if isinstance(order.drawn, range) else (order.drawn,)
        head = [order.epoch + 1, order.seed, order.lanes, order.starts.size, len(order.drawn)]
        os.ftruncate(self._memory, 0)
        with os.fdopen(self._memory, "wb", closefd=False) as file:
            file.seek(HEAD_BYTES)
            for numbers in (order.starts, order.ends, *rows):
                file.write(np.ascontiguousarray(numbers, np.int32).data)
            file.flush()
            file.seek(0)  # last: what a process that was killed has begun counts as nothing
            file.write(np.array([*head, len(rows)], np.int64).tobytes())

    def _read(self) -> EpochOrder:
        memory = mmap.mmap(self._memory, 0, prot=mmap.PROT_READ)
        head = np.frombuffer(memory, np.int64, HEAD_NUMBERS)
        epoch, seed, lanes, blocks, count, written = head.tolist()
        starts, ends, rows = np.split(
            np.frombuffer(memory, np.int32, offset=HEAD_BYTES), [blocks, 2 * blocks]
        )
        return EpochOrder(rows if written else range(count), starts, ends, lanes, seed, epoch - 1)
