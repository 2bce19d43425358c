"""`--sweep`: a run for each combination of settings, side by side on groups of hosts."""

import json
import signal
import sys

from rackrun.launcher.commands.local import main as local
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.search.sweep import cells, members_of
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


def test_values_in_brackets_and_names_with_underscores_stay_as_they_are_typed():
    """A script gets [1,2] whole, and its --layer_sizes; a task has no underscores."""
    combinations = members_of(["layer_sizes=[1,2],[3]"], "t")
    words = [each.work(Command(("python", "t.py"))).args[-1] for each in combinations]
    assert words == ["--layer_sizes=[1,2]", "--layer_sizes=[3]"]
    task = members_of(["weight_decay=0"], "t")[0].work(TaskWork("mnist", ("--weight-decay", "1")))
    assert task.options == ("--weight-decay=0",)


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


def test_a_dry_run_of_a_sweep_prints_lines_that_can_be_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    task = ("catdog", "--synthetic", "--device", "cpu", "--epochs", "1")
    assert local(["--dry-run", "--sweep", "lr=0.1,0.3", *task]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("./run-local --plain --name=catdog-1-lr-0.1 ")
    assert second.endswith(" catdog --synthetic --device cpu --epochs 1 --lr=0.3")
    assert list(tmp_path.iterdir()) == []
