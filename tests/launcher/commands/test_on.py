"""`--on HOST`: the run lives on another machine, and needs nothing of this one any more."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

from tests.lab.checkout import copy_rackrun
from tests.lab.oracles import clean
from tests.lab.waiting import until
from tests.lab.warm import ROOT
from tests.launcher.conftest import project

COUNT = """\
import os, time
for number in range(100):
    print(number, len(os.environ["CANARY"]), flush=True)
    time.sleep(0.1)
"""


@pytest.fixture
def laptop(start_lab):
    """Yield two hosts and a function that types on a third machine, in a checkout of its own."""
    lab = start_lab(2)
    head, worker = lab.hosts
    lab.configure(f"Host head\n  HostName {head.address}\n  Port {head.port}\n")
    (head.folder / ".ssh").mkdir()
    shutil.copy(lab.config, head.folder / ".ssh" / "config")  # how it logs in to the worker
    folder = project(lab)
    copy_rackrun(folder, lab.cheap_python())
    (folder / "train.py").write_text(COUNT)
    line = f"{worker.line} python={lab.cheap_python()} workdir={lab.folder}/work slots=1\n"
    (folder / "hosts.txt").write_text(line)
    with (folder / ".gitignore").open("a") as ignored:
        ignored.write("/hosts.txt\n")  # as in a clone of rackrun

    def typed(*words, verb=(), **more):
        env = {"HOME": str(lab.folder), "CANARY": "canary-" + "x" * 9}
        options = {"cwd": folder, "env": env, "before": ("env",), "start_new_session": True}
        return lab.run_ssh("--on", "head", *words, verb=verb, **options, **more)

    return lab, typed


def ended(process):
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def printed(lab):
    """Return what rank 0 has printed on the other machine."""
    logs = lab.hosts[0].folder.glob("project/runs/2*/logs/*/*/rank-0.out")
    return "".join(path.read_text() for path in logs)


LAUNCH = ("--secret", "CANARY", "--sync", "hosts.txt", "--", "python", "train.py")


def test_ctrl_c_stops_a_run_on_another_machine(laptop):
    """What is typed on the terminal reaches the starter there, as if it had been typed there."""
    lab, typed = laptop
    client = typed(*LAUNCH, stdin=subprocess.PIPE)
    until(lambda: client.poll() is not None or "5 16" in printed(lab), "it runs", 60)
    assert client.poll() is None, client.communicate()
    client.stdin.write("\x03")
    code, out, _ = ended(client)
    assert code == 130 and "interrupted: stopped by Ctrl-C" in out, out
    clean(lab)


def test_a_run_survives_the_machine_from_which_it_was_typed(laptop):
    """The client and its connection are killed; the run ends with 0, and attach --on shows it."""
    lab, typed = laptop
    client = typed(*LAUNCH)
    until(lambda: client.poll() is not None or "5 16" in printed(lab), "it runs", 60)
    assert client.poll() is None, client.communicate()
    os.killpg(client.pid, signal.SIGKILL)
    client.communicate()
    code, out, err = ended(typed("--plain", "latest", verb=("attach",)))
    assert code == 0, (out, err)
    assert [line for line in out.splitlines() if line.endswith(" 16")] == [
        f"{number} 16" for number in range(100)
    ]
    assert "99 16" in printed(lab)
    there = lab.hosts[0].folder / "project" / "runs"
    for path in (*there.rglob("*"), *lab.hosts[0].folder.glob("project/*")):
        assert not path.is_file() or b"canary-" not in path.read_bytes(), path
    code, _, err = ended(typed("nothing", verb=("attach",)))
    assert code == 64 and "ps --on head lists" in err, err
    code, out, _ = ended(typed("latest", "--dry-run", "--secret", "CANARY", verb=("rerun",)))
    assert code == 0 and "train.py" in out, out


def test_a_folder_from_which_nothing_was_launched_there_is_one_line(laptop):
    """Also where the installation there has failed, and with the settings of ~/.ssh/config."""
    lab, typed = laptop
    code, _, err = ended(typed("--json", verb=("ps",)))
    assert (code, err.count("\n")) == (64, 1) and "was not copied to this folder yet" in err, err
    project = lab.hosts[0].folder / "project"
    copy_rackrun(project, lab.cheap_python())
    python = project / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    (lab.folder / ".ssh").mkdir()
    shutil.copy(lab.config, lab.folder / ".ssh" / "config")
    env, before = {"HOME": str(lab.folder), "PYTHONPATH": str(ROOT)}, ("env",)
    here = lab.launcher("ps", "--on", "head", cwd=lab.folder / "project", env=env, before=before)
    code, _, err = ended(here)
    assert code == 64 and "rackrun's environment is not complete here" in err, err


def test_data_that_is_only_here_is_refused_with_what_to_type(laptop):
    """The folder is not there: one line with the rsync that brings it, and nothing starts."""
    lab, typed = laptop
    (lab.folder / "project" / "ignored-data").mkdir()
    code, _, err = ended(typed("hosts.txt", "catdog", "--data", "ignored-data"))
    assert code == 64
    assert "--data ignored-data is not on head; to copy it there, type: rsync -a" in err
    assert not (lab.hosts[0].folder / "project").exists()
