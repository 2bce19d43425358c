"""A node's place in a run, and the variable that each part of it was read from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from rackrun.errors import UsageError
from rackrun.launcher.run.hosts import MOST_HOSTS, MOST_SLOTS, is_address
from rackrun.shapes import LARGEST_NUMBER
from rackrun.terminal import one_line
from rackrun.units import whole_number

T = TypeVar("T")

MASTER_PORT = 29500
"""torchrun's own default."""


@dataclass(frozen=True)
class Sourced(Generic[T]):
    """A value, and where it comes from: the name of a variable, an option, or a reason."""

    value: T
    origin: str


@dataclass(frozen=True)
class Placement:
    """Node rank, number of nodes, and the master's address and port."""

    platform: str
    node: Sourced[int]
    """The node rank, from 0."""
    nodes: Sourced[int]
    master: Sourced[str]
    """Name or address of node 0; empty for a single node, which needs none."""
    port: Sourced[int]
    """A port of node 0 that is free for us."""
    processes: Sourced[int] | None = None
    """Ranks on this node; None: one per GPU, or one."""
    most_processes: Sourced[int] | None = None
    """More than that the platform did not give to this node."""
    job: str = ""
    """The platform's own name of the job, which is the same on all its nodes."""

    def check(self) -> None:
        """Refuse what no run can be."""
        node, nodes = self.node, self.nodes
        if not 1 <= nodes.value <= MOST_HOSTS:
            raise UsageError(f"{nodes.origin}={nodes.value}: a run has 1 to {MOST_HOSTS} nodes")
        if not 0 <= node.value < nodes.value:
            rank = f"{node.origin}={node.value} does not fit {nodes.origin}={nodes.value}"
            raise UsageError(f"{rank}: node ranks count from 0")
        if nodes.value > 1 and not self.master.value:
            unknown = f"{self.platform}: no address of node 0 ({self.master.origin})"
            raise UsageError(f"{unknown}; set MASTER_ADDR, or type: --master ADDRESS")
        if nodes.value > 1 and not is_address(self.master.value):
            raise UsageError(
                f"{self.master.origin}: {one_line(self.master.value)[:60]}: no address"
            )
        if not 0 < self.port.value < 1 << 16:
            raise UsageError(f"{self.port.origin}={self.port.value}: not a port")
        processes, most = self.processes, self.most_processes
        if processes and not 1 <= processes.value <= MOST_SLOTS:
            asked = f"{processes.origin}={processes.value}"
            raise UsageError(f"{asked}: a node has 1 to {MOST_SLOTS} processes")
        if processes and most and processes.value > most.value:
            more = f"{processes.origin} {processes.value}: more than {most.origin}={most.value}"
            raise UsageError(f"{more} on this node")


class Variables:
    """The environment of this process, asked for values with their origins."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        """Count an empty variable as none; a value in YAML may have a line feed behind it."""
        self.set = {name: value.strip() for name, value in environment.items() if value.strip()}

    def __contains__(self, name: str) -> bool:
        return name in self.set

    def find(self, *names: str) -> Sourced[str] | None:
        """Return the first of these variables that is set."""
        return next((Sourced(self.set[name], name) for name in names if name in self.set), None)

    def text(self, *names: str) -> Sourced[str]:
        """Return the first of these variables that is set; raise UsageError when none is."""
        variable = self.find(*names)
        if variable is None:
            raise UsageError(f"{' or '.join(names)} is not set on this node")
        return variable

    def number(self, *names: str) -> Sourced[int]:
        """Return the same as a whole number."""
        variable = self.text(*names)
        number = whole_number(variable.value, LARGEST_NUMBER)
        if number is None:
            shown = one_line(variable.value)[:40]
            raise UsageError(f"{variable.origin}={shown}: not a whole number of a likely size")
        return Sourced(number, variable.origin)

    def count(self, *names: str) -> Sourced[int] | None:
        """Return a number of processes; None where there is none: unset, 0, or `auto` and `gpu`."""
        variable = self.find(*names)
        if variable is None or variable.value in ("0", "auto", "gpu"):
            return None
        return self.number(variable.origin)

    def port(self, *names: str, otherwise: Sourced[int] | None = None) -> Sourced[int]:
        """Return a port; by default torchrun's default port."""
        if self.find(*names):
            return self.number(*names)
        return otherwise or Sourced(MASTER_PORT, "by default")
