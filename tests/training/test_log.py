"""What a rank says of its training: datagrams to the launcher, lines to people."""

import json
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from rackrun.run_folder import RunFolder
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.lines import advice_on_waits
from rackrun.training.log import Log
from rackrun.training.ranks import Ranks
from rackrun.training.schedule import Schedule

CPU = torch.device("cpu")
DATA: Any = SimpleNamespace(classes=("cat", "dog"), has_evaluation=True)


def log(rank: int = 0) -> Log:
    config = Config(epochs=5, workers=256)
    schedule = Schedule(config, 80, 64)
    made = Log(config, schedule, Ranks(rank, 2, rank, 2, CPU), DATA)
    made.folder = RunFolder(Path("run"))
    return made


def test_a_report_says_where_a_rank_is(tmp_path, monkeypatch):
    """One JSON object per datagram, with the fields the launcher reads."""
    monkeypatch.setenv("RACKRUN_REPORTS", str(tmp_path / "reports"))
    monkeypatch.setenv("RANK", "1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "reports"))
        launcher.settimeout(30)
        told = log(rank=1)
        told.phase("start")
        assert json.loads(launcher.recv(4096)) == {
            "rank": 1, "phase": "start", "epochs": 5, "steps": 400
        }  # fmt: skip
        told.step(120)
        told.interval(120, Counts(6.1234567, 7, 9, 10), 0.1, 0.0)
        told.train()
        report = json.loads(launcher.recv(4096))
    assert report.pop("images_per_second") > 0
    assert report == {
        "rank": 1, "phase": "train", "epochs": 5, "steps": 400, "epoch": 2, "step": 120,
        "epoch_step": 40, "epoch_steps": 80, "loss": 0.612346, "accuracy": 0.7, "data_share": 0.0,
    }  # fmt: skip


def test_a_run_that_had_no_step_left_ends_with_an_accuracy_of_validation(tmp_path, monkeypatch):
    """It has evaluated nothing itself; without `best`, the launcher prints a training accuracy."""
    monkeypatch.setenv("RACKRUN_REPORTS", str(tmp_path / "reports"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "reports"))
        launcher.settimeout(30)
        log().finish(0.75, "")
        report = json.loads(launcher.recv(4096))
    assert (report["phase"], report["accuracy"], report["best"]) == ("done", 0.75, 0.75)


def test_without_a_launcher_the_first_rank_prints(monkeypatch, capsys):
    """How long ranks waited for data is in each line; above a fifth, what to type, once."""
    monkeypatch.delenv("RACKRUN_REPORTS", raising=False)
    for rank in (0, 1):
        told = log(rank)
        for step in (10, 20, 40):
            told.step(step)
            told.interval(step, Counts(5.0, 7, 9, 10, data_seconds=1e9), 0.1, 0.0)
        told.say(f"from {rank}")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("epoch 1/5  step 10/80  loss 0.5000  accuracy 70.0%  ")
    assert sum("  100% waiting for data  " in line for line in lines) == 3
    assert [line for line in lines if line.startswith("ranks wait for data 100% of the time: ")]
    assert lines[-1] == "from 0" and len(lines) == 5


def test_what_to_type_about_waits_depends_on_what_is_slow():
    """A server without a cache; idle cores; else images that take long to decode."""
    ranks = Ranks(0, 1, 0, 1, CPU)

    def advice(share: float = 0.3, **settings: Any) -> str:
        return advice_on_waits(Config(**settings), ranks, share).partition(": type ")[2]

    assert not advice(0.2)
    assert advice(data="http://gpu01/shards").startswith("--cache FOLDER")
    assert advice(data="http://gpu01/shards", cache="/tmp", workers=256).startswith("convert ")
    assert advice(workers=0).endswith("(now 0)")
