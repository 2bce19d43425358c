"""Gradients in fewer bytes still train the model, and the ranks stay alike."""

import pytest
from torch import nn

from rackrun.training.config import Config
from rackrun.training.sync.gradient_sync import register_comm_hook
from tests.training.torchrun import output_of


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[float, float]]:
    """Return loss and distance to float32 by kind of exchange, from two real ranks."""
    rows = [
        line.split()
        for line in output_of("comm_hooks_ranks.py").splitlines()
        if line.count(" ") == 2
    ]
    return {name: (float(loss), float(apart)) for name, loss, apart in rows}


def test_bfloat16_gradients_train_nearly_the_same_weights(results):
    """The sums lose digits, not the way."""
    assert 0 < results["bfloat16"][1] < 0.05
    assert results["bfloat16"][0] == pytest.approx(results["float32"][0], rel=0.1)
    assert results["float32"][0] < 0.6  # it begins at 1.6


def test_one_process_exchanges_nothing():
    """Without other ranks the setting changes nothing."""
    model = nn.Linear(2, 2)
    register_comm_hook(model, Config(grad_compression="bfloat16"))
    assert not hasattr(model, "_comm_hooks")
