"""The replies of a probe, each in its declared shape; anything else is refused.

A host describes itself, and may be wrong. What does not have the shape declared here is
that host's error; what has it is text of bounded length, numbers in range, paths and addresses.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.remote import probe
from rackrun.launcher.run.container import HostUser
from rackrun.shapes import Count, Misshapen, Shape, at_most, between, matches, shaped

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
Part = Annotated[str, matches(r"(\.gpu[0-9]{1,4})?")]
"""A part of a host, as the ending of a lock file: a GPU, or empty for all of it."""


class Reply(Shape, frozen=True, kw_only=True):
    """A reply to the order `order_name`; the base has only why there is none."""

    order_name: ClassVar[str] = ""
    error: Text = ""


class Interpreter(Shape, frozen=True):
    """Interpreter of the ranks; empty where it was not inspected."""

    version: Name = ""
    torch: Name = ""
    cuda: Name = ""
    archs: Name = ""
    missing: Annotated[tuple[Name, ...], at_most(MOST_NAMED)] = ()
    """Packages that the task needs, and that it cannot import."""
    error: Text = ""


class HostReply(Reply, frozen=True, kw_only=True):
    """What the orders `look` and `occupancy` both report."""

    time: Annotated[float, between(0, 1e11)]
    cores: Annotated[int, between(1, MOST_CORES)]
    gpus: Annotated[int, between(0, MOST_GPUS)]
    disk_free: Count
    lock_problem: Text
    drained: Text
    """Why root has taken it out of use; empty: it is in use."""


class Basics(HostReply, frozen=True, kw_only=True):
    """Facts that are known at once."""

    order_name = "look"
    machine: Annotated[str, at_most(512)]
    address: Address
    lock: Annotated[str, matches(LOCK)]
    holder: Text
    workdir: Path
    problems: Annotated[dict[Name, Text], at_most(MOST_NAMED)]
    """What the host itself has found wrong, by what it is about."""
    python: Program
    interpreter: Interpreter
    user: HostUser
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


class Image(Reply, frozen=True):
    """An image, and the interpreter in it."""

    order_name = "image"
    id: Annotated[str, matches(r"[0-9a-f]{0,64}")] = ""
    interpreter: Interpreter = Interpreter()


class Gpu(Shape, frozen=True):
    """One GPU: memory in MiB, °C; nothing is known of what is 0 or empty."""

    name: Name
    total: Annotated[int, between(0, 2**32)]
    used: Annotated[int, between(0, 2**32)]
    temperature: Annotated[int, between(0, 2**32)] = 0
    uncorrected: Count = 0
    slowed: Literal["", "heat", "power", "hardware"] = ""


class Gpus(Reply, frozen=True):
    """All GPUs of a host."""

    order_name = "gpus"
    gpus: Annotated[tuple[Gpu, ...], at_most(MOST_GPUS)] = ()
    problem: Text = ""
    driver: Name = ""
    capabilities: Annotated[tuple[Name, ...], at_most(MOST_GPUS)] = ()


class Code(Reply, frozen=True):
    """Differences of a host's files from the local ones, the first of them by name."""

    order_name = "code"
    missing: Annotated[tuple[Text, ...], at_most(MOST_NAMED)] = ()
    different: Annotated[tuple[Text, ...], at_most(MOST_NAMED)] = ()
    count: Count = 0


class Route(Reply, frozen=True):
    """Our own end of the way to the master, the master's address, and whether it was reached."""

    order_name = "route"
    address: Address = ""
    interface: Interface = ""
    master: Address = ""
    unreached: Text = ""
    """Why the master's port cannot be reached."""

    def __post_init__(self) -> None:
        _check_address(self.address)
        _check_address(self.master)


class Listen(Reply, frozen=True):
    """The port at which the first host listens; 0 for none."""

    order_name = "listen"
    port: Annotated[int, between(0, 65535)] = 0


class Hold(Reply, frozen=True):
    """Holder of a lock, and its run as in `Basics`; empty: the probe itself."""

    order_name = "hold"
    holder: Text = ""
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


class Occupancy(HostReply, frozen=True, kw_only=True):
    """What the table of the rack has of a host, but for its GPUs."""

    order_name = "occupancy"
    load: Annotated[float, between(0, 1e6)]
    uses: Annotated[tuple[Use, ...], at_most(MOST_GPUS)]
    queue: Annotated[tuple[Waiter, ...], at_most(probe.MOST_WAITERS)]


class Shards(Reply, frozen=True):
    """The data set that was found, and its splits with samples; nothing where it was not read."""

    order_name = "shards"
    dataset: Name = ""
    splits: Annotated[tuple[Name, ...], at_most(MOST_NAMED)] = ()
    is_older: bool = False


R = TypeVar("R", bound=Reply)

REPLIES: tuple[type[Reply], ...] = (
    *(Basics, Image, Gpus, Code, Route, Listen, Hold, Occupancy, Shards),
)


def _check_address(text: str) -> None:
    """Raise ValueError for text that is no numeric address, unless it is empty."""
    try:
        ipaddress.ip_address(text.partition("%")[0] or "::")
    except ValueError:
        raise ValueError(f"{text!r} is no address") from None


def checked_reply(reply: Mapping[str, Any], shape: type[R], host: str) -> R:
    """Return a reply in its shape; raise HostUnreachable for any other.

    Nothing else can be asked of a host that does not say what it is like.
    """
    try:
        if issubclass(shape, HostReply) and "error" in reply:
            failed: Reply = shaped(reply, Reply, shape.order_name)
            raise HostUnreachable(f"{host}: cannot be probed: {failed.error}")
        whole: R = shaped(reply, shape, shape.order_name)
    except Misshapen as error:
        nonsense = f"{host}: its reply is not that of the probe ({error})"
        raise HostUnreachable(nonsense) from None
    return whole
