"""Ranks: who they are, what they agree on, and what two of them train."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from rackrun.errors import DataError, UsageError
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.config import Config
from rackrun.training.data.loader import first_batch
from rackrun.training.data.samples import Batch
from rackrun.training.ranks import Ranks
from rackrun.training.run.folder import writes_to
from rackrun.training.world import WorldError, joined
from tests.lab import warm
from tests.lab.hosts import free_port
from tests.lab.ranks import on_ranks
from tests.lab.waiting import until
from tests.training.halves import CONFIG, TASK, Halves, model, ran, weights

ROOT = Path(__file__).parents[2]


@on_ranks(2)
def test_a_signal_to_one_rank_stops_both_at_one_step(tmp_path):
    """The other rank ends after the same step, with the same code; going on gives the same bits.

    On busy cores, requests are read some steps later, but not after the end of the epoch.
    """
    with joined(CONFIG) as ranks:
        calm, stopped = (
            replace(CONFIG, run_folder=str(tmp_path / name)) for name in ("calm", "stopped")
        )
        assert ran(calm, ranks, Halves(ranks)) == 0
        assert ran(stopped, ranks, Halves(ranks, signalled=(1, 8))) == 128 + signal.SIGTERM
        saved = max(RunFolder(tmp_path / "stopped").checkpoint(9).parent.glob("step-*.pt"))
        if ranks.first:
            assert checkpoint.read(saved)["state"]["step"] in range(9, 2 * Halves.epoch_steps + 1)
        went_on = replace(CONFIG, run_folder=str(tmp_path / "went-on"), resume=str(saved))
        assert ran(went_on, ranks, Halves(ranks)) == 0
        if ranks.first:
            expected, result = weights(tmp_path / "calm"), weights(tmp_path / "went-on")
            assert all(torch.equal(expected[name], result[name]) for name in expected)


class Late(Halves):
    """Rank 1 gets its first batch late, and looks around before it takes it."""

    def __init__(self, ranks: Ranks, stepped: Path) -> None:
        super().__init__(ranks)
        self.stepped = stepped

    def training(self, start: int) -> Iterator[Batch]:
        if self.ranks.rank == 1 and start == 0:  # not for an evaluation
            time.sleep(0.5)
            assert not self.stepped.exists(), "rank 0 went ahead"
        yield from super().training(start)


@on_ranks(2)
def test_no_rank_steps_before_all_have_read(tmp_path):
    """Rank 0, which has its batch at once, has not begun a step when rank 1 gets its own."""
    with joined(CONFIG) as ranks:
        stepped = tmp_path / "stepped"

        def noticed(config: Config, classes: int) -> nn.Module:
            made = model(config, classes)
            made.register_forward_pre_hook(lambda *_: stepped.touch())
            return made

        task = replace(TASK, model=noticed)
        late = replace(CONFIG, run_folder=str(tmp_path / "late"))
        assert ran(late, ranks, Late(ranks, stepped), task) == 0
        assert stepped.exists()


@on_ranks(2)
def test_norms_share_their_mean_and_get_their_own_back():
    """Statistics of both ranks count alike; what each one collected can be put back, bit for bit,
    but not from another number of ranks, or from something else."""
    with joined(CONFIG) as ranks:
        norm = nn.BatchNorm2d(2)
        norm(torch.rand(4, 2, 4, 4) * (1 + ranks.rank) + 10 * ranks.rank)
        ours = torch.cat([norm.running_mean, norm.running_var])
        gathered = ranks.gather_statistics(norm)
        assert gathered is not None and torch.equal(gathered[ranks.rank], ours)
        assert (gathered[0] != gathered[1]).all()
        ranks.share_statistics(norm)
        shared = torch.cat([norm.running_mean, norm.running_var])
        assert torch.equal(shared, gathered.double().mean(0).float())
        assert ranks.gather_statistics(norm) is None
        for strange in (None, gathered[:1], gathered[:, 1:], "statistics"):
            ranks.restore_statistics(norm, strange)
            assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), shared)
        ranks.restore_statistics(norm, gathered)
        assert torch.equal(torch.cat([norm.running_mean, norm.running_var]), ours)


@on_ranks(2)
def test_nodes_that_share_a_disk_write_once(tmp_path):
    """Each rank on a node of its own: in one folder the first of them writes, in two both do."""
    with joined(CONFIG) as ranks:
        node = replace(ranks, local_rank=0, local_world=1)
        shared, options = RunFolder(tmp_path / "shared"), RunFolder(tmp_path / f"own-{ranks.rank}")
        assert writes_to(shared, node) == ranks.first
        assert writes_to(options, node)
        assert ranks.all_reduce_max(0) == 0
        assert not [*shared.checkpoints.iterdir(), *options.checkpoints.iterdir()]


def test_a_rank_without_a_first_batch_ends_with_65_and_its_hosts_name():
    """Waiting for data has an end, also where nothing that reads them gives up."""

    def stuck() -> Iterator[int]:
        threading.Event().wait()
        yield 0

    with joined(Config(device="cpu")) as ranks:
        assert first_batch(iter([1, 2, 3]), ranks, 60) == 1
        with pytest.raises(DataError, match=f"^{socket.gethostname()}: the first batch.* 0.1 s"):
            first_batch(stuck(), ranks, 0.1)


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
