"""Gradients in fewer bytes still train the model, and the ranks stay alike."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

from training.config import Config
from training.exchange import shorten

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[float, float]]:
    """By way of exchange, from two real ranks with equal weights: loss, distance to float32."""
    script = str(Path(__file__).with_name("exchange_ranks.py"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", script],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.count(" ") == 2]
    return {name: (float(loss), float(apart)) for name, loss, apart in rows}


def test_bfloat16_gradients_train_nearly_the_same_weights(
    results: dict[str, tuple[float, float]],
) -> None:
    """The sums lose digits, not the way."""
    assert 0 < results["bfloat16"][1] < 0.05
    assert results["bfloat16"][0] == pytest.approx(results["float32"][0], rel=0.1)


def test_powersgd_learns_from_matrices_of_low_rank(
    results: dict[str, tuple[float, float]],
) -> None:
    """Far fewer bytes lead to other weights, and to a loss that falls as well."""
    assert results["powersgd"][1] > results["bfloat16"][1]
    assert results["powersgd"][0] < 1.5 * results["float32"][0] < 0.8  # it begins at 1.6


def test_one_process_exchanges_nothing() -> None:
    """Without other ranks the setting changes nothing."""
    model = nn.Linear(2, 2)
    shorten(model, Config(gradients="powersgd"), 10, 0)
    assert not hasattr(model, "_comm_hooks")
