"""Which hosts, or GPUs of hosts, a launch takes if it has a choice. Pure functions.

facts of all hosts -> offers -> hosts that are fit first, whole hosts before parts of them
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rackrun.launcher.preflight.checks import DRAINED, LOCK
from rackrun.launcher.preflight.examine import TableRow
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts
from rackrun.launcher.preflight.gpus import USED_MIB, troubles
from rackrun.launcher.preflight.replies import Gpu, Gpus
from rackrun.launcher.run.hosts import Host
from rackrun.units import plural

GPU_CHECKS = (LOCK, "gpus", "gpu health")
"""Checks of a host that do not matter if only some of its GPUs are taken."""


@dataclass(frozen=True)
class Pick:
    """The hosts that a launch takes, or why it cannot."""

    hosts: tuple[Host, ...] = ()
    missing: str = ""
    """What there is too little of; empty if there is enough."""
    cannot_succeed: bool = False
    """There would be too little even if all hosts were free."""


@dataclass(frozen=True)
class Need:
    """What a launch asks for: a number of hosts or of GPUs, or all hosts but for some spares."""

    hosts: int
    gpus: int
    spares: int
    model: str = ""
    """A part of the name that each GPU must have, in any case."""
    memory: int = 0
    """GB that each GPU must have."""

    @property
    def wants_all(self) -> bool:
        """Return whether it asks for the hosts of its list; only which are spares is its choice."""
        return not (self.hosts or self.gpus)

    def pick(self, cluster: ClusterFacts, rows: Sequence[TableRow]) -> Pick:
        """Return what to take of the hosts as they are now."""
        listed = [facts.host for facts in cluster.hosts]
        if self.wants_all:
            left = without_drained(listed, rows)
            return Pick(tuple(left if len(left) >= len(listed) - self.spares else listed))
        offered = offers(cluster, rows, self)
        if self.gpus:
            picked, needed = pick_gpus(offered, self.gpus), plural(self.gpus, "GPU")
            needed += f" {self.model}" * bool(self.model)
            needed += f" with {self.memory} GB" * bool(self.memory)
            free = sum(len(offer.free) for offer in offered)
            cannot_succeed = sum(offer.fit for offer in offered) < self.gpus
        else:
            count = self.hosts + self.spares
            picked, needed = pick_hosts(offered, count), plural(count, "host")
            free, cannot_succeed = sum(offer.is_free for offer in offered), len(offered) < count
        if picked is None:
            missing = f"{needed} needed, {free} free and fit"
            if self.model or self.memory or (self.gpus and not free):
                missing += f"; there are {described_gpus(cluster)}"
            return Pick((), missing, cannot_succeed)
        return Pick(tuple(picked))

    def accepts(self, gpu: Gpu) -> bool:
        """Return whether the model and memory of a GPU will do."""
        return self.model.lower() in gpu.name.lower() and self.memory <= gigabytes(gpu)


@dataclass(frozen=True)
class HostOffer:
    """What a host has for this launch."""

    host: Host
    is_free: bool
    """No run has a part of the host, and no launch before ours waits for it."""
    gpus: int
    free: tuple[int, ...]
    """GPUs that are fit, and not in use."""
    fit: int
    """GPUs that are fit, by number."""

    @property
    def is_whole(self) -> bool:
        """Return whether all of its GPUs can be had."""
        return 0 < self.gpus == len(self.free)

    def part(self, count: int) -> Host:
        """Return the host with this number of its GPUs, whole if these are all."""
        devices = None if count == self.gpus else self.free[:count]
        return replace(self.host, devices=devices, slots=count)


def described_gpus(cluster: ClusterFacts) -> str:
    """Return number, model and memory of all GPUs, such as `8 NVIDIA A100-SXM4-40GB of 42 GB`."""
    answered = [facts for facts in cluster.hosts if facts.error is None]
    gpus = [gpu for facts in answered for gpu in facts[Gpus].gpus]
    kinds = Counter(f"{gpu.name} of {gigabytes(gpu)} GB" for gpu in gpus)
    return " and ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "none"


def gigabytes(gpu: Gpu) -> int:
    """Return its memory, rounded down: drivers show a little more than the number in its name."""
    return gpu.total * 2**20 // 10**9


def offers(cluster: ClusterFacts, rows: Sequence[TableRow], need: Need) -> list[HostOffer]:
    """Return what the hosts have that pass the checks, in their order."""
    unfit = {
        row.host
        for row in rows
        if row.level == "refused" and not row.busy and not (need.gpus and row.check in GPU_CHECKS)
    }
    busy = {row.host for row in rows if row.busy}
    return [
        _offer(facts, facts.host.label not in busy, need)
        for facts in cluster.hosts
        if facts.error is None and facts.host.label not in unfit
    ]


def _offer(facts: HostFacts, is_free: bool, need: Need) -> HostOffer:
    host, gpus = facts.host, facts.basics.gpus
    described = facts[Gpus].gpus
    unfit = {n for n, gpu in enumerate(described) if troubles(gpu) or not need.accepts(gpu)}
    used = {number for number, gpu in enumerate(described) if gpu.used > USED_MIB}
    named = range(gpus) if host.devices is None else host.devices
    fit = [number for number in named if number not in unfit]
    taken = used.union(facts.basics.taken)
    free = tuple(number for number in fit if number not in taken)
    most = gpus if host.slots is None else host.slots
    return HostOffer(host, is_free, gpus, free[:most], min(len(fit), most))


def pick_hosts(offered: Sequence[HostOffer], count: int) -> list[Host] | None:
    """Return the first hosts that are free; None if they are too few."""
    free = [offer.host for offer in offered if offer.is_free]
    return free[:count] if len(free) >= count else None


def pick_gpus(offered: Sequence[HostOffer], count: int) -> list[Host] | None:
    """Return hosts with this number of free GPUs together; None if there are fewer.

    Whole hosts come first, large ones before small ones; what is left to take comes from the host
    with the fewest free GPUs that suffice, so that few hosts take part and others stay whole.
    """
    picked: dict[str, Host] = {}
    left = count
    for offer in sorted(offered, key=lambda o: -len(o.free)):
        if offer.is_whole and len(offer.free) <= left:
            picked[offer.host.label] = offer.part(len(offer.free))
            left -= len(offer.free)
    others = [offer for offer in offered if offer.free and offer.host.label not in picked]
    while left and others:
        enough = [offer for offer in others if len(offer.free) >= left]
        offer = min(enough or others, key=lambda o: len(o.free) if enough else -len(o.free))
        others.remove(offer)
        part = min(left, len(offer.free))
        picked[offer.host.label] = offer.part(part)
        left -= part
    if left:
        return None
    return [picked[offer.host.label] for offer in offered if offer.host.label in picked]


def without_drained(hosts: Sequence[Host], rows: Sequence[TableRow]) -> list[Host]:
    """Return hosts without those that are out of use."""
    drained = {row.host for row in rows if row.check == DRAINED and row.level == "refused"}
    return [host for host in hosts if host.label not in drained]
