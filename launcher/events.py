"""What can happen on a host, as frozen values.

One reader thread per host turns the agent's bytes into these and puts them on one queue; only the
main thread acts on them. `node` is the position of the host in the run (its node rank), `rank` a
global rank. Nothing in here was judged yet, and text from a host is still raw.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from launcher.errors import HostLost

Stream: TypeAlias = Literal["out", "err"]


@dataclass(frozen=True, slots=True)
class Opened:
    """The agent answers and is about to start torchrun."""

    node: int
    door: int
    """A port that the agent keeps and where nobody listens: a call is refused, if it arrives."""


@dataclass(frozen=True, slots=True)
class Output:
    """Bytes that a rank wrote, or torchrun itself when `rank` is None; never cut into lines."""

    node: int
    rank: int | None
    stream: Stream
    data: bytes


@dataclass(frozen=True, slots=True)
class RankStarted:
    """A rank's command runs under this process id."""

    node: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """A rank's command ended: with `code`, or by `signal` when that is not 0."""

    node: int
    rank: int
    code: int
    signal: int = 0
    oom: bool = False
    """The kernel has killed something on that host for want of memory, and killed this."""

    @property
    def exit_code(self) -> int:
        """The code as a shell reports it: 128 + signal for a killed process."""
        return 128 + self.signal if self.signal else self.code


@dataclass(frozen=True, slots=True)
class AskedToStop:
    """Torchrun, or somebody else on the host, sent the shim of a rank this signal."""

    node: int
    rank: int
    signal: int


@dataclass(frozen=True, slots=True)
class TorchrunEnded:
    """The torchrun of a host ended, with a code or by a signal, in or out of turn."""

    node: int
    code: int
    signal: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a rank says about its progress; the fields are those of the training's reports."""

    node: int
    rank: int
    fields: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU in use: percent busy, memory in MiB."""

    busy: int
    memory: int
    memory_total: int


@dataclass(frozen=True, slots=True)
class Usage:
    """How busy a host is: CPU as a fraction of all cores, memory in bytes."""

    node: int
    cpu: float
    memory: int
    memory_total: int
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class Frozen:
    """The processes of a host that are stopped (SIGSTOP), such as "torchrun" or "rank 3"."""

    node: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Joined:
    """The torchrun of a host has found the one on the first host, where all of them meet."""

    node: int


@dataclass(frozen=True, slots=True)
class Unreached:
    """The addresses of the hosts that did not answer this one when it called them all."""

    node: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stopping:
    """The agent ends the run on its host on its own account: lease, end of stream, a signal."""

    node: int
    reason: str


@dataclass(frozen=True, slots=True)
class Closed:
    """The agent's last word: every process of the run is gone, but for the survivors it names."""

    node: int
    survivors: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lost:
    """The agent could not be started, or its stream ended without a last word."""

    node: int
    reason: str
    exit_code: int = HostLost.exit_code


@dataclass(frozen=True, slots=True)
class Swept:
    """A second look at the host of a lost agent: what is left there, or why nobody could look."""

    node: int
    survivors: tuple[str, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """Another node of a run that was started node by node: its first failure, in its words."""

    node: int
    name: str
    text: str
    exit_code: int
    secondary: bool = False
    """It blames a connection, and so probably another node."""


@dataclass(frozen=True, slots=True)
class PeerStops:
    """Somebody wants the run to save and to end, and has told another node so."""

    node: int
    signal: int


@dataclass(frozen=True, slots=True)
class PeerPatience:
    """For how long the ranks of another node may stand still, in what they do now."""

    node: int
    seconds: float


PeerEvent: TypeAlias = PeerFailed | PeerStops | PeerPatience
"""What other nodes say, when every node has a launcher of its own (see `peers`)."""

Event: TypeAlias = (
    PeerEvent
    | Opened
    | Output
    | RankStarted
    | RankEnded
    | AskedToStop
    | TorchrunEnded
    | Report
    | Usage
    | Frozen
    | Joined
    | Unreached
    | Stopping
    | Closed
    | Lost
    | Swept
)
