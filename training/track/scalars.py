"""The numbers in a line of metrics.jsonl, by the names that they have in every logger."""

from typing import Any

Line = dict[str, Any]

NOT_MEASURED = frozenset({"kind", "step", "epoch", "split", "samples", "time"})
OF_STRAGGLERS = frozenset({"rank", "why", "link_rank"})


def scalars(line: Line) -> dict[str, float]:
    """Return what was measured: {"train/loss": 0.5, ...}."""
    names = line.keys() - NOT_MEASURED - OF_STRAGGLERS
    return {
        f"{line['kind']}/{name}": line[name] for name in sorted(names) if line[name] is not None
    }


def summary(lines: list[Line]) -> dict[str, float]:
    """Return what a run came to: its last and its best accuracy, as far as there were evaluations.

    The names are those of result.json.
    """
    judged = [line["top1"] for line in lines if line["kind"] == "evaluate"]
    return {"accuracy": judged[-1], "best": max(judged)} if judged else {}
