"""Stragglers: what the times of all ranks show, and what two real ranks report."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
from torch import nn

from rackrun.training.config import Config
from rackrun.training.data.samples import Batch
from rackrun.training.stragglers import straggler_in
from rackrun.training.world import joined
from tests.lab.ranks import on_ranks
from tests.training.halves import TASK, Halves, model, ran


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


SECONDS = 0.08
"""Rank 1 sleeps for so long in each step."""


class TwentyOne(Halves):
    epoch_steps = 21


class SlowData(TwentyOne):
    def training(self, start: int) -> Iterator[Batch]:
        for batch in super().training(start):
            time.sleep(SECONDS * self.ranks.rank)
            yield batch


class Slow(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images):
        time.sleep(SECONDS * int(os.environ["RANK"]))
        return self.model(images)


SLOW = replace(TASK, model=lambda *args: Slow(model(*args)))


@pytest.mark.parametrize("why", ["data", "compute"])
@on_ranks(2)
def test_the_rank_that_sleeps_is_found(why, tmp_path):
    """Rank 1 sleeps in its data or its forward: metrics and output say so."""
    config = Config(epochs=1, lr=0.01, log_every_steps=1, tensorboard=False, device="cpu")
    config = replace(config, run_folder=str(tmp_path))
    with joined(config) as ranks, redirect_stdout(StringIO()) as out, redirect_stderr(out):
        data = (SlowData if why == "data" else TwentyOne)(ranks)
        assert ran(config, ranks, data, SLOW if why == "compute" else TASK) == 0
        if not ranks.first:
            return
        metrics = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        lines = [line for line in metrics if line["kind"] == "waits"]
        assert len(lines) == 1
        for line in lines:
            assert (line["rank"], line["why"]) == (1, why) and line["waited"] > 0.3
            assert f"wait for rank 1 on {socket.gethostname()} " in out.getvalue()
            assert f"its {why} takes" in out.getvalue()
