"""How what a file has recorded differs from what is expected, as phrases for messages."""

from collections.abc import Mapping

from rackrun.terminal import clean


def table_differences(
    expected: Mapping[str, object], actual: Mapping[str, object], most: int = 6
) -> list[str]:
    """Return the differences of two tables, a phrase each; of more than `most`, count the rest."""
    lines = [
        f"{short(name)} is {short(actual.get(name, 'missing'))} there and"
        f" {short(expected.get(name, 'missing'))} here"
        for name in {**expected, **actual}
        if expected.get(name) != actual.get(name)
    ]
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def short(value: object) -> str:
    """Return a recorded value as it may stand in a message."""
    return clean(str(value))[:200]
