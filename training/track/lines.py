"""The lines of metrics.jsonl as loggers take them: their numbers, and what a run came to."""

from collections.abc import Mapping
from typing import Any

Line = dict[str, Any]

NOT_MEASURED = frozenset({"kind", "step", "epoch", "split", "samples", "images", "time"})
OF_STRAGGLERS = frozenset({"rank", "why"})


def scalars(line: Line) -> dict[str, float]:
    """Return what was measured: {"train/loss": 0.5, ...}."""
    names = line.keys() - NOT_MEASURED - OF_STRAGGLERS
    return {
        f"{line['kind']}/{name}": line[name] for name in sorted(names) if line[name] is not None
    }


def summary(lines: list[Line], before: Mapping[str, float]) -> dict[str, float]:
    """Return the last and the best accuracy of a run after these lines; {} before an evaluation.

    `before` is the summary of the lines before them. The names are those of result.json.
    """
    accuracies = [line["top1"] for line in lines if line["kind"] == "evaluate"]
    if not accuracies:
        return dict(before)
    return {
        "accuracy": accuracies[-1],
        "best": max([*accuracies, before.get("best", accuracies[0])]),
    }
