"""Measure hosts that serve each other from their caches, beside the origin and a local folder.

    sudo python -m bench.cache_peers [--hosts 8] [--images 6000] [--epochs 4] [--rounds 2]

Hosts are network namespaces on a bridge, the origin is nginx behind a limit of --origin-rate, each
cache holds its share of the data and a tenth more. Every host runs the real loader: exact epochs,
decoded and cropped, all in one process and in the steps of all others. In turn: a cold run, another
run with the caches that it has left, and one that reads a local folder. In the last epoch of the
second run the server of one host is killed. All share the cores of this machine, as on no rack: the
ratios count, of images per second and, where others use the machine, of CPU time.
"""

import ctypes
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple

import torch

from bench.images import write_shards
from bench.usage import cpu_seconds
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.imagenet.model import TASK
from rackrun.imagenet.recipes import ImageNet
from rackrun.nginx.serve import NginxServer, serving
from rackrun.nginx.site import Site
from rackrun.training.data.open import open_data
from rackrun.training.world import joined
from tests.launcher.netlab import Cables

CLONE_NEWNET = 0x40000000
STEP_IMAGES = 16  # of each host


@dataclass(frozen=True)
class Settings:
    """Speeds of epochs, and bytes of the origin."""

    hosts: int = 8
    """Hosts of the run."""
    images: int = 6000
    """Images of about 110 KB."""
    epochs: int = 4
    """Epochs of each run."""
    rounds: int = 2
    """Times that everything is measured."""
    origin_rate: int = 50
    """MB/s that the origin can send."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for the images and the caches: three times 110 KB for each image."""


class Epoch(NamedTuple):
    """An epoch of all hosts."""

    seconds: float
    images_per_second: float
    longest_step: float
    """Seconds of the slowest batch of any host."""
    cpu_ms: float
    """Of loader and server, per image."""
    origin_share: float
    """Bytes that the origin sent, of those of the data."""


def main(args: list[str]) -> None:
    """Measure and print."""
    settings = parse(Settings, "python -m bench.cache_peers", args)
    with entered(settings) as cables, tempfile.TemporaryDirectory(dir=settings.scratch) as name:
        Path(name).chmod(0o755)
        write_shards(Path(name), settings.images, shards=max(settings.images // 500, 1))
        measure(settings, cables, Path(name))


@contextmanager
def entered(settings: Settings) -> Iterator[Cables]:
    """Lay the cables, with this process where the origin is, and limit what that sends."""
    cables = Cables(settings.hosts)
    try:
        enter(cables.bridge)
        limit = ("rate", f"{8 * settings.origin_rate}mbit", "burst", "256k", "latency", "1s")
        command = ("tc", "qdisc", "add", "dev", "br0", "root", "tbf", *limit)
        subprocess.run(command, check=True)  # what hosts send each other does not pass here
        yield cables
    finally:
        cables.remove()


def enter(name: str) -> None:
    """Move this process into the network namespace of this name."""
    with Path("/run/netns", name).open() as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), CLONE_NEWNET) == 0


def measure(settings: Settings, cables: Cables, folder: Path) -> None:
    """Run all, round by round, and print what the bars are about."""
    shards = folder / "shards"
    total = sum(path.stat().st_size for path in shards.glob("*-train-*.tar"))
    kept = sum(path.stat().st_size for path in shards.glob("*.tar"))
    cache_gb = 1.1 * kept / settings.hosts / 1e9
    warm, local = [], []
    print(f"{settings.hosts} hosts, {total / 1e6:,.0f} MB, caches of {cache_gb * 1e3:,.0f} MB")
    site = Site(shards, address="10.77.0.1", port=0, native=True)
    for number in range(settings.rounds):
        caches = folder / f"caches-{number}"
        with serving(site) as server:
            for seed, (name, location, cache) in enumerate(
                (
                    ("cold", server.url, caches),
                    ("folder", str(shards), None),
                    ("again", server.url, caches),
                )
            ):
                read = partial(host, settings, location, cache, cache_gb, seed)
                kills = name == "again"
                epochs = list(run_epochs(settings, cables, read, server, total, kills))
                # The caches fill in the first epoch; in the last one, a server is killed.
                local += epochs[1:] if name == "folder" else []
                warm += epochs[1:-1] if name != "folder" else []
                for count, epoch in enumerate(epochs, start=1):
                    print(f"{name:8} epoch {count}  {described(epoch)}", flush=True)
        print_listeners(cables)
    for what in ("images_per_second", "cpu_ms"):
        ours, theirs = (statistics.median(getattr(e, what) for e in es) for es in (warm, local))
        print(f"{what}: {ours:.2f}, from a local folder {theirs:.2f}: {ours / theirs:.3f}")


def described(epoch: Epoch) -> str:
    """Return a line of the table."""
    return (
        f"{epoch.seconds:6.1f} s {epoch.images_per_second:7.0f} images/s"
        f" {epoch.cpu_ms:6.2f} CPU ms/image  longest step {epoch.longest_step:5.2f} s"
        f"  origin {epoch.origin_share:.3f} of the data"
    )


def run_epochs(
    settings: Settings,
    cables: Cables,
    read: Callable[[int], None],
    server: NginxServer,
    total: int,
    kills: bool,
) -> Iterator[Epoch]:
    """Run a host in each namespace; yield what its epochs cost."""
    world = {"MASTER_ADDR": "10.77.0.11", "MASTER_PORT": "29512", "LOCAL_RANK": "0"}
    world |= {"WORLD_SIZE": str(settings.hosts), "LOCAL_WORLD_SIZE": "1"}
    world |= {"GLOO_SOCKET_IFNAME": "eth0"}
    hosts = [
        Host.started(name, {**world, "RANK": str(rank)}, partial(read, rank))
        for rank, name in enumerate(cables.names)
    ]
    sent = bytes_sent(server)
    for epoch in range(settings.epochs):
        lines = [json.loads(host.lines.readline()) for host in hosts]
        before, sent = sent, bytes_sent(server)
        seconds = lines[0]["seconds"]
        images = sum(line["images"] for line in lines)
        yield Epoch(
            seconds,
            images / seconds,
            max(line["longest"] for line in lines),
            1000 * sum(line["cpu"] for line in lines) / images,
            (sent - before) / total,
        )
        if kills and epoch == settings.epochs - 2:
            os.kill(lines[-1]["server"], signal.SIGKILL)
    assert [os.waitpid(host.pid, 0)[1] for host in hosts] == [0] * settings.hosts


class Host(NamedTuple):
    """A process in the network namespace of a host, and what it prints."""

    pid: int
    lines: IO[str]

    @classmethod
    def started(cls, name: str, variables: dict[str, str], work: Callable[[], object]) -> "Host":
        """Fork one, as each would need seconds to import torch, and have it do some work."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid:
            os.close(writing)
            return cls(pid, os.fdopen(reading))
        try:
            enter(name)
            os.dup2(writing, sys.stdout.fileno())
            os.environ.update(variables)
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)


def bytes_sent(server: NginxServer) -> int:
    """Return all bytes that nginx has sent so far."""
    time.sleep(0.2)  # nginx writes its line when the last byte has left
    return sum(json.loads(line)["bytes"] for line in server.traffic.log.read_text().splitlines())


def print_listeners(cables: Cables) -> None:
    """Print what listens in the namespaces of the hosts when the runs are over."""
    connections = 0
    for name in cables.names:
        command = ("ip", "netns", "exec", name, "cat", "/proc/net/tcp", "/proc/net/tcp6")
        table = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        connections += table.count(" 0A ")
    print(f"listening sockets at the hosts after the runs: {connections}", flush=True)


def host(
    settings: Settings, location: str, caches: Path | None, cache_gb: float, seed: int, rank: int
) -> None:
    """Read epochs as a rank does; print a line of JSON for each."""
    torch.set_num_threads(1)
    config = ImageNet(
        data=location, cache=str(caches / f"host-{rank}") if caches else "", cache_size=cache_gb,
        exact_epochs=True, workers=0, batch_size=STEP_IMAGES, epochs=settings.epochs + 1,
        seed=seed, device="cpu",
    )  # fmt: skip
    with joined(config) as ranks:
        transforms = partial(TASK.transforms, config)
        data = open_data(config, ranks, transforms, TASK.name, TASK.synthetic_classes)
        server = getattr(data.cache, "_server", None)
        pids = (os.getpid(), *([server.pid] if server else []))
        batches = data.training(0)
        for _ in range(config.epochs - 1):
            ranks.all_reduce_max(0)
            began, cpu = time.monotonic(), sum(cpu_seconds(*pids))
            longest, images = 0.0, 0
            for _ in range(data.epoch_steps):
                asked = time.monotonic()
                images += len(next(batches).labels)
                longest = max(longest, time.monotonic() - asked)
                ranks.all_reduce_max(0)  # as the steps of a training do
            line = {
                "seconds": time.monotonic() - began,
                "images": images,
                "longest": longest,
                "cpu": sum(cpu_seconds(*pids)) - cpu,
                "server": pids[-1],
            }
            print(json.dumps(line), flush=True)
        ranks.all_reduce_max(0)


if __name__ == "__main__":
    run(main)
