"""`--sweep`: a run for each combination of settings, side by side on groups of hosts."""

import json
import signal
import sys

import pytest

from rackrun.launcher.search.sweep import cells
from rackrun.run_files import RunEnd
from rackrun.run_report.folder import Story
from tests.lab.hosts import Lab
from tests.lab.waiting import until

SCRIPT = """
import json, os, sys, time
from pathlib import Path
lr = next(word for word in sys.argv if word.startswith("--lr="))[5:]
Path(os.environ["RACKRUN_RUN_FOLDER"], "metrics.jsonl").write_text(json.dumps({
    "kind": "evaluate", "step": 1, "epoch": 1, "loss": 0.5, "top1": 1 - float(lr), "samples": 9,
}) + "\\n")
sys.exit(3 if sys.argv[1:] == ["--lr=0.3", "--wd=1"] else 0)
"""
FOREVER = "import time; time.sleep(999)"


def swept(lab: Lab, script: str, *options: str) -> tuple[str, ...]:
    """Return the command line of a sweep of a script on the hosts of a lab."""
    (lab.folder / "script.py").write_text(script)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    return (*options, str(hosts), "--", sys.executable, str(lab.folder / "script.py"))


def results(lab: Lab) -> dict[str, str]:
    """Return the verdicts of all runs, by the name of their folder without the time."""
    return {
        path.parent.name[16:]: json.loads(path.read_text())["verdict"]
        for path in (lab.folder / "runs").glob("2*/result.json")
    }


def test_each_combination_is_a_run_and_one_that_fails_ends_no_other(start_lab):
    """Two hosts, four runs, two at a time: a row for each, a page, and the code of the one."""
    lab = start_lab(2)
    options = ("--sweep", "lr=0.1,0.3", "--sweep", "wd=0,1", "--sweep-hosts", "1", "--name", "t")
    code, out, err = lab.result_of(*swept(lab, SCRIPT, *options))
    assert code == 3, err
    assert results(lab) == {
        "t-1-lr-0.1-wd-0": "done",
        "t-2-lr-0.1-wd-1": "done",
        "t-3-lr-0.3-wd-0": "done",
        "t-4-lr-0.3-wd-1": "failed",
    }
    first, second = (host.address for host in lab.hosts)
    begun = [line for line in err.splitlines() if ": starts on " in line]
    assert [line.rpartition(" ")[2] for line in begun[:2]] == [first, second]
    assert "rackrun: lr=0.3 wd=1: exit code 3\n" in err
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["lr", "wd", "verdict", "accuracy", "loss", "images/s", "run"]
    assert rows[1][:5] == ["0.1", "0", "done", "90.00%", "0.5000"]
    assert rows[4][:5] == ["0.3", "1", "failed", "70.00%", "0.5000"]
    page = out.splitlines()[-1].removeprefix("comparison: ")
    assert page.startswith("runs/")
    assert "t-2-lr-0.1-wd-1" in (lab.folder / page).read_text()


def test_a_script_has_what_it_reported():
    """Without metrics.jsonl a row shows the numbers of its last report, and nothing else of it."""
    report = {"accuracy": 0.9, "loss": 0.25, "images_per_second": 1234.0}
    row = list(cells(Story("run", end=RunEnd("done", report=report))))
    assert row == ["done", "90.00%", "0.2500", "1,234", "run"]
    strange = {"accuracy": "0.9", "loss": float("nan"), "images_per_second": [1]}
    assert list(cells(Story("run", end=RunEnd("done", report=strange))))[1:4] == [""] * 3


def test_ctrl_c_ends_every_run(start_lab):
    """Both launches get it once, stop their hosts and say so; nothing new is started."""
    lab = start_lab(2)
    process = lab.run_ssh(*swept(lab, FOREVER, "--sweep", "x=1,2,3", "--sweep-hosts", "1"))
    plans = lab.folder / "runs"
    until(lambda: len(list(plans.glob("2*/plan.json"))) == 2, "both runs have begun", 60)
    until(lambda: all(host.sessions() for host in lab.hosts), "hosts are reached", 60)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130, err
    assert len(results(lab)) == 2 and set(results(lab).values()) == {"interrupted"}
    assert [line.split()[1] for line in out.splitlines()[1:4]] == ["interrupted"] * 2 + ["not"]
    assert "script.py" not in "".join(
        line for host in lab.hosts for line in host.processes().values()
    )


TASK = "--synthetic --device cpu"


@pytest.mark.parametrize(
    ("swept", "name", "last"),
    [
        (f"lr=0.1,0.3 catdog {TASK}", "catdog-1-lr-0.1", f"catdog {TASK} --lr=0.3"),
        (f"weight_decay=0,1 mnist {TASK} --weight-decay 2", "mnist-1-weight_decay-0",
         f"mnist {TASK} --weight-decay=1"),
        ("layer_sizes=[1,2],[3] -- true", "true-1-layer_sizes-_1_2_", "true '--layer_sizes=[3]'"),
    ],
)  # fmt: skip
def test_a_dry_run_of_a_sweep_prints_lines_that_can_be_typed(swept, name, last, cli, tmp_path):
    """Values in brackets are whole; a script gets names as they are typed, a task its own."""
    result = cli(f"./run-local --dry-run --sweep {swept}")
    first, second = result.out.splitlines()
    assert first.startswith(f"./run-local --plain --name={name} "), result
    assert second.endswith(f" {last}"), result
    assert [path.name for path in tmp_path.iterdir()] == ["home"]  # of the lab
