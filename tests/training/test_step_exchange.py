"""All ranks follow a request after the same step, whichever rank has it."""

from dataclasses import replace

import pytest
import torch

from rackrun.training.config import Config
from rackrun.training.step_exchange import StepExchange
from rackrun.training.stop_requests import SAVE
from rackrun.training.world import joined
from tests.lab.ranks import on_ranks


@pytest.mark.parametrize(("device", "followed"), [("cpu", 3), ("cuda", 5)])
@on_ranks(2)
def test_both_ranks_follow_the_request_of_one(device, followed):
    """In its own step on a CPU; on a GPU, whose host runs ahead, it waits for the exchange under
    way, and that is read a step later. Numbers that travel with it reach all."""
    with joined(Config(device="cpu")) as ranks:
        own = replace(ranks, device=torch.device(device))
        step, steps = 0, {}
        exchange = StepExchange(
            own,
            lambda: SAVE if ranks.rank == 1 and step >= 3 else 0,
            lambda: [ranks.rank + step, 7],
        )
        for step in range(8):
            exchange.begin()
            exchange.complete()
            steps[step] = exchange.request, exchange.largest
        first = min(step for step, (request, _) in steps.items() if request)
        assert first == followed
        assert steps[first][1] == [1 + (first if device == "cpu" else first - 1), 7]
