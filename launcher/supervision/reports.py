"""What is believed of a rank's reports: known fields, each of its type and size, and no others.

Any rank may send anything, so a field that does not fit is left out, and harms neither its host
nor the run. What is kept is bounded however often a rank reports. Ranks report several times a
second, so each field has one quick test rather than a shape (see `rackrun.shapes`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping

from launcher.remote.agent import REPORT_BYTES

LARGEST = 2**53


def believed(data: bytes) -> dict[str, object]:
    """Return the fields of a report that fit; none when it is no report."""
    if len(data) > REPORT_BYTES:
        return {}
    try:
        said = JSON.decode(data.decode())
    except (ValueError, RecursionError):
        return {}
    return fitting(said) if isinstance(said, dict) else {}


def fitting(said: Mapping[str, object]) -> dict[str, object]:
    """Return those of some fields that are known and fit."""
    return {name: said[name] for name, fits in FIELDS.items() if name in said and fits(said[name])}


def no_number(word: str) -> None:
    """Return nothing in place of NaN and Infinity: a loss that is no number is not known."""


JSON = json.JSONDecoder(parse_constant=no_number)


def is_count(value: object) -> bool:
    """Whether it is a whole number of steps or the like."""
    return type(value) is int and 0 <= value <= LARGEST


def is_number(value: object) -> bool:
    """Whether it is a finite number."""
    return type(value) is float and math.isfinite(value) or is_count(value)


def is_measure(value: object) -> bool:
    """Whether it is a measured number, or says that there is none."""
    return value is None or is_number(value)


def is_text(value: object) -> bool:
    """Whether it is text of a path's length."""
    return type(value) is str and len(value) <= 4096


def is_speed(value: object) -> bool:
    """Whether it is a table of measured parts of a step."""
    return (
        isinstance(value, dict)
        and len(value) <= 32
        and all(
            is_number(item)
            or (isinstance(item, list) and len(item) <= 8 and all(map(is_number, item)))
            for item in value.values()
        )
    )


def is_rank(value: object) -> bool:
    """Whether it is a rank's number, or -1 for nobody."""
    return type(value) is int and -1 <= value <= LARGEST


FIELDS: Mapping[str, Callable[[object], bool]] = {
    **dict.fromkeys(("phase", "slow_why", "slow", "final", "report"), is_text),
    **dict.fromkeys(("epoch", "epochs", "step", "steps", "epoch_step", "epoch_steps"), is_count),
    **dict.fromkeys(("loss", "accuracy", "images_per_second"), is_measure),
    "slow_rank": is_rank,
    "speed": is_speed,
}
"""What the board, the watch for hangs and the result use, and how each must be."""
