"""Validate reports of ranks: only known fields, of the right type and size.

A rank may send anything. Invalid fields are left out, and harm neither the host nor the run. The
data that are kept are bounded, however often a rank reports. Ranks report several times a second,
so each field has a quick test instead of a shape (see `rackrun.shapes`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rackrun.launcher.remote.agent.frames import REPORT_BYTES

_LARGEST = 2**53


def valid_fields(data: bytes) -> dict[str, object] | None:
    """Return the valid fields of a report; None if it is not a report."""
    if len(data) > REPORT_BYTES:
        return None
    try:
        report = _JSON.decode(data.decode())
    except (ValueError, RecursionError):
        return None
    return fitting_fields(report) if isinstance(report, dict) else None


def fitting_fields(report: Mapping[str, object]) -> dict[str, object]:
    """Return the fields that are known and valid."""
    return {
        name: report[name] for name, fits in FIELDS.items() if name in report and fits(report[name])
    }


# NaN and Infinity become None, so that such a loss counts as unknown.
_JSON = json.JSONDecoder(parse_constant=lambda text: None)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


def _is_number(value: object) -> bool:
    return type(value) is float and math.isfinite(value) or _is_count(value)


def _is_measure(value: object) -> bool:
    return value is None or _is_number(value)


def _is_text(value: object) -> bool:
    return type(value) is str and len(value) <= 4096


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and _is_number(value) and 0 <= value < _LARGEST


def _is_share(value: object) -> bool:
    return isinstance(value, int | float) and 0 <= value <= 1


FIELDS: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("phase", "slow_why", "slow", "final", "report", "dataset"), _is_text),
    **dict.fromkeys(("epoch", "epochs", "step", "steps", "epoch_step", "epoch_steps"), _is_count),
    **dict.fromkeys(("checkpoint",), _is_count),
    **dict.fromkeys(("loss", "accuracy", "best", "images_per_second"), _is_measure),
    "slow_rank": lambda value: type(value) is int and -1 <= value <= _LARGEST,  # -1: none
    **dict.fromkeys(("share", "data_share"), _is_share),
    **dict.fromkeys(("data_seconds", "compute_seconds"), _is_seconds),
}
"""The fields that the dashboard, the hang detector and the result use, and the test of each."""
