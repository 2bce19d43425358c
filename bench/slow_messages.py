"""Measure how long steps wait for what ranks tell one another beside gradients.

    python -m bench.slow_messages [--ranks 64] [--delay-ms 1] [--step-ms 5]     (as root)

The ranks are processes that exchange requests to stop as training does (training.sync), over gloo,
but do not compute: a step takes a fixed time, and all begin it together, as gradients over a faster
network would have them do. Half of the ranks are in one network namespace, half in another, in
turn, and every packet between the two is kept for the delay, on its way through TUN devices. A
message thus takes at least the delay from each rank to the next one. `same step` reads the exchange
at the end of the step in which it began.
"""

import ctypes
import fcntl
import multiprocessing
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import NoReturn

import torch
import torch.distributed as dist

from rackrun.commandline.parser import parse
from rackrun.training.ranks import Ranks
from rackrun.training.run.stop_requests import NOTHING
from rackrun.training.sync.step_exchange import StepExchange

CLONE_NEWNET = 0x40000000
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # of the two sides
PORT = 29400
STOP = 143


@dataclass(frozen=True)
class Settings:
    """Measure waits for requests."""

    ranks: int = 64
    """Processes."""
    delay_ms: float = 1.0
    """Time that a packet takes from one half of the ranks to the other."""
    step_ms: float = 5.0
    """Time that a step takes without any wait."""
    steps: int = 400
    """Steps of each way; one rank asks to stop after half of them."""


class SameStep(StepExchange):
    """Reads every exchange in the step in which it began."""

    def complete(self) -> None:
        """Wait for the result."""
        self._lag = self._steps = 0
        super().complete()


WAYS = {"same step": SameStep, "as now": StepExchange}


def main(settings: Settings) -> None:
    """Print how long steps wait, both ways."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(settings.ranks)
    receiver, sender = context.Pipe(duplex=False)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    devices = []
    processes = []
    for side in range(2):
        devices.append(new_namespace(side))
        for rank in range(side, settings.ranks, 2):
            args = (settings, rank, side, barrier, sender if rank == 0 else None)
            processes.append(context.Process(target=run_rank, args=args, daemon=True))
            processes[-1].start()
        enter(home)
    forward(devices, settings.delay_ms / 1000, receiver)
    print(receiver.recv())
    for process in processes:
        process.kill()


def new_namespace(side: int) -> int:
    """Enter a network namespace with a TUN device, whose other end is that of the other side."""
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare; type this command as root")
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", b"tun0", IFF_TUN | IFF_NO_PI))
    address, peer_address = ADDRESSES[side], ADDRESSES[1 - side]
    for command in (
        "link set lo up",
        f"address add {address} peer {peer_address} dev tun0",
        f"link set tun0 mtu {MTU} txqueuelen 10000 up",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    return device


def enter(namespace: int) -> None:
    """Enter a network namespace."""
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


libc = ctypes.CDLL(None, use_errno=True)


def forward(devices: list[int], delay: float, done: Connection) -> None:
    """Carry packets from each device to the other, until the ranks are done."""
    other = dict(zip(devices, reversed(devices), strict=True))
    waiting = deque[tuple[float, int, bytes]]()
    while not done.poll():
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else 0.1
        readable = select.select(devices, [], [], timeout)[0]
        now = time.monotonic()
        for device in readable:
            while packet := packet_of(device):
                waiting.append((now + delay, other[device], packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, device, packet = waiting.popleft()
            os.write(device, packet)


def packet_of(device: int) -> bytes:
    """Return the next packet, if there is one."""
    try:
        return os.read(device, MTU + 100)
    except BlockingIOError:
        return b""


def run_rank(
    settings: Settings, rank: int, side: int, barrier: Barrier, results: Connection | None
) -> NoReturn:
    """Take steps as one of the ranks, both ways; rank 0 sends a line for each."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "tun0"
    dist.init_process_group(
        "gloo", f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=settings.ranks
    )
    ranks = Ranks(rank, settings.ranks, 0, 1, torch.device("cpu"))
    lines = [line_of(way, ranks, barrier, settings) for way in WAYS]
    if results:
        results.send("\n".join(lines))
    signal.pause()
    sys.exit()


def line_of(way: str, ranks: Ranks, barrier: Barrier, settings: Settings) -> str:
    """Take steps; return a line on how long they waited."""
    asked, step = settings.steps // 2, 0
    waited, followed = [], 0

    def pending() -> int:
        return STOP if ranks.rank == 1 and step >= asked else NOTHING

    exchange = WAYS[way](ranks, pending)
    for step in range(settings.steps):
        barrier.wait()
        exchange.begin()
        time.sleep(settings.step_ms / 1000)
        began = time.perf_counter()
        exchange.complete()
        waited.append((time.perf_counter() - began) * 1000)
        followed = followed or step * (exchange.request == STOP)
    later = waited[len(waited) // 4 :]
    return (
        f"{way:>10}: a step waits {statistics.median(later):.2f} ms (median),"
        f" {statistics.mean(later):.2f} ms (mean), {max(later):.1f} ms (most of the last"
        f" {len(later)}); a request is followed {followed - asked} steps later"
    )


if __name__ == "__main__":
    main(parse(Settings, "python -m bench.slow_messages", sys.argv[1:]))
