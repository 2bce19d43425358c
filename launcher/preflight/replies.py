"""Replies of a probe, question by question; anything else is refused.

A host describes itself, and may be wrong. What does not have the shape declared here is
that host's error; what has it is text of bounded length, numbers in range, paths and addresses.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from rackrun.launcher.remote import probe
from rackrun.launcher.transport.rpc import Reply
from rackrun.shapes import AtMost, Between, Matches, Misshapen, shaped

MOST_GPUS = 1024
MOST_CORES = 1 << 16
MOST_NAMED = 16


@dataclass(frozen=True)
class AnAddress:
    """Text that is a numeric address, or empty."""

    def check(self, value: Any) -> None:
        """Raise Misshapen for other text."""
        try:
            ipaddress.ip_address(value.partition("%")[0] or "::")
        except ValueError:
            raise Misshapen("not an address") from None


LOCK = r"/tmp/rackrun-[^\0-\x1f/]{1,200}\.lock"
Text = Annotated[str, AtMost(4096)]
"""Text to be shown."""
Name = Annotated[str, AtMost(255)]
Run = Annotated[str, Matches("[0-9a-f]{32}|")]
"""The id of a run, or empty."""
Path = Annotated[str, AtMost(4096), Matches(r"/[^\0]*")]
Program = Annotated[str, AtMost(4096), Matches(r"[^\0]+")]
Address = Annotated[str, AtMost(64), AnAddress()]
Interface = Annotated[str, Matches(r"[!-.0-~]{0,15}")]
Count = Annotated[int, Between(0, 2**53)]
Number = Annotated[int, Between(0, 2**32)]
Part = Annotated[str, Matches(r"(\.gpu[0-9]{1,4})?")]
"""Of a host, as the ending of a lock file: a GPU, or all of it."""


@dataclass(frozen=True)
class ProbeFailed:
    """The question could not be answered."""

    error: Text


@dataclass(frozen=True)
class Interpreter:
    """Interpreter of the ranks; empty where it was not inspected."""

    version: Name = ""
    torch: Name = ""
    cuda: Name = ""
    archs: Name = ""
    missing: Annotated[tuple[Name, ...], AtMost(MOST_NAMED)] = ()
    """Packages that the task needs, and that it cannot import."""
    error: Text = ""


@dataclass(frozen=True)
class User:
    """The account that we log in to."""

    uid: Number
    gid: Number
    name: Annotated[str, Matches(r"[^\0-\x1f]{1,255}")]


@dataclass(frozen=True)
class Clock:
    """Time of a host."""

    time: Annotated[float, Between(0, 1e11)]


@dataclass(frozen=True)
class HostReply(Clock):
    """What the orders `look` and `occupancy` both report."""

    cores: Annotated[int, Between(1, MOST_CORES)]
    gpus: Annotated[int, Between(0, MOST_GPUS)]
    disk_free: Count
    lock_problem: Text
    drained: Text
    """Why root has taken it out of use; empty: it is in use."""


@dataclass(frozen=True)
class LookReply(HostReply):
    """Facts that are known at once."""

    machine: Annotated[str, AtMost(512)]
    address: Address
    lock: Annotated[str, Matches(LOCK)]
    holder: Text
    workdir: Path
    workdir_problem: Text
    tmp_problem: Text
    python: Program
    interpreter: Interpreter
    user: User
    open_files: Annotated[int, Between(-1, 2**53)]
    shared_memory_problem: Text
    locked_memory_problem: Text
    weights_problem: Text = ""
    cache_problem: Text = ""
    run: Run = ""
    """The run that holds the host, if it is one of the account that we log in to."""
    queued: bool = False
    """`holder` is a launch that waits, and comes before this one."""
    taken: Annotated[tuple[Annotated[int, Between(0, MOST_GPUS)], ...], AtMost(MOST_GPUS)] = ()
    """GPUs that others hold, or wait for before us; only for a launch that chooses hosts."""


@dataclass(frozen=True)
class ImageReply:
    """An image, and the interpreter in it."""

    id: Annotated[str, Matches(r"[0-9a-f]{1,64}")]
    interpreter: Interpreter


@dataclass(frozen=True)
class GpuFacts:
    """One GPU: memory in MiB, °C; nothing is known of what is 0 or empty."""

    name: Name
    total: Number
    used: Number
    temperature: Number = 0
    uncorrected: Count = 0
    slowed: Literal["", "heat", "power", "hardware"] = ""


@dataclass(frozen=True)
class GpusReply:
    """All GPUs of a host."""

    gpus: Annotated[tuple[GpuFacts, ...], AtMost(MOST_GPUS)]
    problem: Text = ""
    driver: Name = ""
    capabilities: Annotated[tuple[Name, ...], AtMost(MOST_GPUS)] = ()


@dataclass(frozen=True)
class CodeReply:
    """Differences of a host's files from the local ones, the first of them by name."""

    missing: Annotated[tuple[Text, ...], AtMost(MOST_NAMED)]
    different: Annotated[tuple[Text, ...], AtMost(MOST_NAMED)]
    count: Count


@dataclass(frozen=True)
class AddressReply:
    """The address of a network device."""

    address: Address


@dataclass(frozen=True)
class RouteReply(AddressReply):
    """Our own end of the way to the master, and the master's address."""

    interface: Interface
    master: Address


@dataclass(frozen=True)
class ListenReply:
    """Address and port at which the first host listens."""

    port: Annotated[int, Between(1, 65535)]


@dataclass(frozen=True)
class HeldReply:
    """Holder of a lock, and its run as in `LookReply`; empty: the probe itself."""

    holder: Text
    run: Run = ""


@dataclass(frozen=True)
class Use:
    """Who has locked a part of the host; empty where that is not known."""

    part: Part
    user: Name
    since: Annotated[float, Between(0, 1e11)]
    run: Run
    name: Name


@dataclass(frozen=True)
class Waiter:
    """A launch that waits for the host."""

    user: Name
    since: Annotated[float, Between(0, 1e11)]


@dataclass(frozen=True)
class OccupancyReply(HostReply):
    """What the table of the rack has of a host, but for its GPUs."""

    load: Annotated[float, Between(0, 1e6)]
    uses: Annotated[tuple[Use, ...], AtMost(MOST_GPUS)]
    queue: Annotated[tuple[Waiter, ...], AtMost(probe.MOST_WAITERS)]


@dataclass(frozen=True)
class ShardsReply:
    """The data set that was found, and its splits with samples; nothing where it was not read."""

    dataset: Name = ""
    splits: Annotated[tuple[Name, ...], AtMost(MOST_NAMED)] = ()


@dataclass(frozen=True)
class DoneReply:
    """There is nothing to report."""


SHAPES: dict[str, type] = {
    "look": LookReply,
    "image": ImageReply,
    "gpus": GpusReply,
    "code": CodeReply,
    "address": AddressReply,
    "route": RouteReply,
    "listen": ListenReply,
    "release_port": DoneReply,
    "reach": DoneReply,
    "shards": ShardsReply,
    "clock": Clock,
    "hold": HeldReply,
    "unlock": DoneReply,
    "occupancy": OccupancyReply,
}
"""By question; instead of any but the time, a reply may be `ProbeFailed`."""


def checked_reply(question: str, reply: Reply) -> Reply:
    """Return a reply that has the shape of its question's; raise Misshapen for any other."""
    failed = isinstance(reply, dict) and set(reply) == {"error"} and question != "clock"
    shaped(reply, ProbeFailed if failed else SHAPES[question], question)
    return reply
