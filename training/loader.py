"""The processes that make a rank's batches, and the way from them to the device."""

import atexit
import os
import signal
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from shards.errors import Problem
from training.config import Config
from training.distributed import Ranks
from training.entry import end_workers
from training.pictures import Batch

Item = TypeVar("Item")

atexit.register(end_workers)


def worker_count(config: Config, ranks: Ranks) -> int:
    """Loader workers of a rank: as many as the settings say, or as suits the machine."""
    return config.workers if config.workers >= 0 else usual_workers(ranks)


def usual_workers(ranks: Ranks) -> int:
    """Loader workers for a rank's share of the cores, most of which a CPU's model needs."""
    cores = len(os.sched_getaffinity(0)) // ranks.local_world
    return max(1, min(cores - 1, 16) if ranks.device.type == "cuda" else cores // 4)


def loaded(
    dataset: "Dataset[Item | Problem]", workers: int, device: torch.device
) -> Iterator[Item]:
    """What a data set yields, made by worker processes; a worker's Problem is raised here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the user may ask for more than the cores
        items = iter(
            DataLoader(
                dataset,
                batch_size=None,
                num_workers=workers,
                worker_init_fn=_leave_signals_to_the_rank,
                collate_fn=_as_it_is,
                pin_memory=device.type == "cuda",
            )
        )
    try:
        for item in items:
            if isinstance(item, Problem):
                raise item
            yield item
    finally:
        del items  # ends the workers, though a traceback may keep this frame for long


def on_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Batches on the device, one ahead of the step that works on them."""
    if device.type == "cpu":
        return batches
    return _copied_ahead(batches, device)


def _copied_ahead(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    ready: Batch | None = None
    for batch in batches:
        images, labels = (part.to(device, non_blocking=True) for part in batch[:2])
        if ready:
            yield ready
        ready = batch._replace(images=images, labels=labels)
    if ready:
        yield ready


def _as_it_is(item: Any) -> Any:
    return item


def _leave_signals_to_the_rank(worker: int) -> None:
    """A Ctrl-C reaches every process; the rank ends its step, and only then its workers.

    The interpreter ends forgotten workers by SIGTERM, too: hence `end_workers` before that.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
