"""bench/gpu.py, as far as a machine without a GPU can run it."""

import re

import pytest
import torch

from bench import gpu
from rackrun.errors import UsageError

TINY = (
    *("--device", "cpu", "--model", "shufflenet_v2_x0_5", "--image-size", "32"),
    *("--batch-size", "2", "--steps", "2", "--rounds", "1"),
)


def test_without_a_gpu_nothing_is_measured(monkeypatch, capsys):
    """It is said, and the command ends well."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu.main([])
    assert capsys.readouterr().out == "no GPU: not measured\n"


def test_rates_are_shares_of_bare_steps(monkeypatch, capsys):
    """Both precisions, compiled and not."""
    monkeypatch.setattr(gpu, "medians", lambda config, settings: (3e3, 4e3))
    gpu.main([*TINY, "--only", "rates"])
    lines = capsys.readouterr().out.splitlines()
    loop = "    3,000 images/s in the loop,     4,000 bare: 0.750"
    assert lines[3:7] == [
        f"bf16 eager    {loop}",
        f"bf16 compiled {loop}",
        f"fp16 eager    {loop}",
        f"fp16 compiled {loop}",
    ]


def test_what_would_take_too_long_is_left_out_by_name(capsys):
    """A lent GPU is given back in time."""
    gpu.main([*TINY, "--minutes", "-1"])
    printed = capsys.readouterr().out
    assert re.findall(r"(\w+): left out", printed) == list(gpu.PARTS)


def test_a_part_that_there_is_not_is_named():
    """With the one that was likely meant, and before anything is measured."""
    with pytest.raises(UsageError, match=r"--only rate: no such part; did you mean rates"):
        gpu.main([*TINY, "--only", "shards", "--only", "rate"])


@pytest.mark.long
def test_steps_on_shards_run_on_a_cpu(capsys):
    """They are measured, on shards that the bench makes."""
    gpu.main([*TINY, "--images", "40", "--only", "shards"])
    printed = capsys.readouterr().out
    for name in ("resampled", "exact epochs"):
        assert re.search(rf"{name} +[\d,]+ images/s, .* workers alone +[\d,]+; steps wait", printed)
