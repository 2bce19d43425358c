"""Events on a host, as frozen values.

One reader thread per host turns the agent's bytes into these and puts them on one queue; only the
main thread acts on them. `node` is the position of the host in the run (its node rank), `rank` a
global rank. Nothing in here was judged yet, and text from a host is still raw.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from rackrun.launcher.errors import HostLost
from rackrun.shapes import LARGEST_NUMBER, Count, Shape, at_most, between

Stream: TypeAlias = Literal["out", "err"]
Node: TypeAlias = Annotated[int, between(0, 2**20)]
Number: TypeAlias = Annotated[int, between(0, 2**24)]
"""The global number of a rank."""
Port: TypeAlias = Annotated[int, between(0, 65535)]
Pid: TypeAlias = Annotated[int, between(1, 2**22)]
Code: TypeAlias = Annotated[int, between(0, 255)]
"""The exit code of a process."""
Signal: TypeAlias = Annotated[int, between(0, 64)]
"""0: none."""
ShortText: TypeAlias = Annotated[str, at_most(4096)]
Names: TypeAlias = Annotated[tuple[Annotated[str, at_most(256)], ...], at_most(65536)]


class Opened(Shape, frozen=True):
    """The agent answers and is about to start torchrun."""

    node: Node
    port: Port
    """A port that the agent holds without listening: a connection that arrives is refused."""


class Output(Shape, frozen=True):
    """Bytes that a rank wrote, or torchrun itself when `rank` is None; never cut into lines."""

    node: Node
    rank: Number | None
    stream: Stream
    data: bytes


class RankStarted(Shape, frozen=True):
    """A rank's command runs under this process id."""

    node: Node
    rank: Number
    pid: Pid


class RankEnded(Shape, frozen=True):
    """A rank's command ended: with `code`, or by `signal` when that is not 0."""

    node: Node
    rank: Number
    code: Code
    signal: Signal = 0
    oom: bool = False
    """The kernel killed it for lack of memory on that host."""
    ordered: bool = False
    """Its agent had ordered it to end before it did."""

    @property
    def exit_code(self) -> int:
        """The code as a shell reports it: 128 + signal for a killed process."""
        return 128 + self.signal if self.signal else self.code


class AskedToStop(Shape, frozen=True):
    """Torchrun, or another process of the host, sent the shim of a rank this signal."""

    node: Node
    rank: Number
    signal: Signal


class TorchrunEnded(Shape, frozen=True):
    """The torchrun of a host ended, with a code or by a signal, in or out of turn."""

    node: Node
    code: Code
    signal: Signal = 0
    oom: bool = False
    """The kernel killed it for lack of memory on that host."""
    ordered: bool = False
    """Its agent had begun to end the run before it did."""


class Report(Shape, frozen=True):
    """Progress that a rank reports, checked (see `reports`)."""

    node: Node
    rank: Number
    fields: Annotated[dict[str, Any], at_most(64)]


class Computing(Shape, frozen=True):
    """A rank that has reported, but not yet two steps, has used a processor or GPU just now."""

    node: Node
    rank: Number


class Gpu(Shape, frozen=True):
    """One GPU in use: percent busy, memory in MiB."""

    busy: Annotated[int, between(0, 100)]
    memory: Count
    memory_total: Count
    temperature: Annotated[int, between(0, 999_999)] = 0
    """Degrees Celsius; 0: not known."""
    power: Annotated[int, between(0, 999_999)] = 0
    """W; 0: not known."""
    slowed: Literal["", "heat", "power", "hardware"] = ""
    """What keeps its clocks low."""


class Usage(Shape, frozen=True):
    """Utilization of a host: CPU as a fraction of all cores, memory in bytes."""

    node: Node
    cpu: Annotated[float, between(0, 1)]
    memory: Count
    memory_total: Count
    gpus: Annotated[tuple[Gpu, ...], at_most(1024)] = ()
    received: Count = 0
    """Bytes per second from the network."""
    sent: Count = 0
    """Bytes per second to the network."""


class Frozen(Shape, frozen=True):
    """The processes of a host that are stopped (SIGSTOP), such as "torchrun" or "rank 3"."""

    node: Node
    names: Names


class Joined(Shape, frozen=True):
    """The torchrun of a host has found the one on the first host, where all of them meet."""

    node: Node


class Unreached(Shape, frozen=True):
    """The addresses of the hosts that did not answer this one when it called them all."""

    node: Node
    addresses: Names


class Stopping(Shape, frozen=True):
    """The agent ends the run on its host on its own account: lease, end of stream, a signal."""

    node: Node
    reason: ShortText


class Closed(Shape, frozen=True):
    """The agent's last message: all processes of the run are gone, except those that it names."""

    node: Node
    survivors: Names = ()


class Lost(Shape, frozen=True):
    """The agent could not be started, or its stream ended without a last message."""

    node: Node
    reason: ShortText
    exit_code: Code = HostLost.exit_code


class Swept(Shape, frozen=True):
    """A second look at the host of a lost agent: what is left there, or why that is unknown."""

    node: Node
    survivors: Names = ()
    reason: ShortText = ""


class PeerFailed(Shape, frozen=True):
    """Another node of a run that was started node by node: its first failure, as it reported it."""

    node: Node
    text: ShortText
    exit_code: Annotated[int, between(1, 255)]
    secondary: bool = False
    """It blames a connection, and so probably another node."""
    name: str = ""
    """The name of the node, which is not from its message."""


class PeerStops(Shape, frozen=True):
    """Request to save and to end, received by another node."""

    node: Node
    signal: Annotated[int, between(1, 64)]


class PeerHangLimit(Shape, frozen=True):
    """The seconds that ranks of another node may go without progress, in their phase."""

    node: Node
    seconds: Annotated[float, between(0, LARGEST_NUMBER)]


PeerEvent: TypeAlias = PeerFailed | PeerStops | PeerHangLimit
"""Messages of other nodes, when every node has a launcher of its own (see `peers`)."""

Event: TypeAlias = (
    PeerEvent
    | Opened
    | Output
    | RankStarted
    | RankEnded
    | AskedToStop
    | TorchrunEnded
    | Report
    | Computing
    | Usage
    | Frozen
    | Joined
    | Unreached
    | Stopping
    | Closed
    | Lost
    | Swept
)
