"""Draw training samples by webdataset: shards with replacement, mixed by a shuffle buffer.

    ResampledShards    {"url": the name of a shard}, endless
    samples            StoredSample: every sample of each; where there is an index, by its row
    shuffle            the same, mixed
    BatchStream        batches in the ring (training.data.batch_stream)

Each loader worker of each rank draws its own, by the seed of the run, the step at which it
started, the rank and the worker. So the same command draws the same samples, and a run that
resumes draws new ones: a stream is not read again up to the place where it was.

The index says which samples a shard has, and their labels: what was dropped is not read, and what
was relabeled has its new label.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain

import numpy as np
import webdataset

from rackrun.shards.source import Source
from rackrun.training.data.batch_stream import BatchStream
from rackrun.training.data.loader import Loader
from rackrun.training.data.pool import TRAIN
from rackrun.training.data.ring import Batch
from rackrun.training.data.samples import Seed, StoredSample, stored_samples
from rackrun.training.data.transforms import EpochTransforms


def samples_of_shard(source: Source, name: str) -> Iterator[StoredSample]:
    """Yield the samples of a shard that the index has, in order, each verified by its row."""
    names = [shard.name for shard in source.manifest.split(TRAIN).shards]
    number = names.index(name)
    rows = np.searchsorted(source.index(TRAIN)["shard"], (number, number + 1))
    return stored_samples(source, TRAIN, np.arange(*rows))


def resampled_batches(
    loader: Loader,
    names: Sequence[str],
    samples: Callable[[str], Iterator[StoredSample]],
    transforms: EpochTransforms,
    epoch_steps: int,
    start: int,
) -> Iterator[Batch]:
    """Yield a rank's batches from a step on, without end: other ones than from another step on.

    `names` are those of all shards, `samples` reads one of them in order.
    """
    config, rank = loader.config, loader.ranks.rank
    ring = loader.ring(config.batch_size, *(each.training_shape for each in transforms))
    seed = config.seed, start, rank
    stream = BatchStream(
        partial(drawn, names, samples, config.shuffle_buffer, seed),
        config.batch_size,
        ring,
        loader.quarantine,
        transforms,
        start,
        epoch_steps,
        seed,
    )
    return loader.batches(stream, ring)


def drawn(
    names: Sequence[str],
    samples: Callable[[str], Iterator[StoredSample]],
    buffer: int,
    seed: Seed,
    worker: int,
    workers: int,
) -> Iterator[StoredSample]:
    """Yield the samples of one loader worker, without end."""
    first, second = np.random.SeedSequence((*seed, worker)).generate_state(2).tolist()
    pipeline = webdataset.DataPipeline(
        webdataset.ResampledShards(list(names), deterministic=True, worker_seed=lambda: first),
        lambda drawn: chain.from_iterable(samples(shard["url"]) for shard in drawn),
        webdataset.shuffle(buffer, initial=buffer // 10, rng=random.Random(second)),
    )
    return iter(pipeline)
