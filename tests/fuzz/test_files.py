"""File transfer ends with a value or a Problem for any bytes."""

import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import targets_files as targets
from tests.fuzz.targets_files import answer


def mutated(place: int, other: bytes) -> bytes:
    """Return a grid of predictions as numpy writes it, with other bytes somewhere."""
    place %= len(GRID)
    return GRID[:place] + other + GRID[place + len(other) :]


def grid() -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
        labels=np.array([0, 1]),
        predicted=np.array([0, 1]),
        probability=np.array([0.5, 1.0], np.float32),
        keys=["a", "b"],
        classes=["cat", "dog"],
    )
    return buffer.getvalue()


GRID = grid()
NAMES = st.sampled_from(["a", "a/b", "", ".", "..", "../x", "/etc/x", "plan.json", "logs/a", "\0"])
WORDS = st.sampled_from(
    [
        "files",
        "size",
        "error",
        "root",
        "paths",
        "surplus",
        "line",
        "code",
        "odd",
        "path",
        "mode",
        "link",
    ]
)
NUMBERS = st.integers() | st.floats() | st.sampled_from([0, 1, 2**53, 2**63, 10**300])
LEAVES = st.none() | st.booleans() | NUMBERS | st.text() | NAMES
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS | NAMES, inner, max_size=4),
    max_leaves=12,
)
OFFERS = st.builds(lambda files: {"files": files}, st.dictionaries(NAMES, NUMBERS, max_size=3))
WANTS = st.builds(
    lambda paths, surplus: {"root": "/x", "paths": paths, "surplus": surplus},
    st.lists(NAMES, max_size=3),
    NUMBERS,
)
HEADERS = st.builds(
    lambda path, size, mode, link: {"path": path, "size": size, "mode": mode, "link": link},
    *(NAMES, st.integers(0, 9), st.integers(0, 0o7777), st.booleans()),
)
LINES = st.builds(lambda value: json.dumps(value).encode() + b"\n", HEADERS | VALUES)
ANSWERS = st.builds(answer, OFFERS | WANTS | VALUES)
TALKS = st.lists(ANSWERS | st.binary(max_size=20), max_size=5).map(b"".join)
STREAMS = st.lists(LINES | st.binary(max_size=20), max_size=5).map(b"".join)
LISTS = st.builds(lambda value: json.dumps(value).encode(), st.lists(NAMES) | VALUES) | st.binary()
PLANS = LISTS | st.builds(lambda text: json.dumps({"run_id": text}).encode(), st.text())
REPORTS = STREAMS | st.builds(mutated, st.integers(0, 2**20), st.binary(min_size=1, max_size=3))


@pytest.mark.parametrize(
    ("target", "inputs"),
    [
        (targets.fuzz_results, TALKS),
        (targets.fuzz_differences, TALKS),
        (targets.fuzz_brought, LISTS),
        (targets.fuzz_stream, STREAMS),
        (targets.fuzz_plan, PLANS),
        (targets.fuzz_report, REPORTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_any_bytes_give_a_value_or_a_problem(target, inputs):
    """No other exception, nothing outside of the folders, nothing that a terminal would obey."""

    @settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(inputs)
    def check(data: bytes) -> None:
        target(data)

    check()
