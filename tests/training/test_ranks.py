"""Ranks: who they are, what they agree on, and what two of them train."""

import os
import signal
from pathlib import Path

import pytest
import torch

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.world import WorldError, joined
from tests.lab import warm
from tests.lab.hosts import free_port
from tests.lab.waiting import until

ROOT = Path(__file__).parents[2]


AGREE = """
import os, sys
from datetime import timedelta
from pathlib import Path
from rackrun.training import world
from rackrun.training.config import Config
world.COLLECTIVE_TIMEOUT = timedelta(seconds=2)
with world.joined(Config(device="cpu")) as ranks:
    ready = Path(sys.argv[1]) / f"ready-{ranks.rank}"
    while True:
        ranks.all_reduce_max(0)
        ready.touch()
"""


def test_without_a_launcher_a_rank_gives_up_on_one_that_is_stopped(tmp_path):
    """SIGSTOP for one of two ranks: the other ends once its time for collectives is up."""
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    world |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with (tmp_path / "err").open("w") as err:
        waiting, stopped = (
            warm.Python(
                *("-c", AGREE, tmp_path),
                env={**os.environ, **world, "RANK": str(rank)},
                stderr=err,
            )
            for rank in range(2)
        )
    try:
        until(lambda: len(list(tmp_path.glob("ready-*"))) == 2, "both ranks agree", 60)
        stopped.send_signal(signal.SIGSTOP)
        assert waiting.wait(timeout=1.5 * (2 + 10)) != 0
        assert "Timed out waiting 2000ms" in (tmp_path / "err").read_text()
    finally:
        for rank in (waiting, stopped):
            rank.kill()
            rank.wait()


def test_a_smaller_world_than_promised_trains_nothing(monkeypatch):
    """A host that found no others would train alone and succeed: it ends with 75 instead."""
    monkeypatch.setenv("RACKRUN_WORLD_SIZE", "8")
    with (
        pytest.raises(WorldError, match="8 ranks were planned.* has 1") as caught,
        joined(Config()),
    ):
        pass
    assert caught.value.exit_code == 75


def test_a_rank_without_a_gpu_of_its_own_says_so(monkeypatch):
    """More ranks than GPUs on a host is a usage error, not a crash in CUDA."""
    monkeypatch.setenv("LOCAL_RANK", str(torch.cuda.device_count()))
    with pytest.raises(UsageError, match="type --device cpu"), joined(Config(device="cuda")):
        pass
