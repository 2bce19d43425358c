"""Events on a host, as frozen values.

One reader thread per host turns the agent's bytes into these and puts them on one queue; only the
main thread acts on them. `node` is the position of the host in the run (its node rank), `rank` a
global rank. Nothing in here was judged yet, and text from a host is still raw.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

from rackrun.launcher.errors import HostLost
from rackrun.shapes import LARGEST_NUMBER, AtMost, Between

Stream: TypeAlias = Literal["out", "err"]
Node: TypeAlias = Annotated[int, Between(0, 2**20)]
Number: TypeAlias = Annotated[int, Between(0, 2**24)]
"""Of a rank among all ranks."""
Port: TypeAlias = Annotated[int, Between(0, 65535)]
Pid: TypeAlias = Annotated[int, Between(1, 2**22)]
Code: TypeAlias = Annotated[int, Between(0, 255)]
"""With which a process exits."""
Signal: TypeAlias = Annotated[int, Between(0, 64)]
"""0: none."""
Count: TypeAlias = Annotated[int, Between(0, 2**53)]
ShortText: TypeAlias = Annotated[str, AtMost(4096)]
Names: TypeAlias = Annotated[tuple[Annotated[str, AtMost(256)], ...], AtMost(65536)]


@dataclass(frozen=True)
class Opened:
    """The agent answers and is about to start torchrun."""

    node: Node
    port: Port
    """A port that the agent holds without listening: a connection that arrives is refused."""


@dataclass(frozen=True)
class Output:
    """Bytes that a rank wrote, or torchrun itself when `rank` is None; never cut into lines."""

    node: Node
    rank: Number | None
    stream: Stream
    data: bytes


@dataclass(frozen=True)
class RankStarted:
    """A rank's command runs under this process id."""

    node: Node
    rank: Number
    pid: Pid


@dataclass(frozen=True)
class RankEnded:
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


@dataclass(frozen=True)
class AskedToStop:
    """Torchrun, or another process of the host, sent the shim of a rank this signal."""

    node: Node
    rank: Number
    signal: Signal


@dataclass(frozen=True)
class TorchrunEnded:
    """The torchrun of a host ended, with a code or by a signal, in or out of turn."""

    node: Node
    code: Code
    signal: Signal = 0
    oom: bool = False
    """The kernel killed it for lack of memory on that host."""
    ordered: bool = False
    """Its agent had begun to end the run before it did."""


@dataclass(frozen=True)
class Report:
    """Progress that a rank reports, checked (see `reports`)."""

    node: Node
    rank: Number
    fields: Annotated[dict[str, Any], AtMost(64)]


@dataclass(frozen=True)
class Computing:
    """A rank that has reported, but not yet two steps, has used a processor or GPU just now."""

    node: Node
    rank: Number


@dataclass(frozen=True)
class Gpu:
    """One GPU in use: percent busy, memory in MiB."""

    busy: Annotated[int, Between(0, 100)]
    memory: Count
    memory_total: Count
    temperature: Annotated[int, Between(0, 999_999)] = 0
    """Degrees Celsius; 0: not known."""
    power: Annotated[int, Between(0, 999_999)] = 0
    """W; 0: not known."""
    slowed: Literal["", "heat", "power", "hardware"] = ""
    """What keeps its clocks low."""


@dataclass(frozen=True)
class Usage:
    """Utilization of a host: CPU as a fraction of all cores, memory in bytes."""

    node: Node
    cpu: Annotated[float, Between(0, 1)]
    memory: Count
    memory_total: Count
    gpus: Annotated[tuple[Gpu, ...], AtMost(1024)] = ()
    received: Count = 0
    """Bytes per second from the network."""
    sent: Count = 0
    """Bytes per second to the network."""


@dataclass(frozen=True)
class Frozen:
    """The processes of a host that are stopped (SIGSTOP), such as "torchrun" or "rank 3"."""

    node: Node
    names: Names


@dataclass(frozen=True)
class Joined:
    """The torchrun of a host has found the one on the first host, where all of them meet."""

    node: Node


@dataclass(frozen=True)
class Unreached:
    """The addresses of the hosts that did not answer this one when it called them all."""

    node: Node
    addresses: Names


@dataclass(frozen=True)
class Stopping:
    """The agent ends the run on its host on its own account: lease, end of stream, a signal."""

    node: Node
    reason: ShortText


@dataclass(frozen=True)
class Closed:
    """The agent's last word: every process of the run is gone, but for the survivors it names."""

    node: Node
    survivors: Names = ()


@dataclass(frozen=True)
class Lost:
    """The agent could not be started, or its stream ended without a last word."""

    node: Node
    reason: ShortText
    exit_code: Code = HostLost.exit_code


@dataclass(frozen=True)
class Swept:
    """A second look at the host of a lost agent: what is left there, or why that is unknown."""

    node: Node
    survivors: Names = ()
    reason: ShortText = ""


@dataclass(frozen=True)
class PeerFailed:
    """Another node of a run that was started node by node: its first failure, in its words."""

    node: Node
    text: ShortText
    exit_code: Annotated[int, Between(1, 255)]
    secondary: bool = False
    """It blames a connection, and so probably another node."""
    name: str = ""
    """Of the node; not from its message."""


@dataclass(frozen=True)
class PeerStops:
    """Request to save and to end, received by another node."""

    node: Node
    signal: Annotated[int, Between(1, 64)]


@dataclass(frozen=True)
class PeerHangLimit:
    """The seconds that ranks of another node may go without progress, in their phase."""

    node: Node
    seconds: Annotated[float, Between(0, LARGEST_NUMBER)]


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
