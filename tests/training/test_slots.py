"""Batches lie in memory that is used again, and are nevertheless what they would be alone."""

import os
import subprocess
from collections.abc import Iterator
from functools import partial
from itertools import count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.errors import DataError, Problem
from rackrun.training.data.loader import loaded, with_problems
from rackrun.training.data.open import open_data
from rackrun.training.data.pool import SamplePool, sources_of
from rackrun.training.data.slots import AHEAD, HELD, Slots, shared_bytes
from rackrun.training.ranks import Ranks
from tests.lab import warm
from tests.lab.waiting import until

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
WORKERS = 2
ONE_BYTE = (1, 1, 1)


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_a_batch_is_its_samples_each_prepared_alone(shapes, workers):
    """Over an epoch's short last step, with two batches in hand: every image and label is right."""
    config = CatDog(
        data=str(shapes), image_size=16, batch_size=48, workers=workers, device="cpu",
        exact_epochs=True,
    )  # fmt: skip
    transforms, pool = TASK.transforms(config, 0), SamplePool(sources_of(config))
    data = open_data(config, ALONE, partial(TASK.transforms, config), TASK.name, 2)

    def alone(row: int, epoch: int, position: int) -> bytes:
        (stored,) = pool.samples(np.array([row]))
        random = np.random.default_rng((config.seed, epoch, position))
        return transforms.for_training(stored.sample.image, random).tobytes()

    batches, before = data.training(0), None
    for step, batch in enumerate(islice(batches, data.epoch_steps + 2)):
        epoch, within = divmod(step, data.epoch_steps)
        assert batch.rows is not None and len(batch.rows) == data.samples_in(step)
        made = [image.permute(1, 2, 0).numpy().tobytes() for image in batch.images]
        assert made == [
            alone(row, epoch, within * config.batch_size + index)
            for index, row in enumerate(batch.rows.tolist())
        ]
        assert batch.labels.tolist() == pool.index["label"][batch.rows].tolist()
        if before:
            assert torch.equal(*before)
        before = batch.images, batch.images.clone()


class Ahead(IterableDataset[int | Problem]):
    """Workers that write the number of each of their batches into its slot, as fast as they may."""

    def __init__(self, slots: Slots, begun: torch.Tensor, last: int) -> None:
        self.slots, self.begun, self.last = slots, begun, last

    def __iter__(self) -> Iterator[int | Problem]:
        worker = get_worker_info()
        assert worker
        return with_problems(self._numbers(worker.id, worker.num_workers))

    def _numbers(self, worker: int, workers: int) -> Iterator[int]:
        for number in count(worker, workers):
            if number > self.last:
                raise DataError("no more")
            self.slots.images(number, 1, ONE_BYTE).fill_(number)
            self.begun[worker] = number
            yield number


def test_no_batch_that_is_held_is_overwritten():
    """However far ahead workers are, and when one has failed: the last three batches are whole."""
    slots = Slots(AHEAD * WORKERS + HELD, 1, ALONE.device)
    begun, last = shared_bytes(WORKERS), 40
    made = loaded(Ahead(slots, begun, last), WORKERS)
    for number in range(last):
        assert next(made) == number
        furthest = min(number + AHEAD * WORKERS, last)
        until(lambda limit=furthest: int(begun.max()) >= limit)
        assert int(begun.max()) == furthest
        held = range(max(number - HELD + 1, 0), number + 1)
        assert [int(slots.images(batch, 1, ONE_BYTE)) for batch in held] == list(held)
    with pytest.raises(DataError, match="no more"):
        list(made)


def test_too_little_shared_memory_is_refused_before_a_rank_dies_of_it(tmp_path):
    """In a mount namespace with a small /dev/shm, as `docker run` makes it."""
    program = (
        "import torch, sys; from rackrun.training.data.slots import Slots\n"
        "Slots(8, int(sys.argv[1]), torch.device('cpu'))"
    )
    script = 'mount -t tmpfs -o size=1m none /dev/shm; exec "$0" -c "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, warm.interpreter(), program]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(warm.ROOT)}
    for slot_bytes, refused in (("60000", False), ("80000", True), ("200000", True)):
        done = subprocess.run(
            [*command, slot_bytes], env=environment, capture_output=True, text=True
        )
        assert ("/dev/shm: " in done.stderr) == bool(done.returncode) == refused, done.stderr
    assert (
        "1.6 MB for the batches of a rank, 2 ranks on this host, and 1.0 MB of 1.0 MB"
        in done.stderr
    )
    assert "--shm-size" in done.stderr
