"""Ranks: who they are, what they agree on, and what two of them train."""

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rackrun.errors import DataError, UsageError
from rackrun.launcher.run.job import Limits
from rackrun.launcher.supervision import hangs
from rackrun.training.config import Config
from rackrun.training.data.loader import first_batch
from rackrun.training.world import COLLECTIVE_TIMEOUT, WorldError, joined
from tests.lab import warm
from tests.lab.hosts import free_port
from tests.lab.waiting import until
from tests.training.torchrun import output_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Run two real ranks under torchrun and gloo; return their output."""
    return output_of("two_ranks.py", tmp_path_factory.mktemp("two"))


def test_ranks_agree(held):
    """Maxima, sums, bytes and buffers are the same on all ranks after an exchange."""
    assert "holds: ranks_agree" in held


def test_norms_share_their_mean_and_get_their_own_back(held):
    """Batch norms of two ranks meet in the mean, and part again as they were."""
    assert "holds: norms_share_their_mean_and_get_their_own_back" in held


def test_nodes_that_share_a_disk_write_once(held):
    """One rank writes to each disk, however many nodes see it, and no mark is left there."""
    assert "holds: nodes_that_share_a_disk_write_once" in held


def test_no_rank_steps_before_all_have_read(held):
    """A rank whose first batch is late holds up the first step of the others."""
    assert "holds: no_rank_steps_before_all_have_read" in held


def test_no_step_waits_for_requests(held):
    """Requests to stop travel while ranks compute."""
    assert "holds: no_step_waits_for_requests" in held


def test_gradients_lie_in_the_buckets_that_travel(held):
    """DDP exchanges gradients where they are."""
    assert "holds: gradients_lie_in_the_buckets_that_travel" in held


def test_a_rank_without_a_first_batch_ends_with_65_and_its_hosts_name():
    """Waiting for data has an end, also where nothing that reads them gives up."""

    def stuck() -> Iterator[int]:
        threading.Event().wait()
        yield 0

    with joined(Config(device="cpu")) as ranks:
        assert first_batch(iter([1, 2, 3]), ranks, 60) == 1
        with pytest.raises(DataError, match=f"^{socket.gethostname()}: the first batch.* 0.1 s"):
            first_batch(stuck(), ranks, 0.1)


def test_two_ranks_train_like_one(held):
    """The same global batches give the same weights: nothing is divided by the world twice."""
    assert "holds: two_ranks_train_like_one" in held


def test_a_signal_to_one_rank_stops_both_at_one_step(held):
    """All ranks save and end after the same step, with 143, and going on loses no bit."""
    assert "holds: a_signal_to_one_rank_stops_both_at_one_step" in held


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


SHARE = """
import os, sys
from dataclasses import replace
from rackrun.shards.open import open_source
from rackrun.training.config import Config
from rackrun.training.data.pool import share_index
from rackrun.training.world import joined
nodes = [(0, 1), (0, 2), (1, 2)]
with joined(Config(device="cpu")) as ranks:
    local_rank, local_world = nodes[ranks.rank]
    source = open_source(sys.argv[1])
    share_index(source, "train", replace(ranks, local_rank=local_rank, local_world=local_world))
    index = source.index("train")
    memory = source.lend_index("train")[2:]
    for its in ranks.all_gather(index["label"]):
        assert (its == index["label"]).all()
    print(ranks.rank, *memory, flush=True)
    ranks.all_reduce_max(0)  # a lender stays until all have borrowed
"""


def test_the_ranks_of_a_host_have_one_index_whatever_the_slots(make_shards):
    """Of hosts with slots=1 and slots=2, the second one's ranks map the same memory."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    args = ("-c", SHARE, make_shards(train=(20, 10), val=(8, 5)))
    job = warm.ranks(3, *args, env=env, stdout=subprocess.PIPE)
    printed = [rank.communicate()[0].split()[-3:] for rank in job]
    assert [rank.returncode for rank in job] == [0, 0, 0]
    memory = {int(rank): tuple(where) for rank, *where in printed}
    assert memory[1] == memory[2] != memory[0]


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


def test_a_collective_may_take_longer_than_a_launcher_lets_a_rank_save():
    """One that saves slowly is the launcher's business, not a failure of those who wait for it."""
    limit = hangs.PHASE_HANG_FACTORS["save"] * Limits().hang_seconds
    assert COLLECTIVE_TIMEOUT.total_seconds() > limit


def test_one_process_is_a_world_of_its_own(monkeypatch):
    """Without torchrun there is one rank, and no group that anything could wait for."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RACKRUN_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with joined(Config(device="cpu")) as ranks:
        assert (ranks.rank, ranks.world, ranks.first) == (0, 1, True)
        assert ranks.all_reduce_max(3) == 3
        assert ranks.broadcast_bytes(b"x") == b"x"
        assert ranks.all_reduce_sum(torch.tensor([2])).tolist() == [2]
    assert not torch.distributed.is_initialized()


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
