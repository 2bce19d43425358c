"""Measure what exact epochs cost, and what other ways of splitting a data set leave out.

    bench/install_peers.sh /tmp/peers
    python -m bench.exact --peers /tmp/peers/bin/python [--rounds 3]

Four tables: samples missed and repeated by stock webdataset, MosaicML Streaming (if --peers names a
Python that has it) and exact epochs on the same samples; speed of the loader alone and of the whole
loop, exact against resampled, in turn; and a step with and without Join on two ranks. What planning
costs: `python -m bench.order`.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
import webdataset
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from bench.images import write_shards
from bench.turns import in_turn
from bench.usage import family_cpu_seconds
from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.shards.open import open_source
from rackrun.training.config import Config
from rackrun.training.data.open import open_data
from rackrun.training.data.order.cut import Cut
from rackrun.training.data.order.epoch import shuffled
from rackrun.training.data.order.reading import Reader, Reading
from rackrun.training.ranks import Ranks
from rackrun.training.state import TrainingState
from rackrun.training.sync.uneven_inputs import joined_by_all
from tests.launcher.lab import free_port

IMAGES = 1600  # that the loader makes in a round
RANKS, WORKERS, BATCH = 4, 2, 16  # of the comparison of samples; the batch is each rank's
WAYS = ("resampled", "exact")
STREAMING = """
import json, sys
from streaming.base.partition import get_partitions
samples, ranks, workers, batch = map(int, sys.argv[1:])
ids = get_partitions("relaxed", samples, ranks, 1, ranks, workers, batch)
print(json.dumps([ids[0][rank].ravel().tolist() for rank in range(ranks)]))
"""


@dataclass(frozen=True)
class Settings:
    """Measure exact epochs."""

    peers: str = ""
    """A Python that has mosaicml-streaming; without it, it does not take part."""
    rounds: int = 3
    """Times that each way runs."""
    images: int = 1201
    """Images of about 110 KB to train on."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images."""


def main(args: list[str]) -> None:
    """Print the four tables."""
    settings = parse(Settings, "python -m bench.exact", args)
    with tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        shards = write_shards(Path(name), settings.images, shards=13, val_percent=5)
        coverage(shards, settings)
        loading(shards, settings.rounds)
        speed(shards, settings.rounds)
    join(settings.rounds)


def coverage(shards: Path, settings: Settings) -> None:
    """Print how much of an epoch each way of reading sees, on the same shards."""
    source = open_source(str(shards))
    split, index = source.manifest.split("train"), source.index("train")
    print(
        f"\n{split.samples} samples in {len(split.shards)} shards, {RANKS} ranks, {WORKERS} workers"
    )
    whole = shuffled(index, range(index.size), seed=0, epoch=0, batch=BATCH * RANKS)
    ours = [
        [
            row
            for worker in range(WORKERS)
            for part in Reading(
                whole, 0, BATCH * RANKS, Reader(rank, Cut.even(RANKS), worker, WORKERS)
            ).parts()
            for row in part.rows.tolist()
        ]
        for rank in range(RANKS)
    ]
    show_epoch("exact epochs", ours, split.samples)
    urls = [str(shards / shard.name) for shard in split.shards]
    show_epoch(
        "webdataset, split_by_node", [by_node(urls, rank) for rank in range(RANKS)], split.samples
    )
    equal = split.samples // RANKS
    epochs = [(by_node(urls, rank) * 2)[:equal] for rank in range(RANKS)]
    show_epoch("the same, with_epoch(samples / ranks)", epochs, split.samples)
    if settings.peers:
        sizes = [str(number) for number in (split.samples, RANKS, WORKERS, BATCH)]
        process = subprocess.run(
            [settings.peers, "-c", STREAMING, *sizes], capture_output=True, text=True, check=True
        )
        ranks = [[n for n in ids if n >= 0] for ids in json.loads(process.stdout.splitlines()[-1])]
        show_epoch("MosaicML Streaming's partition", ranks, split.samples)


def by_node(urls: list[str], rank: int) -> list[str]:
    """Return the keys that stock webdataset gives a rank in one pass over its shards."""
    keys = []
    for worker in range(WORKERS):
        variables = {
            "RANK": str(rank), "WORLD_SIZE": str(RANKS),
            "WORKER": str(worker), "NUM_WORKERS": str(WORKERS),
        }  # fmt: skip
        with patch.dict(os.environ, variables):
            dataset = webdataset.WebDataset(
                urls, nodesplitter=webdataset.split_by_node, shardshuffle=False, empty_check=False
            )
            keys += [sample["__key__"] for sample in dataset]
    return keys


def show_epoch(name: str, ranks: list[list[int]] | list[list[str]], samples: int) -> None:
    """Return a line of the table: what all ranks together see of an epoch."""
    times = Counter(sample for rank in ranks for sample in rank)
    steps = [-(-len(rank) // BATCH) for rank in ranks]
    print(
        f"  {name:38} missed {samples - len(times):4}  doubled {sum(times.values()) - len(times):4}"
        f"  samples per rank {[len(rank) for rank in ranks]}  steps {steps}"
    )


def loading(shards: Path, rounds: int) -> None:
    """Print the CPU time per image of a loader worker, and of its rank's work on batches."""

    def cpu_per_image(exact: bool) -> float:
        config = CatDog(
            data=str(shards), image_size=224, batch_size=32, workers=1, device="cpu",
            crop_area=0.5, exact_epochs=exact,
        )  # fmt: skip
        begun = family_cpu_seconds()
        ranks, transforms = Ranks(0, 1, 0, 1, torch.device("cpu")), partial(TASK.transforms, config)
        data = open_data(config, ranks, transforms, TASK.name, TASK.synthetic_classes)
        batches = islice(data.training(0), IMAGES // 32)
        images = sum(len(batch.labels) for batch in batches)
        return (family_cpu_seconds() - begun) / images

    costs = in_turn(rounds, {way: partial(cpu_per_image, way == "exact") for way in WAYS})
    ratio = median(exact / resampled for resampled, exact in zip(*costs.values(), strict=True))
    print(f"\nthe loader alone, 1 worker, CPU time per image, {rounds} rounds, medians")
    for name, seconds_per_image in costs.items():
        print(f"  {name:10} {median(seconds_per_image) * 1000:.2f} ms")
    print(f"  exact / resampled {ratio:.3f}")


def speed(shards: Path, rounds: int) -> None:
    """Print the images per second of whole training runs, exact and resampled in turn."""

    def trained(exact: bool) -> tuple[float, float]:
        """Return images per second and CPU seconds of a run."""
        with tempfile.TemporaryDirectory() as folder:
            options = [
                "--data", str(shards), "--run-folder", f"{folder}/run", "--image-size", "224",
                "--width", "2", "--epochs", "3", "--batch-size", "32", "--workers", "1",
                "--device", "cpu", "--crop-area", "0.5", "--no-tensorboard",
                "--log-every-steps", "1000", *(["--exact-epochs"] if exact else []),
            ]  # fmt: skip
            command = [
                sys.executable,
                "-c",
                REAPER,
                sys.executable,
                "-m",
                "rackrun.catdog",
                *options,
            ]
            before = sum(os.times()[2:4])
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            cpu = sum(os.times()[2:4]) - before
            lines = map(json.loads, Path(folder, "run", "metrics.jsonl").read_text().splitlines())
            rates = [line["images_per_second"] for line in lines if line["kind"] == "train"]
        return median(rates[1:]), cpu

    runs = in_turn(rounds, {way: partial(trained, way == "exact") for way in WAYS})
    (rate, cpu), (exact_rate, exact_cpu) = (
        [median(column) for column in zip(*runs[way], strict=True)] for way in WAYS
    )
    print(f"\nthe whole loop, 1 rank, 1 worker, {rounds} rounds, medians")
    print(f"  resampled {rate:7.1f} images/s\n  exact     {exact_rate:7.1f} images/s")
    print(f"  exact / resampled {exact_rate / rate:.3f}")
    print(
        f"  processor time of a run, start included: {cpu:.1f} s resampled, {exact_cpu:.1f} s"
        f" exact, {exact_cpu / cpu:.3f} x"
    )


REAPER = """\
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
code = subprocess.call(sys.argv[1:])
while True:
    try:
        os.wait()
    except ChildProcessError:
        sys.exit(code)
"""
"""Runs a command, and waits for what outlives it, such as the server of its loader workers."""


def join(rounds: int) -> None:
    """Print the milliseconds of a step of two ranks, and what Join adds."""
    torch.multiprocessing.spawn(steps, (free_port("127.0.0.1"), rounds), nprocs=2)


def steps(rank: int, port: int, rounds: int) -> None:
    """Time steps, as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    layers = [nn.Conv2d(3, 16, 3, 2), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten()]
    net = nn.Sequential(*layers, nn.Linear(16 * 31 * 31, 10))
    ranks = Ranks(rank, 2, rank, 2, torch.device("cpu"))
    state, model = TrainingState(net, Config()), ranks.ddp(net)
    assert isinstance(model, DistributedDataParallel)
    images = torch.randn(32, 3, 64, 64)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        state.advance()

    milliseconds: dict[str, list[float]] = {"plain": [], "joined": [], "tail": []}
    for _ in range(rounds * 5):
        with timed(milliseconds["plain"], 20):
            for _ in range(20):
                step(images)
        with timed(milliseconds["joined"], 20), Join([model]):
            for _ in range(20):
                step(images)
        Join([model], enable=False)
        with timed(milliseconds["tail"], 1), joined_by_all(model, state, ranks):
            if not rank:
                step(images[:2])
    if not rank:
        plain, inside, last = (median(times) for times in milliseconds.values())
        print("\na step of 2 ranks over gloo, medians")
        print(f"  plain                                {plain:6.2f} ms")
        print(f"  every step inside Join, as usual     {inside:6.2f} ms, {inside / plain:.3f} x")
        print(f"  ours: only a last step inside Join   {last:6.2f} ms, once per epoch at most")
        added = (last - plain) / (1000 * plain)
        print(f"  ours, over an epoch of 1000 steps    {1 + added:.4f} x")


@contextlib.contextmanager
def timed(times: list[float], count: int) -> Iterator[None]:
    """Record the milliseconds of each of these steps."""
    dist.barrier()
    begun = time.perf_counter()
    yield
    times.append((time.perf_counter() - begun) * 1000 / count)


if __name__ == "__main__":
    run(main)
