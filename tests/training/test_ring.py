"""Batches lie in memory that is used again, and are nevertheless what they would be alone."""

import os
import subprocess
from collections import deque
from collections.abc import Iterator
from functools import partial
from itertools import count, islice

import numpy as np
import pytest
import torch
from PIL import Image

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.errors import DataError
from rackrun.shards.samples import Sample
from rackrun.training.data.batch_stream import BatchStream
from rackrun.training.data.loader import loaded
from rackrun.training.data.open import open_data
from rackrun.training.data.pool import SamplePool, sources_of
from rackrun.training.data.ring import AHEAD, HELD, Ring
from rackrun.training.data.samples import Quarantine, StoredSample
from rackrun.training.data.transforms import Transforms
from rackrun.training.ranks import Ranks
from tests.lab import warm
from tests.lab.data import encoded
from tests.lab.waiting import until

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
WORKERS = 2


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.long), 3])
def test_a_batch_is_its_samples_each_prepared_alone(shapes, workers):
    """Over an epoch's short last step, with two batches in hand: every image and label is right."""
    config = CatDog(
        data=str(shapes), image_size=16, batch_size=48, workers=workers, device="cpu",
        exact_epochs=True,
    )  # fmt: skip
    transforms, pool = TASK.transforms(config, 0), SamplePool(sources_of(config))
    data = open_data(
        config,
        ALONE,
        [TASK.transforms(config, 0)],
        TASK.name,
        2,
    )

    def alone(row: int, epoch: int, position: int) -> bytes:
        (stored,) = pool.samples(np.array([row]))
        random = np.random.default_rng((config.seed, epoch, position))
        return transforms.for_training(stored.sample.image, random).tobytes()

    batches, before = data.training(0), None
    for step, batch in enumerate(islice(batches, data.steps.per_epoch + 2)):
        epoch, within = divmod(step, data.steps.per_epoch)
        assert batch.rows is not None and len(batch.rows) == data.steps.samples_in(step)
        made = [image.permute(1, 2, 0).numpy().tobytes() for image in batch.images]
        assert made == [
            alone(row, epoch, within * config.batch_size + index)
            for index, row in enumerate(batch.rows.tolist())
        ]
        assert batch.labels.tolist() == pool.index["label"][batch.rows].tolist()
        if before:
            assert torch.equal(*before)
        before = batch.images, batch.images.clone()


def numbered(begun: torch.Tensor, last: int, worker: int, workers: int) -> Iterator[StoredSample]:
    """Yield the number of each batch as an image, as fast as a worker may."""
    for number in count(worker, workers):
        if number > last:
            raise DataError("no more")
        begun[worker] = number
        image = encoded(Image.new("RGB", (1, 1), (number,) * 3), "PNG")
        yield StoredSample("a.tar", Sample(str(number), image, "png", number))


def test_no_batch_that_is_held_is_overwritten():
    """However far ahead workers are, and when one has failed: the last three batches are whole."""
    config, ring = CatDog(batch_size=1), Ring(WORKERS, 1, 3)
    begun, last = torch.zeros(WORKERS, dtype=torch.int64).share_memory_(), 40
    samples = partial(numbered, begun, last)
    ahead = BatchStream(samples, 1, ring, Quarantine(config), [Transforms(1)])
    made, held = loaded(ahead, WORKERS), deque(maxlen=HELD)
    for number in range(last):
        held.append(ring.batch(next(made)))
        furthest = min(number + AHEAD * WORKERS, last)
        until(lambda limit=furthest: int(begun.max()) >= limit)
        assert int(begun.max()) == furthest
        numbers = list(range(max(number - HELD + 1, 0), number + 1))
        assert [int(batch.labels) for batch in held] == numbers
        assert [batch.images.flatten().tolist() for batch in held] == [[n] * 3 for n in numbers]
    with pytest.raises(DataError, match="no more"):
        list(made)


def test_too_little_shared_memory_is_refused_before_a_rank_dies_of_it():
    """In a mount namespace with a small /dev/shm, as `docker run` makes it."""
    program = (
        "import sys; from rackrun.training.data.ring import Ring\n"
        "Ring(1, 1, int(sys.argv[1]) // 5 - 8)"
    )
    script = 'mount -t tmpfs -o size=1m none /dev/shm; exec "$0" -c "$@"'
    command = ["unshare", "--mount", "sh", "-c", script, warm.interpreter(), program]
    environment = {**os.environ, "LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(warm.ROOT)}
    for ring_bytes, refused in (("480000", False), ("1600000", True)):
        done = subprocess.run(
            [*command, ring_bytes], env=environment, capture_output=True, text=True
        )
        assert ("/dev/shm: " in done.stderr) == bool(done.returncode) == refused, done.stderr
    assert (
        "1.6 MB for the batches of a rank, 2 ranks on this host, and 1.0 MB of 1.0 MB"
        in done.stderr
    )
    assert "--shm-size" in done.stderr
