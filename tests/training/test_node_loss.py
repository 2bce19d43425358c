"""A host or a rank is lost in the middle of an epoch: the run goes on, epochs stay exact."""

import signal
import time
from pathlib import Path
from typing import Any

import torch

from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training.checkpoint import steps_in
from tests.lab.oracles import exact_epochs
from tests.lab.ranks import codes, exact_ranks
from tests.lab.waiting import until

SECONDS = 240


def weights(run: RunFolder) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = checkpoint.read(run.final)["model"]
    return result


SMALL = {"global_batch": 12, "batch_size": 6, "save_steps": 2, "keep_checkpoints": 99}


def two_ranks(data: Path, run: Path, misdeed: str = "", **options: Any) -> list[int]:
    """Train on two ranks; return their exit codes. One that stops itself is killed at the end."""
    ranks = exact_ranks(data, [run, run], misdeed=misdeed, **{**SMALL, **options})
    if misdeed == STOPPED:
        first, stopped = ranks
        until(lambda: state_of(stopped.pid) == "T", "a rank stops itself", SECONDS)
        time.sleep(2)  # the other one is in the exchange by now
        first.terminate()  # as the launcher would, which has missed the heartbeats of its host
        first.communicate(timeout=SECONDS)
        stopped.kill()
    return codes(ranks)


def state_of(pid: int) -> str:
    """Return the state of a process, as /proc has it; T: stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


KILLED = f"1,4,{int(signal.SIGKILL)}"
WRITER_KILLED = f"0,4,{int(signal.SIGKILL)}"
STOPPED = f"1,4,{int(signal.SIGSTOP)}"


def test_survivors_of_a_lost_rank_keep_the_last_whole_step(make_shards, tmp_path):
    """A rank is killed in step 4, of which the other has run its forward pass: it saves step 3,
    long before a save is due, with the weights of two ranks to which nothing happened. A restart
    passes a spoiled copy over, goes on there, and ends with their weights; every epoch is exact."""
    data = make_shards(train=(20, 20, 12), val=(8, 5))  # norms of one image use their statistics
    calm, first, second = (RunFolder(tmp_path / name) for name in ("calm", "first", "second"))
    assert two_ranks(data, calm.path, save_steps=1, norm=True) == [0, 0]
    assert two_ranks(data, first.path, KILLED, norm=True) == [70, -9]
    saved = steps_in(first.checkpoints)
    assert [path.stem for path in saved] == ["step-00000002", "step-00000003"]
    kept, whole = (checkpoint.read(run.checkpoint(3))["state"] for run in (first, calm))
    assert same_weights(kept["model"], whole["model"])
    mean = "layers.1.running_mean"  # of one rank, which has seen the images of the lost step, too
    assert torch.allclose(kept["model"][mean], whole["model"][mean], atol=0.1)
    spoiled = bytearray(saved[1].read_bytes())
    spoiled[len(spoiled) // 2] ^= 1
    first.checkpoint(4).write_bytes(spoiled)
    assert two_ranks(data, second.path, earlier_attempts=first.path, norm=True) == [0, 0]
    assert same_weights(weights(second), weights(calm))
    assert exact_epochs(first.path, second.path) == [[2], [2]]


def test_another_rank_saves_if_the_one_that_writes_to_their_disk_is_lost(make_shards, tmp_path):
    data, run = make_shards(train=(20, 20, 12), val=(8, 5)), RunFolder(tmp_path / "run")
    assert two_ranks(data, run.path, WRITER_KILLED, save_steps=0) == [-9, 70]
    assert [path.stem for path in steps_in(run.checkpoints)] == ["step-00000003"]


def test_a_rank_that_waits_for_a_stopped_one_saves_the_last_whole_step(make_shards, tmp_path):
    """Its main thread is in an exchange that does not end, and takes no signal: a thread saves
    step 3, with the weights of two ranks to which nothing happened."""
    data = make_shards(train=(20, 20, 10), val=(8, 5))
    calm, first, second = (RunFolder(tmp_path / name) for name in ("calm", "first", "second"))
    assert two_ranks(data, calm.path, save_steps=1) == [0, 0]
    assert two_ranks(data, first.path, STOPPED, save_steps=0) == [143, -9]
    assert [path.stem for path in steps_in(first.checkpoints)] == ["step-00000003"]
    kept, whole = (checkpoint.read(run.checkpoint(3))["state"] for run in (first, calm))
    assert same_weights(kept["model"], whole["model"])
    assert two_ranks(data, second.path, earlier_attempts=first.path) == [0, 0]
    assert same_weights(weights(second), weights(calm))
    assert exact_epochs(first.path, second.path) == [[2], [2]]


def same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    """Return whether all but the statistics of batch norms are equal."""
    names = [name for name in theirs if "running" not in name and "tracked" not in name]
    return all(torch.equal(ours[name], theirs[name]) for name in names)
