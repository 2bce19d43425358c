"""The rows of the rack: what is known of each host, for people and for programs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import msgspec

from rackrun import tables
from rackrun.launcher.preflight.facts import HostFacts
from rackrun.launcher.preflight.gpus import USED_MIB, gpu_model, suspects, troubles
from rackrun.launcher.preflight.replies import Gpu, Gpus, Occupancy
from rackrun.launcher.run.host_names import grouped, ranges, said_once
from rackrun.runs import name_of
from rackrun.terminal import one_line
from rackrun.units import age, gibibytes, plural

HEAD = ("", "host", "gpus", "free", "used by", "queue", "load", "°C", "disk")
WRAPPED = ("gpus", "used by", "queue")
NUMBERS = ("load", "°C", "disk")
DRAINED, DOUBTFUL = "X", "!"


def table(rack: Sequence[HostFacts], on_screen: bool = False) -> str:
    """Return the table for people: a row for each host, what is wrong, and what there is in all.

    `on_screen`: the other way round, as a screen shows only so much.
    """
    now = time.time()
    health = {facts.host.label: one_line("; ".join(_health(facts))) for facts in rack}
    rows = [_row(facts, health[facts.host.label], now) for facts in rack]
    troubles = said_once((host, text) for host, text in health.items() if text)
    parts = (
        tables.table(HEAD, rows, WRAPPED, NUMBERS),
        f"{troubles}\n" if troubles else "",
        f"{_summary(rack)}\n",
    )
    return "\n".join(filter(None, reversed(parts) if on_screen else parts))


def _row(facts: HostFacts, health: str, now: float) -> tuple[str, ...]:
    is_out = facts.error is not None or facts[Occupancy].drained
    mark = DRAINED if is_out else DOUBTFUL if health else ""
    if facts.error is not None:
        return (mark, facts.host.label, *[""] * 7)
    state = facts[Occupancy]
    hottest = max((gpu.temperature for gpu in facts[Gpus].gpus), default=0)
    cells = (
        facts.host.label,
        f"{state.gpus} {gpu_model(facts)}".strip() if state.gpus else "-",
        _free_in_words(facts),
        "; ".join([*_users(state, now), *_foreign(facts)]),
        ", ".join(f"{user} {age(now - since)}" for since, user in _queue([facts])),
        f"{state.load:.1f}/{state.cores}",
        str(hottest or ""),
        gibibytes(state.disk_free),
    )
    return (mark, *map(one_line, cells))


def free_gpus(facts: HostFacts) -> list[int]:
    """Return the GPUs that a run could have now: not drained, not used, not sick."""
    state = facts[Occupancy]
    locked = {use.part for use in state.uses}
    unfit = {n for n, gpu in _gpus(facts) if gpu.used > USED_MIB or troubles(gpu)}
    is_out = "" in locked or state.drained
    numbers = [] if is_out else range(state.gpus)
    return [number for number in numbers if f".gpu{number}" not in locked and number not in unfit]


def _free_in_words(facts: HostFacts) -> str:
    state = facts[Occupancy]
    if not state.gpus:
        return "no" if state.uses or state.drained else "yes"
    free = free_gpus(facts)
    return "all" if len(free) == state.gpus else f"{len(free)}: {ranges(free)}" if free else "no"


def _gpus(facts: HostFacts) -> list[tuple[int, Gpu]]:
    return list(enumerate(facts[Gpus].gpus))


def _users(state: Occupancy, now: float) -> Iterator[str]:
    holder_of = attrgetter("user", "run", "name", "since")
    for _, group in groupby(sorted(state.uses, key=holder_of), key=holder_of):
        uses = list(group)
        use = uses[0]
        run = name_of(use.name) if use.run else "starts"
        numbers = [int(one.part.removeprefix(".gpu")) for one in uses if one.part]
        part = f"GPU {ranges(sorted(numbers))}: " if numbers else ""
        yield f"{part}{use.user or '?'}, {run}, {age(now - use.since)}"


def _foreign(facts: HostFacts) -> Iterator[str]:
    # GPUs that no run has locked, with more memory in use than an idle one has
    locked = {use.part for use in facts[Occupancy].uses}
    busy = [
        number
        for number, gpu in _gpus(facts)
        if gpu.used > USED_MIB and not {"", f".gpu{number}"} & locked
    ]
    if busy:
        yield f"GPU {ranges(busy)}: a program outside rackrun"


def _queue(rack: Sequence[HostFacts]) -> list[tuple[float, str]]:
    # time and user of each waiting launch; one with tickets on several hosts counts once
    tickets = [ticket for facts in rack for ticket in facts[Occupancy].queue]
    return sorted({(ticket.since, ticket.user) for ticket in tickets})


def _health(facts: HostFacts) -> Iterator[str]:
    if facts.error is not None:
        yield str(facts.error).removeprefix(f"{facts.host.label}: ")
        return
    state = facts[Occupancy]
    if state.drained:
        yield f"drained: {state.drained}"
    yield from filter(None, (suspects(facts[Gpus]), state.lock_problem))


def _summary(rack: Sequence[HostFacts]) -> str:
    answered = [facts for facts in rack if facts.error is None]
    drained = [facts.host.label for facts in answered if facts[Occupancy].drained]
    gpus = sum(facts[Occupancy].gpus for facts in answered)
    free = sum(len(free_gpus(facts)) for facts in answered)
    queue = _queue(answered)
    silent = [facts.host.label for facts in rack if facts.error is not None]
    parts = [
        plural(len(rack), "host"),
        *([f"{free} of {gpus} GPUs free"] if gpus else []),
        *([f"{plural(len(queue), 'launch', 'launches')} in the queue"] if queue else []),
        *([f"drained: {grouped(drained)}"] if drained else []),
        *([f"no answer: {grouped(silent)}"] if silent else []),
    ]
    return one_line(", ".join(parts))


def as_plain(facts: HostFacts) -> dict[str, Any]:
    """Return what is known of a host as `--json` has it."""
    common = {
        "host": facts.host.label,
        "error": None if facts.error is None else str(facts.error),
    }
    if facts.error is not None:
        return common
    return {
        **msgspec.to_builtins(facts[Occupancy]),
        **common,
        "free": free_gpus(facts),
        "gpu_details": msgspec.to_builtins(facts[Gpus].gpus),
    }
