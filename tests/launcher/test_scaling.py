"""`--scaling`: runs for every count of hosts, a table, a curve, and a forecast if there is one."""

import json
import re
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launcher import launch
from launcher.commands import local
from launcher.commands.parse import hoisted
from launcher.commands.settings import SshOptions
from launcher.run.job import Command, TaskWork
from launcher.scaling.model import GIGABITS, Curve, Point, ring_bits
from launcher.scaling.sweep import counts_of, shown, sweep
from rackrun.errors import UsageError
from tests.launcher.lab import ROOT, Lab

TINY = (
    "imagenet", "--synthetic", "--model", "shufflenet_v2_x0_5", "--image-size", "32",
    "--batch-size", "4", "--epochs", "1", "--steps-per-epoch", "2", "--device", "cpu",
    "--no-tensorboard",
)  # fmt: skip


def measured(hosts: int, step: float, exchange: float, sending: float, noise: float = 0.0) -> Point:
    """Return a measurement on hosts of 4 ranks, with three windows that differ by this share."""
    times = (1 - noise, 1.0, 1 + noise)
    local = 0.08
    return Point(
        hosts, 4 * hosts, 64,
        steps=tuple(step * share for share in times),
        forward=(0.02,) * 3,
        local=tuple(local * share for share in times),
        together=tuple((local + exchange) * share for share in times),
        sending=tuple(sending * share for share in times),
        sent_bytes=100_000_000 if sending else 0,
    )  # fmt: skip


ALONE = measured(1, 0.1, exchange=0.0, sending=0.0)
FOUR = measured(4, 0.11, exchange=0.01, sending=0.04)
CURVE = Curve((ALONE, FOUR))


def test_two_real_hosts_are_swept_and_the_curve_is_drawn(lab: Callable[[int], Lab]) -> None:
    """`./run-ssh hosts.txt imagenet --synthetic --scaling 1,2`: runs, a table, a plot."""
    one = lab(2)
    hosts = one.write_hosts(f"python={one.cheap_python(trains=True)} workdir={ROOT}")
    code, out, err = one.said(str(hosts), *TINY, "--scaling", "1,2")
    assert code == 0, err
    (folder,) = (one.folder / "runs").glob("*-imagenet-scaling")
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("2*/result.json"))]
    assert [len(result["hosts"]) for result in results] == [1, 2, 1]
    content = json.loads((folder / "scaling.json").read_text())
    alone, together = content["points"]
    assert (alone["hosts"], together["hosts"]) == (1, 2)
    assert (len(alone["steps"]), len(together["steps"])) == (6, 3)
    assert alone["sending"] == [0] * 6 and min(together["sending"]) > 0
    assert together["sent_bytes"] == 4 * 1_366_792  # the parameters of ShuffleNet V2 x0.5
    if content["predicted"]:  # the noise of this machine decides
        assert content["predicted"]["1"]["64"][1] < content["predicted"]["400"]["64"][1]
        assert "predicted efficiency by the network's Gbit/s" in out
    else:
        assert f"no forecast: {content['no_forecast']}" in out
    picture = (folder / "scaling.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and struct.unpack(">II", picture[16:24]) == (1375, 506)
    assert out.splitlines()[-1] == f"curve: {folder / 'scaling.png'}"


def test_a_prediction_follows_from_the_stated_model() -> None:
    """What hides is taken from the largest run; more than backward cannot hide."""
    assert FOUR.hidden == pytest.approx((0.75,) * 3)
    assert FOUR.gigabits == pytest.approx(8 * 0.1 * 2 * 15 / 16 / 0.04)
    exchange = ring_bits(FOUR.sent_bytes, 32) / 25e9  # 0.062 s, of which a quarter shows
    assert CURVE.predicted(8, 25) == pytest.approx((0.1 / (0.1 + exchange / 4),) * 3)
    exchange = ring_bits(FOUR.sent_bytes, 32) / 1e9  # 1.55 s: only backward's 0.06 s can hide it
    assert CURVE.predicted(8, 1) == pytest.approx((0.1 / (0.1 + exchange - 0.06),) * 3)
    assert CURVE.predicted(1, 1) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("noise", [0.0, 0.005, 0.02, 0.3])
@pytest.mark.parametrize("own", [0.0, 0.03])
def test_a_prediction_keeps_to_its_bounds(noise: float, own: float) -> None:
    """Efficiency falls with hosts, rises with bandwidth, and stays between 0 and 1."""
    first = measured(1, 0.1, exchange=own, sending=own, noise=noise)
    curve = Curve((first, measured(4, 0.11, exchange=0.01, sending=0.04, noise=noise)))
    for end in range(3):
        for hosts in curve.hosts:
            by_speed = [curve.predicted(hosts, gigabits)[end] for gigabits in GIGABITS]
            assert by_speed == sorted(by_speed) and by_speed[0] > 0 and by_speed[-1] <= 1
        for gigabits in (1, 100):
            by_hosts = [curve.predicted(hosts, gigabits)[end] for hosts in curve.hosts]
            assert by_hosts == sorted(by_hosts, reverse=True)
    for hosts in curve.hosts:
        assert list(found := curve.predicted(hosts, 25)) == sorted(found)


def test_the_model_predicts_the_run_that_it_was_taken_from() -> None:
    """On the network that was measured, the largest run has the efficiency that it had."""
    assert CURVE.predicted(4, FOUR.gigabits) == pytest.approx(CURVE.efficiency(FOUR))


NO_SPREAD = "no forecast: the windows leave efficiencies open by up to"


@pytest.mark.parametrize(
    ("steps", "noise", "cell", "forecast"),
    [
        ((0.1, 0.11), 0.0, "91%", True),
        ((0.1, 0.11), 0.005, "90-92%", True),
        ((0.1, 0.102), 0.02, "within the noise", True),
        ((0.1, 0.0813), 0.15, "within the noise", False),  # 123 % on average
        ((0.1, 0.0813), 0.005, "over 100%?", True),
    ],
)
def test_a_number_is_no_better_than_its_windows(
    steps: tuple[float, float], noise: float, cell: str, forecast: bool
) -> None:
    """Sizes within the noise have no efficiency; from noise nothing is forecast."""
    curve = Curve(
        (
            measured(1, steps[0], exchange=0.0, sending=0.0, noise=noise),
            measured(4, steps[1], exchange=0.01, sending=0.04, noise=noise),
        )
    )
    text = shown(curve)
    assert f"  {cell}  " in text.splitlines()[2]
    assert ("predicted efficiency" in text, NO_SPREAD not in text) == (forecast, forecast)
    assert ("no effect of more hosts" in text) == (cell == "over 100%?")
    assert not re.search(r"(?<!\d)(10[1-9]|1[1-9]\d)(\.\d)?%", text.replace("over", ""))


def test_an_exchange_hidden_by_noise_is_no_free_exchange() -> None:
    """Windows in which steps with an exchange were the faster ones do not forecast 100 %."""
    lucky = replace(FOUR, local=(0.08, 0.09, 0.1), together=(0.078, 0.088, 0.098))
    assert (lucky.exchange.low, lucky.exchange.middle) == (0, 0)
    assert lucky.exchange.high == pytest.approx(0.018)
    assert Curve((ALONE, lucky)).predicted(4, 25).low < 0.9
    assert "  < 18.0 ms  " in shown(Curve((ALONE, lucky)))


def test_two_runs_of_a_size_count_together() -> None:
    """The smallest size runs twice: a machine that grew slower meanwhile shows in its spread."""
    both = ALONE.plus(measured(1, 0.13, exchange=0.0, sending=0.0))
    assert both.step == pytest.approx((0.1, 0.115, 0.13))
    assert Curve((both, FOUR)).efficiency(FOUR).high > 1


def test_without_a_measured_exchange_nothing_is_predicted() -> None:
    """One rank alone, or gradients in another form: the table says why there is no forecast."""
    for points in ((ALONE,), (ALONE, replace(FOUR, sent_bytes=0, sending=(0.0,) * 3))):
        assert shown(Curve(points)).splitlines()[-1].startswith("no forecast: it needs two ranks")


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
