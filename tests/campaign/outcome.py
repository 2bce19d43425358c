"""The outcome of a round, and the checks that all kinds of runs share."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.campaign.faults import Fault

OURS = ("rackrun-", "torchelastic", "pymp-")
"""How the names in /tmp begin of which nothing may stay."""


@dataclass
class Outcome:
    """The outcome of a round; without violations, every promise was kept."""

    number: int
    fault: Fault
    code: int | None
    seconds: float
    violations: list[str] = field(default_factory=list)
    output: str = ""


def litter(tmp: Path = Path("/tmp")) -> list[str]:
    """Return what lies in a /tmp that should not; the files of locks stay, to be locked again."""
    names = [path.name for path in tmp.iterdir() if path.name.startswith(OURS)]
    ours = (name for name in names if not name.startswith(("rackrun-test", "rackrun-docker")))
    return sorted(name for name in ours if not re.search(r"\.lock(\.gpu\d+)?$", name))


def scratch_folders(runs: Path) -> list[str]:
    """Return the agents' folders that runs have left, where hosts share one /tmp."""
    plans = (json.loads(path.read_text()) for path in runs.glob("2*/plan*.json"))
    named = {host["scratch"] for plan in plans for host in plan["hosts"]}
    return sorted(name for name in named if Path(name).exists())


def partial_checkpoints(runs: Path) -> Iterator[str]:
    """Yield what is under a final name and not whole."""
    for path in runs.glob("2*/step-*"):
        if path.suffix != ".partial" and not json.loads(path.read_text()).get("end"):
            yield f"checkpoint {path.name} is not whole"
    for path in runs.glob("2*/result*.json"):
        json.loads(path.read_text())
    for path in runs.glob("2*/.*"):
        yield f"partial file {path.name}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a Markdown table: fault, rounds, exit codes, worst and promised time, violations."""
    grouped: dict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        grouped[outcome.fault.name].append(outcome)
    rows = [
        "| fault | rounds | exit codes | worst s / promised | violations |",
        "|---|--:|---|--:|--:|",
    ]
    for name, group in sorted(grouped.items()):
        codes = " ".join(sorted({str(outcome.code) for outcome in group}))
        worst = max(outcome.seconds for outcome in group)
        bad = sum(bool(outcome.violations) for outcome in group)
        times = f"{worst:.1f} / {group[0].fault.promised_seconds:.0f}"
        rows.append(f"| {name} | {len(group)} | {codes} | {times} | {bad or ''} |")
    return "\n".join(rows)
