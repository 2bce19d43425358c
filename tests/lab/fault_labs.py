"""Where runs of each kind are started, and campaigns: random faults at random moments."""

import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.lab.fault import Fault, Outcome, play
from tests.lab.faulty_runs import FaultyHosts
from tests.lab.faulty_slurm import Slurm

LABS: dict[str, Any] = {
    **dict.fromkeys(("attached", "detached", "node", "served", "cached"), FaultyHosts),
    "slurm": Slurm,
}


def drawn(rows: Sequence[Fault], seed: int, number: int) -> Fault:
    """Return the fault of a round: the same one for the same rows, seed and number."""
    chance = random.Random(f"{seed}/{number}/fault")
    return chance.choices(rows, [row.weight for row in rows])[0]


def campaign(
    rows: Sequence[Fault], seed: int, numbers: Iterable[int], slow: float
) -> Iterator[tuple[int, Outcome]]:
    """Yield the outcome of each round; those that need the same lab follow one another."""
    faults = {number: drawn(rows, seed, number) for number in numbers}
    for make in dict.fromkeys(LABS.values()):
        of_lab = {n: fault for n, fault in faults.items() if LABS[fault.started_as] is make}
        lab = make() if of_lab else None
        try:
            for number, fault in of_lab.items():
                chance = random.Random(f"{seed}/{number}/moment")
                with TemporaryDirectory(prefix="rackrun-test-", dir="/var/tmp") as folder:
                    yield number, play(fault, lab, Path(folder), slow, chance)
        finally:
            if lab is not None:
                lab.stop()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: fault, rounds, exit codes, longest and promised time, violations."""
    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        grouped[str(outcome.fault)].append(outcome)
    rows = [
        "| fault | rounds | codes | longest s / promised | violations |",
        "|---|--:|---|--:|--:|",
    ]
    for name, group in sorted(grouped.items()):
        codes = " ".join(sorted({str(outcome.code) for outcome in group}))
        longest = max(outcome.seconds for outcome in group)
        bad = sum(bool(outcome.violations) for outcome in group) or ""
        times = f"{longest:.1f} / {group[0].fault.promised_seconds:.0f}"
        rows.append(f"| {name} | {len(group)} | {codes} | {times} | {bad} |")
    return "\n".join(rows)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep `count` cores busy meanwhile."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
