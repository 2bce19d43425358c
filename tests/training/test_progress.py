"""What a rank says: datagrams to the launcher, lines to people, and never a wait."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rackrun.training.config import Config
from rackrun.training.ranks import Ranks
from rackrun.training.run.progress import ProgressReporter
from rackrun.training.schedule import make_schedule
from rackrun.units import duration


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Yield the launcher's end of the reports."""
    path = tmp_path / "reports"
    monkeypatch.setenv("RACKRUN_REPORTS", str(path))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(path))
        receiver.settimeout(30)
        yield receiver


def progress(rank: int = 0) -> ProgressReporter:
    schedule = make_schedule(Config(epochs=5), 80, 64)
    return ProgressReporter(Ranks(rank, 2, rank, 2, torch.device("cpu")), schedule, epochs=5)


def test_a_report_says_where_a_rank_is(launcher, monkeypatch):
    """One JSON object per datagram, with the fields the launcher reads."""
    monkeypatch.setenv("RANK", "1")
    voice = progress(rank=1)
    voice.phase("start")
    assert json.loads(launcher.recv(4096)) == {
        "rank": 1, "phase": "start", "epochs": 5, "steps": 400
    }  # fmt: skip
    voice.phase("train")
    launcher.recv(4096)
    voice._reporter._next = 0.0  # the moment since the last report has passed
    voice.measured(0.61234567, 0.71, 812.04, 30)
    voice.step(120)
    report = json.loads(launcher.recv(4096))
    assert report == {
        "rank": 1, "phase": "train", "epochs": 5, "steps": 400, "epoch": 2, "step": 120,
        "epoch_step": 40, "epoch_steps": 80, "loss": 0.612346, "accuracy": 0.71,
        "images_per_second": 812.0,
    }  # fmt: skip
    voice = progress()
    voice.measured(2.0, None, 812.0, 30)
    voice.phase("train")
    assert "accuracy" not in json.loads(launcher.recv(4096)), "noise has none"


def test_steps_are_reported_now_and_then_and_phases_at_once(launcher):
    """A thousand fast steps are a handful of reports; a change of phase is never held back."""
    voice = progress()
    voice.phase("train")
    for step in range(1, 1000):
        voice.step(step % 400 + 1)
    voice.phase("done", accuracy=0.9)
    reports = []
    while not reports or reports[-1]["phase"] != "done":
        reports.append(json.loads(launcher.recv(4096)))
    assert reports[-1]["accuracy"] == 0.9
    assert len(reports) < 100


def test_a_launcher_that_does_not_read_or_is_gone_costs_nothing(launcher):
    """Reports are dropped when the socket is full, and when no launcher is there."""
    voice = progress()
    for _ in range(5000):
        voice.phase("train")
    launcher.close()
    voice.phase("done")


def test_without_a_launcher_rank_0_speaks(monkeypatch, capsys):
    """Plain lines where the output is no terminal, and from one rank only."""
    monkeypatch.delenv("RACKRUN_REPORTS", raising=False)
    for rank in (0, 1):
        voice = progress(rank)
        voice.step(120)
        voice.measured(0.5, 0.75, 1234.5, 75)
        voice.line(f"from {rank}")
    assert capsys.readouterr().out.splitlines() == [
        "epoch 2/5  step 40/80  loss 0.5000  accuracy 75.0%  1,234 images/s  1:15 left",
        "from 0",
    ]


def test_durations_are_read_at_a_glance():
    """Minutes and seconds, hours where there are some."""
    assert [duration(seconds) for seconds in (4.4, 75, 3601)] == ["0:04", "1:15", "1:00:01"]
