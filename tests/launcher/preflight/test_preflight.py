"""What is looked at before a run: real hosts as they are, and each judgement on its own."""

import importlib.util
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rackrun.launcher.output.run_printer import wants_lines
from tests.lab.data import write_tiny
from tests.lab.hosts import ROOT, Lab
from tests.lab.needs import need
from tests.lab.servers import served


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({"TERM": "xterm"}, False),
        ({"TERM": "xterm", "CI": "false", "RACKRUN_PLAIN": "0"}, False),
        ({"TERM": "xterm", "CI": "true"}, True),
        ({"TERM": "xterm", "RACKRUN_PLAIN": "1"}, True),
        ({"TERM": "dumb"}, True),
        ({}, True),
    ],
)
def test_variables_ask_for_plain_lines(environment, lines):
    """A terminal of a CI job draws no dashboard, nor does one that a screen reader reads."""
    assert wants_lines(environment) == lines


# -- real hosts ---------------------------------------------------------------------------------


def test_every_difference_between_real_hosts_is_in_the_json(start_lab, tmp_path):
    """Another torch, no interpreter, other code, no workdir, a host that is down, a server that
    sends no ranges, which the ranks need: each is named."""
    lab = start_lab(6)
    good, torch = lab.cheap_python("2.0"), lab.cheap_python("2.1", "python-2.1")
    for name in ("same", "edited"):
        folder = lab.folder / name
        folder.mkdir()
        (folder / "train.py").write_text(f"print({name!r})\n")
        subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
        subprocess.run(["git", "-C", folder, "add", "train.py"], check=True)
    lab.hosts[5].stop()
    hosts = lab.write_hosts(
        f"python={good}",
        f"python={torch}",
        "python=/no/such/python",
        f"python={good} workdir={lab.folder}/edited",
        f"python={good} workdir={lab.folder}/none",
        f"python={good}",
    )
    with served(write_tiny(tmp_path / "served", shards=1).folder) as (address, _):
        args = ("--check", "--json", str(hosts), "catdog", "--data", address)
        code, out, err = lab.result_of(*args, cwd=lab.folder / "same")
    assert (code, err) == (69, "")
    rows = {(row["check"], row["host"]): row for row in json.loads(out)}
    host = [f"127.0.0.{number}" for number in range(2, 8)]
    assert rows["torch", host[0]]["level"] == "ok"
    assert rows["torch", host[1]]["problem"] == f"differs from {host[0]}: 2.0"
    assert "/no/such/python" in rows["python", host[2]]["problem"]
    assert rows["code", host[3]]["problem"] == "train.py"
    assert rows["code", host[0]]["found"] == "as here"
    assert rows["workdir", host[4]]["problem"] == f"there is no folder {lab.folder}/none"
    assert "refuses connections" in rows["reachable", host[5]]["problem"]
    for number in (0, 1, 3):  # the others have no interpreter, or no folder to start it in
        assert "the server sends no ranges" in rows["shards", host[number]]["problem"]


@pytest.mark.parametrize("ahead", [60, -20])
def test_a_clock_that_is_off_is_reported_and_harms_no_run(start_lab, ahead):
    """Probe and agent of one host live in another minute: a warning, both ranks, and 0."""
    lab = start_lab(2)
    remote = lab.hosts[1].folder
    shifted = f"import time; true = time.time; time.time = lambda: true() + {ahead}"
    (remote / "python3").write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -S -X utf8 -c "{shifted}\n$6"\n'
    )
    (remote / "python3").chmod(0o755)
    (remote / ".bashrc").write_text(f"PATH={remote}:$PATH\n")
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, out, err = lab.result_of(str(hosts), "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert code == 0, err
    assert f"warning: 127.0.0.3: clock: the clock is {ahead:+d} s off this machine's" in err
    assert "rank 0 of 2" in out and "rank 1 of 2" in out


IN_A_TMP = ("unshare", "-m", "sh", "-c")
FULL = 'mount -t tmpfs -o size=9m tmp /tmp && head -c 8m /dev/zero > /tmp/full && exec "$@"'
READ_ONLY = 'mount -t tmpfs -o ro tmp /tmp && exec "$@"'


@pytest.mark.parametrize(
    ("script", "says"), [(FULL, "/tmp is full"), (READ_ONLY, "/tmp cannot be written")]
)
def test_a_tmp_that_cannot_hold_an_agent_is_found_by_the_check(script, says):
    """Neither a check nor a launch takes such a host, and no --wait is advised."""
    need("root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # seen beside the other /tmp
        lab = Lab(Path(folder)).ready(1, command=(*IN_A_TMP, script, "sh"))
        try:
            hosts = str(lab.write_hosts("workdir=/"))
            for verb in ((), ("--check",)):
                code, out, err = lab.result_of(
                    "--ignore-check", "torch", *verb, hosts, "--", "true"
                )
                assert code == 78, out + err
                text = re.sub(r"\s+", " ", out + err)
                assert says in text
                assert "make room there, or let every account write to it" in text
                assert "--wait" not in text
        finally:
            lab.stop()


def with_torch_alone(folder: Path, is_rackrun_there: bool = True) -> Path:
    """Write an interpreter that finds torch, and maybe rackrun with what it needs; no more."""
    site, python = folder / "site", folder / "torch-alone"
    site.mkdir()
    if is_rackrun_there:
        (site / "rackrun").symlink_to(ROOT / "rackrun")
    for package in ("torch", *(["click", "msgspec", "numpy"] if is_rackrun_there else [])):
        spec = importlib.util.find_spec(package)
        assert spec and spec.origin
        (site / package).symlink_to(Path(spec.origin).parent)
        libraries = Path(spec.origin).parents[1] / f"{package}.libs"
        if libraries.exists():
            (site / libraries.name).symlink_to(libraries)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_tasks_and_a_deep_check_need_rackrun_where_the_ranks_run(start_lab, tmp_path):
    """In a project of one's own with python=: 78 and what to type, not a traceback of Python."""
    lab, work = start_lab(1), tmp_path / "work"
    work.mkdir()
    hosts = lab.write_hosts(f"python={with_torch_alone(tmp_path, False)} workdir={work}")
    code, out, err = lab.result_of("--check", "--deep", str(hosts), cwd=work)
    assert code == 78, out + err
    assert "torch-alone has no rackrun; install rackrun there" in err, out + err
    code, out, err = lab.result_of(str(hosts), "catdog", "--synthetic", "--device=cpu", cwd=work)
    assert code == 78, out + err
    assert "torch-alone has no rackrun, click, msgspec; install rackrun there" in err, out + err
    assert not (work / "runs").exists()


@pytest.mark.parametrize(
    ("verb", "options", "code", "says"),
    [
        ("--check", "--model timm:resnet18", 78, "torch-alone has no timm"),
        ("--dry-run", "--track mlflow,wandb", 78, "torch-alone has no mlflow, wandb"),
        ("--detach", "--model nomod:Net", 78, "no module nomod in {work} or installed"),
        ("", "--optimizer nolion.of:Lion", 78, "no module nolion in {work} or installed"),
        ("", "--weights own/net.pt", 78, "{work}/own/net.pt: No such file or directory"),
        ("", "--cache shards/dataset.json/c", 78, "{work}/shards/dataset.json is not a folder"),
        (
            "--check",
            "--eval-split test",
            65,
            "tiny: no samples in the split 'test'; there are in: train, val",
        ),
        (
            "",
            "--resampled --batch-size 4 --resume runs/20260101-120000-catdog",
            64,
            "8 images per step here, 24 in the checkpoint; with as many ranks as here type"
            " --batch-size 12",
        ),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_they_start(
    start_lab, tmp_path, verb, options, code, says
):
    """What hosts lack, and a number of ranks: by their facts, for every way to start a run."""
    lab, work, local = start_lab(2), tmp_path / "work", tmp_path / "here"
    write_tiny(work / "shards", shards=1, splits=("train", "val"))
    earlier = local / "runs" / "20260101-120000-catdog"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text(json.dumps({"resolved": {"batch": 24}}))
    hosts = lab.write_hosts(f"python={with_torch_alone(tmp_path)} workdir={work}")
    args = (str(hosts), "catdog", "--device", "cpu", "--data", "shards", *options.split())
    ended, out, err = lab.result_of(*verb.split(), *args, cwd=local)
    assert ended == code, out + err
    # A table breaks long paths.
    assert re.sub(r"\s+", "", says.format(work=work)) in re.sub(r"\s+", "", out + err)
    assert not (work / "runs").exists()
    assert [path.name for path in (local / "runs").iterdir()] == [earlier.name]
