"""Run the processes that make a rank's batches, and bring batches to the device.

loaded -> Ring.batch -> on_device -> the training loop
"""

import atexit
import math
import multiprocessing
import signal
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from rackrun.errors import Problem
from rackrun.training.data.order import Part
from rackrun.training.data.ring import AHEAD, HELD, Batch, Filled, Ring
from rackrun.training.data.samples import Quarantine
from rackrun.training.data.transforms import Shape
from rackrun.training.data.worker_server import CONTEXT, end_workers, worker_init
from rackrun.training.ranks import Ranks, usual_workers
from rackrun.training.settings.data import DataSettings

Item = TypeVar("Item")
NOTICED_SECONDS = 2.0  # until the end of a process is known

atexit.register(end_workers)


def worker_count(config: DataSettings, ranks: Ranks) -> int:
    """Return the loader workers of a rank: those of the settings, or the usual number."""
    return config.workers if config.workers >= 0 else usual_workers(ranks)


class Loader:
    """The loader workers of a rank, and what all of its batches have in common."""

    def __init__(self, config: DataSettings, ranks: Ranks) -> None:
        self.config, self.ranks = config, ranks
        self.workers = worker_count(config, ranks)
        self.quarantine = Quarantine(config)

    def ring(self, samples: int, *shapes: Shape) -> Ring:
        """Return memory for batches of this many samples, of images of any of these shapes."""
        return Ring(self.workers, samples, max(map(math.prod, shapes)), self.ranks.device)

    def batches(
        self,
        dataset: "Dataset[Filled | Problem]",
        ring: Ring,
        parts: Iterable[Part] | None = None,
    ) -> Iterator[Batch]:
        """Yield on the device what workers write into the ring: of these parts, or their own."""
        return on_device(self._written(dataset, ring, parts), self.ranks.device)

    def _written(
        self, dataset: "Dataset[Filled | Problem]", ring: Ring, parts: Iterable[Part] | None
    ) -> Iterator[Batch]:
        for filled in loaded(dataset, self.workers, parts):
            if filled.left_out:
                self.quarantine.count(filled.left_out)
            yield ring.batch(filled)


def loaded(
    dataset: "Dataset[Item | Problem]", workers: int, requests: Iterable[Any] | None = None
) -> Generator[Item]:
    """Yield the items of a data set from worker processes; raise a worker's Problem here.

    `requests` are what the data set is asked for, by default its numbers in order.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the user may ask for more than the cores
        items = iter(
            DataLoader(
                dataset,
                batch_size=None,  # an item of the data set is a batch already
                sampler=requests,
                num_workers=workers,
                multiprocessing_context=CONTEXT if workers else None,
                worker_init_fn=worker_init,
                collate_fn=_as_it_is,  # arrays stay arrays: each tensor would get shared memory
                prefetch_factor=AHEAD if workers else None,
            )
        )
    processes = multiprocessing.active_children()  # now: a dead one is not among them later
    try:
        for item in items:
            if isinstance(item, Problem):
                raise item
            yield item
    except (OSError, EOFError, RuntimeError) as error:
        raise _lost_worker(processes) or error from None
    finally:
        del items  # ends the workers, though a traceback may keep this frame for long


def _lost_worker(processes: Sequence[BaseProcess]) -> Problem | None:
    # DataLoader does not name a worker that was ended from outside.
    wait([process.sentinel for process in processes], NOTICED_SECONDS)
    for process in processes:
        if code := process.exitcode:
            name = signal.Signals(-code).name if code < 0 else ""
            how = f"was killed by {name}" if name else f"ended with exit code {code}"
            return Problem(
                f"a loader worker (pid {process.pid}) {how}; if the memory is full, type a smaller"
                " --workers"
            )
    return None


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yield batches on the device, each copied while the one before it is in use.

    On a GPU all of that happens in a stream of its own, from pinned memory, beside the work of the
    steps; their stream waits for a batch by an event, the host for nothing but a copy that has
    still to be read when its memory is needed again. Elsewhere there is nothing to copy.
    """
    side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
    copies = _copies(batches, device, side)
    ahead = next(copies, None)
    while ahead:
        copied, ahead = ahead, next(copies, None)
        yield _handed_over(*copied)


def _copies(
    batches: Iterator[Batch],
    device: torch.device,
    side: torch.cuda.Stream | None,
) -> Iterator[tuple[Batch, torch.Event | None]]:  # the event is the end of a copy
    under_way = deque[torch.Event]()
    while True:
        if len(under_way) == HELD:  # the next batch may overwrite the memory of that copy
            under_way.popleft().synchronize()
        batch = next(batches, None)
        if batch is None:
            return
        with torch.cuda.stream(side) if side else nullcontext():
            images, labels = (part.to(device, non_blocking=True) for part in batch[:2])
            done = side.record_event() if side else None
        if done:
            under_way.append(done)
        yield batch._replace(images=images, labels=labels), done


def _handed_over(batch: Batch, done: torch.Event | None) -> Batch:
    if done:
        steps = torch.cuda.current_stream()
        steps.wait_event(done)  # the host goes on
        for part in batch[:2]:
            part.record_stream(steps)  # else its memory is reused as soon as Python lets go of it
    return batch


def _as_it_is(item: Any) -> Any:  # no lambda: workers get it pickled
    return item
