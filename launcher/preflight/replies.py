"""Replies of a probe, question by question; anything else is refused.

A host describes itself, and may be wrong. What does not have the shape declared here is
that host's error; what has it is text of bounded length, numbers in range, paths and addresses.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated, Literal

from rackrun.launcher.remote import probe
from rackrun.launcher.transport.rpc import Reply
from rackrun.shapes import Count, Shape, at_most, between, matches, shaped

MOST_GPUS = 1024
MOST_CORES = 1 << 16
MOST_NAMED = 16


LOCK = r"/tmp/rackrun-[^\0-\x1f/]{1,200}\.lock"
Text = Annotated[str, at_most(4096)]
"""Text to be shown."""
Name = Annotated[str, at_most(255)]
Run = Annotated[str, matches("[0-9a-f]{32}|")]
"""The id of a run, or empty."""
Path = Annotated[str, at_most(4096), matches(r"/[^\0]*")]
Program = Annotated[str, at_most(4096), matches(r"[^\0]+")]
Address = Annotated[str, at_most(64)]
"""Numeric, or empty."""
Interface = Annotated[str, matches(r"[!-.0-~]{0,15}")]
Number = Annotated[int, between(0, 2**32)]
Part = Annotated[str, matches(r"(\.gpu[0-9]{1,4})?")]
"""A part of a host, as the ending of a lock file: a GPU, or empty for all of it."""


class ProbeFailed(Shape, frozen=True):
    """The question could not be answered."""

    error: Text


class Interpreter(Shape, frozen=True):
    """Interpreter of the ranks; empty where it was not inspected."""

    version: Name = ""
    torch: Name = ""
    cuda: Name = ""
    archs: Name = ""
    missing: Annotated[tuple[Name, ...], at_most(MOST_NAMED)] = ()
    """Packages that the task needs, and that it cannot import."""
    error: Text = ""


class User(Shape, frozen=True):
    """The account that we log in to."""

    uid: Number
    gid: Number
    name: Annotated[str, matches(r"[^\0-\x1f]{1,255}")]


class Clock(Shape, frozen=True):
    """Time of a host."""

    time: Annotated[float, between(0, 1e11)]


class HostReply(Clock, frozen=True):
    """What the orders `look` and `occupancy` both report."""

    cores: Annotated[int, between(1, MOST_CORES)]
    gpus: Annotated[int, between(0, MOST_GPUS)]
    disk_free: Count
    lock_problem: Text
    drained: Text
    """Why root has taken it out of use; empty: it is in use."""


class LookReply(HostReply, frozen=True):
    """Facts that are known at once."""

    machine: Annotated[str, at_most(512)]
    address: Address
    lock: Annotated[str, matches(LOCK)]
    holder: Text
    workdir: Path
    workdir_problem: Text
    tmp_problem: Text
    python: Program
    interpreter: Interpreter
    user: User
    open_files: Annotated[int, between(-1, 2**53)]
    shared_memory_problem: Text
    locked_memory_problem: Text
    weights_problem: Text = ""
    cache_problem: Text = ""
    memory: Count = 0
    """Bytes; 0: not known."""
    run: Run = ""
    """The run that holds the host, if it is one of the account that we log in to."""
    queued: bool = False
    """`holder` is a launch that waits, and comes before this one."""
    taken: Annotated[tuple[Annotated[int, between(0, MOST_GPUS)], ...], at_most(MOST_GPUS)] = ()
    """GPUs that others hold, or wait for before us; only for a launch that chooses hosts."""

    def __post_init__(self) -> None:
        _check_address(self.address)


class ImageReply(Shape, frozen=True):
    """An image, and the interpreter in it."""

    id: Annotated[str, matches(r"[0-9a-f]{1,64}")]
    interpreter: Interpreter


class GpuFacts(Shape, frozen=True):
    """One GPU: memory in MiB, °C; nothing is known of what is 0 or empty."""

    name: Name
    total: Number
    used: Number
    temperature: Number = 0
    uncorrected: Count = 0
    slowed: Literal["", "heat", "power", "hardware"] = ""


class GpusReply(Shape, frozen=True):
    """All GPUs of a host."""

    gpus: Annotated[tuple[GpuFacts, ...], at_most(MOST_GPUS)]
    problem: Text = ""
    driver: Name = ""
    capabilities: Annotated[tuple[Name, ...], at_most(MOST_GPUS)] = ()


class CodeReply(Shape, frozen=True):
    """Differences of a host's files from the local ones, the first of them by name."""

    missing: Annotated[tuple[Text, ...], at_most(MOST_NAMED)]
    different: Annotated[tuple[Text, ...], at_most(MOST_NAMED)]
    count: Count


class AddressReply(Shape, frozen=True):
    """The address of a network device."""

    address: Address

    def __post_init__(self) -> None:
        _check_address(self.address)


class RouteReply(AddressReply, frozen=True):
    """Our own end of the way to the master, and the master's address."""

    interface: Interface
    master: Address

    def __post_init__(self) -> None:
        _check_address(self.address)
        _check_address(self.master)


class ListenReply(Shape, frozen=True):
    """Address and port at which the first host listens."""

    port: Annotated[int, between(1, 65535)]


class HeldReply(Shape, frozen=True):
    """Holder of a lock, and its run as in `LookReply`; empty: the probe itself."""

    holder: Text
    run: Run = ""


class Use(Shape, frozen=True):
    """Who has locked a part of the host; empty where that is not known."""

    part: Part
    user: Name
    since: Annotated[float, between(0, 1e11)]
    run: Run
    name: Name


class Waiter(Shape, frozen=True):
    """A launch that waits for the host."""

    user: Name
    since: Annotated[float, between(0, 1e11)]


class OccupancyReply(HostReply, frozen=True):
    """What the table of the rack has of a host, but for its GPUs."""

    load: Annotated[float, between(0, 1e6)]
    uses: Annotated[tuple[Use, ...], at_most(MOST_GPUS)]
    queue: Annotated[tuple[Waiter, ...], at_most(probe.MOST_WAITERS)]


class ShardsReply(Shape, frozen=True):
    """The data set that was found, and its splits with samples; nothing where it was not read."""

    dataset: Name = ""
    splits: Annotated[tuple[Name, ...], at_most(MOST_NAMED)] = ()


class DoneReply(Shape, frozen=True):
    """There is nothing to report."""


SHAPES: dict[str, type] = {
    "look": LookReply,
    "image": ImageReply,
    "gpus": GpusReply,
    "code": CodeReply,
    "address": AddressReply,
    "route": RouteReply,
    "listen": ListenReply,
    "reach": DoneReply,
    "shards": ShardsReply,
    "clock": Clock,
    "hold": HeldReply,
    "unlock": DoneReply,
    "occupancy": OccupancyReply,
}
"""Question -> shape of its reply, which may be `ProbeFailed` for all but the time."""


def _check_address(text: str) -> None:
    """Raise ValueError for text that is no numeric address, unless it is empty."""
    try:
        ipaddress.ip_address(text.partition("%")[0] or "::")
    except ValueError:
        raise ValueError(f"{text!r} is no address") from None


def checked_reply(question: str, reply: Reply) -> Reply:
    """Return a reply that has the shape of its question's; raise Misshapen for any other."""
    failed = isinstance(reply, dict) and set(reply) == {"error"} and question != "clock"
    shaped(reply, ProbeFailed if failed else SHAPES[question], question)
    return reply
