"""ExactSampler in a script of one's own: examples/exact_script.py, as a user starts it."""

from pathlib import Path

import torch

from tests.lab.run import run

SCRIPT = Path(__file__).parents[3] / "examples" / "exact_script.py"


def trained(folder, ranks, epochs):
    folder.mkdir(exist_ok=True)
    ended = run(f"rackrun local --nproc {ranks} -- python {SCRIPT} {epochs}", folder)
    assert ended.code == 0, ended
    return torch.load(folder / "checkpoint.pt")


def test_a_run_goes_on_elsewhere_as_it_would_have(tmp_path):
    """Two epochs on two ranks and one on three end as three on one: 16 steps make an epoch."""
    whole = trained(tmp_path / "whole", 1, 3)
    assert trained(tmp_path / "parts", 2, 2)["step"] == 32
    resumed = trained(tmp_path / "parts", 3, 3)
    assert whole["step"] == resumed["step"] == 48
    for name, weights in whole["model"].items():
        assert torch.allclose(weights, resumed["model"][name], rtol=0, atol=1e-6)
