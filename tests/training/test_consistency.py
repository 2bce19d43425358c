"""Ranks that do not belong together train nothing: real processes that meet on one port."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.lab import warm

ROOT = Path(__file__).parents[2]
PACKAGES = ("rackrun", "training", "shards", "catdog", "imagenet", "mnist")
MEET = """
import os
from rackrun.training.config import Config
from rackrun.training.world import joined
from rackrun.training.entry import enter

def main(args):
    with joined(Config(device="cpu", lr=float(os.environ.get("LR", "0.1")))):
        print("trains")

enter(main)
"""


def met(second: dict[str, str], code: Path) -> list[tuple[int, str]]:
    """Run two ranks, the second as given; return exit codes and messages."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ours = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ours |= {"RACKRUN_WORLD_SIZE": "2", "RACKRUN_RUN_ID": "one", "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        warm.Python(
            *("-c", MEET),
            env={**os.environ, **ours, **more, "RANK": str(rank), "PYTHONPATH": str(where)},
            cwd=where,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank, (more, where) in enumerate((({}, ROOT), (second, code)))
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    return [(rank.returncode, args) for rank, args in zip(ranks, outputs, strict=True)]


def test_a_rank_with_another_option_ends_them_all():
    """A typing error in --lr on one host, started by torchrun alone: 78 on every rank."""
    ended = met({"LR": "0.5"}, ROOT)
    assert [code for code, _ in ended] == [78, 78], ended
    assert all("the settings of rank 1 are not those of rank 0" in said for _, said in ended)


def test_ranks_of_one_run_and_one_code_train(tmp_path):
    """The same code in another folder, as on another host, is the same code."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    for code, message in met({}, tmp_path):
        assert (code, message.splitlines()[-1]) == (0, "trains"), message


@pytest.mark.parametrize("what", ["run", "training", "imagenet"])
def test_a_stranger_among_the_ranks_ends_them_all(tmp_path, what):
    """A rank of another run: 75 on every rank; other code, of a task, too: 78; both named."""
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, symlinks=True)
    if what != "run":
        with (tmp_path / what / "model.py").open("a") as file:
            file.write("# yesterday's\n")
    ended = met({"RACKRUN_RUN_ID": "other"} if what == "run" else {}, tmp_path)
    assert [code for code, _ in ended] == [75 if what == "run" else 78] * 2
    says = "belongs to another run" if what == "run" else "the code of rank 1 is not that"
    assert all(says in message for _, message in ended)
