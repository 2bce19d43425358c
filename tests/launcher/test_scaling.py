"""`--scaling`: a run for every count of hosts, a table, a curve, and a forecast."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import launch
from launcher.commands import local
from launcher.commands.ssh_settings import SshOptions
from launcher.run.job import Command, TaskWork
from launcher.scaling.model import Curve, Point, ring_bits
from launcher.scaling.sweep import counts_of, hoisted, shown, sweep
from rackrun.errors import UsageError
from tests.launcher.lab import ROOT, Lab

TINY = (
    "imagenet", "--synthetic", "--model", "resnet18", "--image-size", "32", "--batch-size", "4",
    "--epochs", "1", "--steps-per-epoch", "2", "--device", "cpu", "--no-tensorboard",
)  # fmt: skip

ALONE = Point(1, 4, 64, step=0.1, backward=0.06, exchange=0.0, sending=0.0, sent_bytes=0)
FOUR = Point(
    4, 16, 64, step=0.11, backward=0.06, exchange=0.01, sending=0.04, sent_bytes=100_000_000
)
CURVE = Curve((ALONE, FOUR))


def test_two_real_hosts_are_swept_and_the_curve_is_drawn(lab: Callable[[int], Lab]) -> None:
    """`./run-ssh hosts.txt imagenet --synthetic --scaling 1,2`: two runs, a table, a picture."""
    one = lab(2)
    hosts = one.write_hosts(f"python={one.cheap_python()} workdir={ROOT}")
    code, out, err = one.said(str(hosts), *TINY, "--scaling", "1,2")
    assert code == 0, err
    (folder,) = (one.folder / "runs").glob("*-imagenet-scaling")
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("2*/result.json"))]
    assert [len(result["hosts"]) for result in results] == [1, 2]
    content = json.loads((folder / "scaling.json").read_text())
    alone, together = content["points"]
    assert (alone["hosts"], together["hosts"]) == (1, 2)
    assert alone["sending"] == 0 < together["sending"]
    assert together["sent_bytes"] == 4 * 11_689_512  # ResNet-18's parameters
    assert content["predicted"]["1"]["64"] < content["predicted"]["400"]["64"]
    assert "predicted efficiency by the network's Gbit/s" in out
    picture = (folder / "scaling.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) == (1375, 506)
    assert out.splitlines()[-1] == f"curve: {folder / 'scaling.png'}"


def test_a_prediction_follows_from_the_stated_model() -> None:
    """What hides is taken from the largest run; more than backward cannot hide."""
    assert FOUR.hidden == pytest.approx(0.75)
    assert FOUR.gigabits == pytest.approx(8 * 0.1 * 2 * 15 / 16 / 0.04)
    exchange = ring_bits(FOUR.sent_bytes, 32) / 25e9  # 0.062 s, of which a quarter shows
    assert CURVE.predicted(8, 25) == pytest.approx(0.1 / (0.1 + exchange / 4))
    exchange = ring_bits(FOUR.sent_bytes, 32) / 1e9  # 1.55 s: only backward's 0.06 s can hide it
    assert CURVE.predicted(8, 1) == pytest.approx(0.1 / (0.1 + exchange - 0.06))
    assert CURVE.predicted(1, 1) == 1.0


def test_faster_networks_and_fewer_hosts_are_never_predicted_to_be_worse() -> None:
    """Efficiency falls with hosts, rises with bandwidth, and stays between 0 and 1."""
    for hosts in CURVE.hosts:
        by_speed = [CURVE.predicted(hosts, gigabits) for gigabits in (1, 10, 25, 100, 400)]
        assert by_speed == sorted(by_speed) and by_speed[0] > 0 and by_speed[-1] <= 1
    for gigabits in (1, 100):
        by_hosts = [CURVE.predicted(hosts, gigabits) for hosts in CURVE.hosts]
        assert by_hosts == sorted(by_hosts, reverse=True)


def test_the_model_predicts_the_run_that_it_was_taken_from() -> None:
    """On the network that was measured, the largest run has the efficiency that it had."""
    assert CURVE.predicted(4, FOUR.gigabits) == pytest.approx(CURVE.efficiency(FOUR))


def test_without_a_measured_exchange_nothing_is_predicted() -> None:
    """One rank alone, or gradients in another form: the table says why there is no forecast."""
    for points in ((ALONE,), (ALONE, replace(FOUR, sent_bytes=0, sending=0.0))):
        assert shown(Curve(points)).splitlines()[-1].startswith("no prediction: it needs two ranks")


def test_the_option_is_found_behind_the_task() -> None:
    """`imagenet --synthetic --scaling 1,2` is the launcher's; behind `--` it is the user's own."""
    assert hoisted(["h"], ["imagenet", "--scaling", "1,2", "--synthetic"]) == (
        ["h", "--scaling", "1,2"],
        ["imagenet", "--synthetic"],
    )
    assert hoisted([], ["imagenet", "--scaling=1"]) == (["--scaling=1"], ["imagenet"])
    assert hoisted([], ["--", "x", "--scaling", "1"]) == ([], ["--", "x", "--scaling", "1"])


@pytest.mark.parametrize("text", ["", "0,1", "1,x", "-1", "1,,2"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    """The message shows what a list of counts looks like."""
    with pytest.raises(UsageError, match="as in 1,2,4,8"):
        counts_of(text, 8)


def test_both_ways_to_launch_know_the_option() -> None:
    """./run-local sweeps processes; there, too, a bad list is refused before anything starts."""
    with pytest.raises(UsageError, match="as in 1,2,4,8"):
        local.main(["imagenet", "--synthetic", "--scaling", "0"])
    with pytest.raises(UsageError, match="--synthetic"):
        local.main(["--scaling", "1,2", "imagenet", "--data", "shards"])


def test_what_cannot_be_swept_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """More hosts than there are, a task with data, a command, a call from Python."""
    assert counts_of("4, 2,2", 4) == [2, 4]
    with pytest.raises(UsageError, match="there are only 4 hosts"):
        counts_of("8", 4)
    options = SshOptions(scaling="1", runs=tmp_path / "runs")
    for work in (TaskWork("imagenet", ("--data", "x")), Command(("true",))):
        with pytest.raises(UsageError, match="--synthetic"):
            sweep(work, options.scaling, 4, options.jobs, lambda count, own: pytest.fail("started"))
    with pytest.raises(UsageError, match="launch once for every count"):
        launch("imagenet", "--synthetic", scaling="1,2")
    assert not (tmp_path / "runs").exists()
