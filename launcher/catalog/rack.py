"""`rackrun rack`: all hosts in a table, with who uses and awaits them; hosts taken out of use.

hosts -> a probe on each, asked again and again -> rows (see rack_table) -> the terminal
"""

from __future__ import annotations

import getpass
import json
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from launcher.catalog.rack_table import as_plain, table
from launcher.errors import HostUnreachable
from launcher.output.console import say
from launcher.preflight.facts import HostFacts, remembered_of
from launcher.preflight.replies import believed
from launcher.remote import history, probe
from launcher.run.hosts import Host, hosts_named, named
from launcher.run.incidents import Incident, lines_of
from launcher.run.settings import ReachOptions
from launcher.transport.base import Transport
from launcher.transport.bootstrap import order
from launcher.transport.parallel import each
from launcher.transport.rpc import Reply, RpcClient
from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import Problem, SaveError, UsageError
from rackrun.shapes import Misshapen
from rackrun.tables import show_again_and_again
from rackrun.terminal import one_line

REPLY_SECONDS = 20.0  # nvidia-smi takes seconds on a host with many GPUs
LOOK_SECONDS = 5.0  # between two looks on a terminal


@dataclass(frozen=True)
class RackOptions(ReachOptions):
    """Show all hosts: GPUs, who uses and waits for them, load, disk, health; drain a host.

    On a terminal the table is drawn again every few seconds, until Ctrl-C.
    """

    examples: ClassVar[Examples] = (
        ("{prog} hosts.txt", "the hosts of a file, again and again on a terminal"),
        ("{prog} --plain hosts.txt", "once"),
        ("{prog} --json hosts.txt", "once, as JSON"),
        ('{prog} hosts.txt --drain gpu07 "fan is broken"', "launches leave it out"),
        ("{prog} hosts.txt --undrain gpu07", "launches use it again"),
    )

    hosts: Positional[str] = "hosts.txt"
    """Host file."""
    reason: Positional[str] = ""
    """Why a host is drained, after --drain HOST."""
    host_list: str = ""
    """Hosts instead of a host file (also: -H): gpu01,gpu[02-04]."""
    drain: str = ""
    """Take these hosts out of use: launches skip or refuse them, and name the reason."""
    undrain: str = ""
    """Put these hosts back, and forget what happened to them before."""
    plain: bool = False
    """Print the table once, also on a terminal."""
    json: bool = False
    """Print it as JSON."""

    def __post_init__(self) -> None:
        """Refuse a drain without a reason, and a reason without a drain."""
        if self.drain and self.undrain:
            raise UsageError("--drain and --undrain exclude each other: leave one of them out")
        if self.drain and not self._reason:
            command = f'{called("rack")} HOSTS --drain {self.drain} "fan is broken"'
            raise UsageError(f"--drain {self.drain}: say why; for example: {command}")
        if self._reason and not self.drain:
            raise UsageError(f"{self._reason!r}: a reason is for --drain HOST")

    @property
    def _reason(self) -> str:
        # With -H there is no host file: the first positional argument is the reason.
        return self.reason or (self.hosts if self.host_list and self.hosts != "hosts.txt" else "")

    @property
    def move(self) -> Incident | None:
        """What happens to the hosts that are named; None if nothing does."""
        by = f"{getpass.getuser()}@{socket.gethostname()}"[:64]
        if self.drain:
            return Incident(time.time(), "drained", one_line(self._reason)[:300], by=by)
        return Incident(time.time(), "undrained", by=by) if self.undrain else None


def main(args: Sequence[str]) -> int:
    """Show the table, or take hosts out of use; return the exit code."""
    options = parse(RackOptions, called("rack"), args, renamed={"-H": "--host-list"})
    hosts = hosts_named(Path(options.hosts), options.host_list)
    from launcher.transport.ssh import open_network  # Fabric takes as long to import as --help may

    with (
        closing(open_network(options)) as network,
        closing(Rack(hosts, network.try_each(hosts))) as rack,
    ):
        if move := options.move:
            option = "--drain" if options.drain else "--undrain"
            chosen = named(option, options.drain or options.undrain, hosts)
            return _drain_or_undrain(rack, chosen, move)
        if options.json:
            sys.stdout.write(f"{json.dumps(list(map(as_plain, rack.inspect())), indent=2)}\n")
            return 0
        with suppress(KeyboardInterrupt):
            show_again_and_again(rack.inspect, table, LOOK_SECONDS, options.plain)
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
            HostFacts(host, outcome, history=remembered_of(host.label, ""))
            if isinstance(outcome, Problem)
            else outcome
            for (host, _), outcome in zip(self._pairs, outcomes, strict=True)
        ]

    def _facts(self, pair: HostTransport) -> HostFacts:
        host, _ = pair
        workdir = host.workdir or str(Path.cwd())
        occupancy = self.ask(pair, "occupancy", workdir=workdir, name=host.label)
        gpus = self.ask(pair, "gpus", full=True) if occupancy["gpus"] else {}
        past = remembered_of(host.label, occupancy["history"])
        return HostFacts(host, None, {"occupancy": occupancy, "gpus": gpus}, past)

    def ask(self, pair: HostTransport, question: str, **arguments: object) -> Reply:
        """Return a host's reply; raise Problem if there is none, or not a probe's."""
        host, transport = pair
        if isinstance(transport, Problem):
            raise transport
        try:
            if client := self._clients.get(host.label):
                client.order(question, **arguments)
            else:
                first = order(do=question, **arguments)
                client = RpcClient(transport, probe, host.python or "", first, REPLY_SECONDS)
                self._clients[host.label] = client
            reply = believed(question, client.reply())
        except (Problem, Misshapen) as error:  # the next look starts a new probe
            if broken := self._clients.pop(host.label, None):
                broken.close()
            raise HostUnreachable(f"{host.label}: {one_line(str(error))}") from None
        if "error" in reply:
            raise HostUnreachable(f"{host.label}: {one_line(reply['error'])}")
        return reply

    def tell(self, hosts: Sequence[Host], question: str, **arguments: object) -> list[str]:
        """Give some hosts an order; return why it was not carried out, by host."""
        labels = {host.label for host in hosts}
        pairs = [pair for pair in self._pairs if pair[0].label in labels]

        def order_one(pair: HostTransport) -> Reply:
            name = {"name": pair[0].label} if question == "remember" else {}  # of the history file
            return self.ask(pair, question, **name, **arguments)

        outcomes = each(order_one, pairs, REPLY_SECONDS, _late)
        return [str(outcome) for outcome in outcomes if isinstance(outcome, Problem)]

    def close(self) -> None:
        """End all probes."""
        for client in self._clients.values():
            client.close()


def _late(pair: HostTransport) -> Problem:
    return HostUnreachable(f"{pair[0].label}: does not answer within {REPLY_SECONDS:g} s")


def _drain_or_undrain(rack: Rack, hosts: Sequence[Host], move: Incident) -> int:
    # Recorded in the history here, in that on each host, and there in a note for other accounts.
    line = lines_of([move])
    for host in hosts:
        try:
            history.append(host.label, line)
        except OSError as error:
            raise SaveError(f"{history.path_of(host.label)}: {error.strerror}") from None
    for problem in rack.tell(hosts, "remember", lines=line):
        say(f"{problem}; only launches from this machine know of it")
    for problem in rack.tell(hosts, "note", text=move.text, at=move.at):
        say(f"{problem}; launches of other accounts do not know of it")
    names = ", ".join(host.label for host in hosts)
    is_out = move.kind == "drained"
    say(f"{names}: drained: {move.text}" if is_out else f"{names}: in use again")
    return 0
