"""`--scaling`: a run for every count of hosts, and a table of their throughput."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from launcher import launch
from launcher.commands import local
from launcher.run.job import Command, JobTemplate, TaskWork
from launcher.search.scaling import Speed, counts_of, measure_scaling, shown
from rackrun.errors import UsageError
from tests.launcher.lab import ROOT, Lab

TINY = (
    "imagenet", "--synthetic", "--model", "shufflenet_v2_x0_5", "--image-size", "32",
    "--batch-size", "4", "--epochs", "1", "--steps-per-epoch", "2", "--device", "cpu",
    "--no-tensorboard",
)  # fmt: skip


def test_two_real_hosts_are_measured_and_the_first_one_twice(
    start_lab: Callable[[int], Lab],
) -> None:
    """The table has a row per count; the range of the first covers the windows of both its runs."""
    lab = start_lab(2)
    hosts = lab.write_hosts(f"python={lab.cheap_python(trains=True)} workdir={ROOT}")
    code, out, err = lab.result_of(str(hosts), "--scaling", "1,2", *TINY)
    assert code == 0, err
    (folder,) = (lab.folder / "runs").glob("*-imagenet-scaling")
    hosts_of_runs = [path.name.rpartition("-")[2] for path in sorted(folder.glob("2*"))]
    assert hosts_of_runs == ["1", "2", "1"]
    head, one_host, together, runs = out.splitlines()[-4:]
    assert head.split() == ["hosts", "ranks", "images/s", "range", "efficiency"]
    assert re.fullmatch(r" *1 +1 +[\d,.]+ +[\d,.]+-[\d,.]+ +100%", one_host)
    assert re.fullmatch(r" *2 +2 +[\d,.]+ +[\d,.]+-[\d,.]+ +\d+-\d+%", together)
    assert runs == f"runs: {folder}"


def test_an_efficiency_is_no_narrower_than_its_windows() -> None:
    """At worst: the slowest window of the larger run against the fastest of the smallest one."""
    one, four = Speed(8, 64, (0.10, 0.11, 0.09)), Speed(32, 64, (0.12, 0.11, 0.13))
    *_, first, last = shown({1: one, 4: four}).splitlines()
    assert first.split() == ["1", "8", "5,120.0", "4,654.5-5,688.9", "100%"]
    assert last.split() == ["4", "32", "17,066.7", "15,753.8-18,618.2", "69-100%"]


@pytest.mark.parametrize("text", ["", "0,1", "1,x", "-1", "1,,2"])
def test_counts_that_are_none_are_refused(text: str) -> None:
    """The message shows what a list of counts looks like."""
    with pytest.raises(UsageError, match="as in 1,2,4,8"):
        counts_of(text, 8)


def test_both_ways_to_launch_know_the_option() -> None:
    """./run-local measures processes; there, too, a bad list is refused before anything starts."""
    with pytest.raises(UsageError, match="as in 1,2,4,8"):
        local.main(["--scaling", "0", "imagenet", "--synthetic"])
    with pytest.raises(UsageError, match="--synthetic"):
        local.main(["--scaling", "1,2", "imagenet", "--data", "shards"])


def test_what_cannot_be_measured_is_refused_before_anything_starts(tmp_path: Path) -> None:
    """More hosts than there are, a task with data, a command, a call from Python."""
    assert counts_of("4, 2,2", 4) == [2, 4]
    with pytest.raises(UsageError, match="there are only 4 hosts"):
        counts_of("8", 4)
    jobs = JobTemplate(runs=tmp_path / "runs")
    for work in (TaskWork("imagenet", ("--data", "x")), Command(("true",))):
        with pytest.raises(UsageError, match="--synthetic"):
            measure_scaling(work, [1], jobs, lambda count, ours: pytest.fail("started"))
    with pytest.raises(UsageError, match="launch once for every count"):
        launch("imagenet", "--synthetic", scaling="1,2")
    assert not (tmp_path / "runs").exists()
