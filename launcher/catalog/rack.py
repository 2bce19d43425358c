"""`rackrun rack`: all hosts in a table, with who uses them and who waits for them.

hosts -> a probe on each, asked again and again -> rows (see rack_table) -> the terminal
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from rackrun.commandline.options import Examples, Positional, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import Problem
from rackrun.launcher.catalog.rack_table import as_plain, table
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.preflight.facts import HostFacts
from rackrun.launcher.preflight.replies import Gpus, Occupancy, R, checked_reply
from rackrun.launcher.run.hosts import Host, hosts_named
from rackrun.launcher.run.settings import ReachOptions
from rackrun.launcher.transport.base import Transport
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.machine import typed_folder
from rackrun.tables import show_again_and_again
from rackrun.terminal import one_line

REPLY_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs
LOOK_SECONDS = 5.0  # between two looks on a terminal


@dataclass(frozen=True)
class RackOptions(ReachOptions):
    """Show all hosts: GPUs, who uses them and waits for them, load, disk, health.

    On a terminal, the table is updated every few seconds until Ctrl-C.
    """

    examples: ClassVar[Examples] = (
        ("{prog} hosts.txt", "the hosts of a file; updated on a terminal"),
        ("{prog} --plain hosts.txt", "once"),
        ("{prog} --json hosts.txt", "once, as JSON"),
    )

    hosts: Positional[str] = "hosts.txt"
    """Host file."""
    host_list: Annotated[str, Values("HOSTS")] = ""
    """Hosts instead of a host file (also: -H): gpu01,gpu[02-04]."""
    plain: bool = False
    """Print the table once, also on a terminal."""
    json: bool = False
    """Print the result as JSON."""


def main(args: Sequence[str]) -> int:
    """Show the table; return the exit code."""
    return rack(parse(RackOptions, called("rack"), args, renamed={"-H": "--host-list"}))


def rack(options: RackOptions) -> int:
    """Show the hosts of the options; return the exit code."""
    hosts = hosts_named(Path(options.hosts), options.host_list)
    from rackrun.launcher.transport.ssh import (
        open_network,  # Fabric takes as long to import as --help may
    )

    with (
        closing(open_network(options)) as network,
        closing(Rack(hosts, network.try_each(hosts))) as probes,
    ):
        if options.json:
            sys.stdout.write(f"{json.dumps(list(map(as_plain, probes.inspect())), indent=2)}\n")
            return 0
        with suppress(KeyboardInterrupt):
            show_again_and_again(probes.inspect, table, LOOK_SECONDS, options.plain)
    return 0


HostTransport = tuple[Host, Transport | Problem]
"""A host, and its transport or why it cannot be reached."""


class Rack:
    """Hosts, each with a probe that stays to be asked again."""

    def __init__(self, hosts: Sequence[Host], transports: Sequence[Transport | Problem]) -> None:
        self._pairs = list(zip(hosts, transports, strict=True))
        self._clients: dict[str, RpcClient] = {}

    def inspect(self) -> list[HostFacts]:
        """Return what the hosts are like now; of one that does not answer, why."""
        outcomes = each(self._facts, self._pairs, REPLY_SECONDS, _late)
        return [
            HostFacts(host, outcome) if isinstance(outcome, Problem) else outcome
            for (host, _), outcome in zip(self._pairs, outcomes, strict=True)
        ]

    def _facts(self, pair: HostTransport) -> HostFacts:
        host, _ = pair
        workdir = host.workdir or str(typed_folder())
        occupancy = self.ask(pair, Occupancy, workdir=workdir)
        gpus = self.ask(pair, Gpus) if occupancy.gpus else Gpus()
        return HostFacts(host, None, {Occupancy: occupancy, Gpus: gpus})

    def ask(self, pair: HostTransport, shape: type[R], **arguments: object) -> R:
        """Return a host's reply; raise Problem if there is none, or not a probe's."""
        host, transport = pair
        if isinstance(transport, Problem):
            raise transport
        try:
            if host.label not in self._clients:
                client = RpcClient(transport, host.python or "", REPLY_SECONDS)
                self._clients[host.label] = client
            reply = self._clients[host.label].call(shape.order_name, **arguments)
            checked = checked_reply(reply, shape, host.label)
        except Problem as error:  # the next look starts a new probe
            if broken := self._clients.pop(host.label, None):
                broken.close()
            raise HostUnreachable(one_line(str(error))) from None
        if checked.error:
            raise HostUnreachable(f"{host.label}: {one_line(checked.error)}")
        return checked

    def close(self) -> None:
        """End all probes."""
        for client in self._clients.values():
            client.close()


def _late(pair: HostTransport) -> Problem:
    return HostUnreachable(f"{pair[0].label}: does not answer within {REPLY_SECONDS:g} s")
