"""Stragglers: what the times of all ranks show, and what two real ranks report."""

import json
import socket

import numpy as np
import pytest

from rackrun.training.monitor.stragglers import straggler_in
from tests.training.torchrun import output_of


def times(ranks: int, steps: int = 100) -> np.ndarray:
    """Return times of ranks that are alike: 2 ms of data, 30 of compute, 3 of network, noise."""
    noise = np.random.default_rng(0).uniform(0, 2e-4, (ranks, steps, 3))
    return np.array([0.002, 0.030, 0.003]) + noise


def late(times: np.ndarray, rank: int, part: int, seconds: float, every: int = 1) -> None:
    """Let a rank take longer in a part of every n-th step; the others wait in the exchange."""
    times[rank, ::every, part] += seconds
    times[np.arange(len(times)) != rank, ::every, 2] += seconds


@pytest.mark.parametrize(("part", "why"), [(0, "data"), (1, "compute")])
def test_a_rank_that_is_always_late_is_named_with_the_reason(part, why):
    """Seven ranks wait 12 ms a step for the eighth; what it takes stands beside the others'."""
    observed = times(8)
    late(observed, 5, part, 0.012)
    result = straggler_in(observed)
    assert (result.rank, result.why) == (5, why)
    assert result.waited == pytest.approx(0.012, abs=1e-3)
    assert result.rank_seconds - result.others_seconds == pytest.approx(0.012, abs=1e-3)
    assert result.network == pytest.approx(0.003, abs=1e-3)
    assert "the others wait for rank 5 " in result.text() and f"its {why} takes" in result.text()


def test_a_rank_that_is_late_now_and_then_is_found_among_others():
    """Means over steps hide one that stalls for half a second in every fiftieth step; this not."""
    observed = times(4)
    late(observed, 2, 0, 0.5, every=50)
    late(observed, 1, 1, 0.002, every=3)
    result = straggler_in(observed)
    assert (result.rank, result.why) == (2, "data")
    assert result.waited == pytest.approx(0.01, rel=0.1)


def test_a_slow_network_names_no_rank():
    """Where all ranks wait, none is named."""
    observed = times(4)
    observed[:, :, 2] += 0.05
    result = straggler_in(observed)
    assert result.text().startswith("last 100 steps: network-bound: ")
    assert "rank" not in result.text()


def test_ranks_that_keep_step_are_no_news():
    """Nothing is said where nothing is to be won."""
    assert straggler_in(times(4)).text() == ""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, object]]]:
    """Return the lines about stragglers of two real ranks, by the phase in which rank 1 sleeps."""
    folder = tmp_path_factory.mktemp("waits")
    args = output_of("straggler_ranks.py", folder)
    reports = {}
    for path in folder.glob("*/metrics.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        reports[path.parent.name] = [line for line in lines if line["kind"] == "waits"]
    return {**reports, "said": [{"text": args}]}


@pytest.mark.parametrize("why", ["data", "compute"])
def test_the_rank_that_sleeps_is_found(why, lines):
    """Two real ranks, of which one sleeps in its data or in its forward: both reports say so."""
    assert len(lines[why]) == 2
    for line in lines[why]:
        assert (line["rank"], line["why"]) == (1, why)
        assert float(str(line["waited"])) > 0.3
    assert f"wait for rank 1 on {socket.gethostname()} " in str(lines["said"])
    assert f"its {why} takes" in str(lines["said"])


def test_stragglers_are_only_searched_on_request(lines):
    """--straggler-steps 0 writes nothing."""
    assert lines["off"] == []
