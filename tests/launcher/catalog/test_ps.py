"""Runs are looked at and ended on their own hosts, and `latest` is the newest one."""

import json
import sys
from pathlib import Path

from rackrun.launcher.commands.work import work_of
from rackrun.launcher.remote import processes
from rackrun.launcher.run.job import TaskWork
from rackrun.run_folder import new_run_folder, point_latest_to
from tests.lab.detached import SHORT

PID = "import os, time; print(os.getpid(), flush=True); time.sleep(999)"
WITHOUT_CTRL_C = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


def test_an_attached_run_is_stopped_on_its_own_hosts(detached):
    """Its launcher ends it, also one that ignores Ctrl-C as in the background of a script; then
    its hosts are looked at, and not those of this folder."""
    args = (*SHORT[:-2], detached.hosts, "--", sys.executable, "-c", PID)
    home = {"cwd": detached.home, "env": {"HOME": str(detached.home)}, "before": WITHOUT_CTRL_C}
    for how in ("its launcher lives", "its launcher was killed"):
        launcher = detached.lab.run_ssh(*args, **home)
        assert launcher.stdout is not None
        ranks = [launcher.stdout.readline().split()[-1] for _ in range(3)]
        (detached.home / "hosts.txt").write_text("127.0.0.99\n")
        plan = json.loads((detached.home / "runs" / "latest" / "plan.json").read_text())
        detached.run = plan["run_id"][:8]
        code, out, err = detached.result_of("logs")
        assert (code, {line.split()[-1] for line in out.splitlines()}) == (0, {*ranks}), err
        detached.wait_for_states("running", "running", "running")
        if how == "its launcher was killed":
            launcher.kill()
            launcher.communicate()
        code, _, err = detached.result_of("stop")
        assert (code, "3 of 3 hosts clean" in err) == (0, True), (how, err)
        assert not [rank for rank in ranks if processes.look_up(int(rank))], how
        if how == "its launcher lives":
            assert launcher.wait(30) == 130
            assert "interrupted: stopped by ./run-ssh stop" in err
            launcher.communicate()


def test_a_run_resumes_from_the_one_that_was_the_latest(tmp_path, monkeypatch):
    """Its own folder becomes the latest before its ranks read the option."""
    monkeypatch.chdir(tmp_path)
    before = Path("runs") / new_run_folder(tmp_path / "runs", "one").path.name
    for typed in (["--resume", "runs/latest/"], ["--resume=runs/latest"]):
        work = work_of(["catdog", *typed, "--epochs", "3"])
        new_run_folder(tmp_path / "runs", "two")
        point_latest_to(tmp_path / before)
        meant = " ".join(typed).replace("runs/latest/", str(before))
        assert isinstance(work, TaskWork)
        assert " ".join(work.options[:-2]) == meant.replace("runs/latest", str(before))


def test_latest_leads_to_the_newest_run_and_replaces_nothing_of_the_users(tmp_path):
    """Our link is replaced in one step; a user's folder or link stays."""
    first, second = (new_run_folder(tmp_path, name).path for name in ("one", "two"))
    assert (tmp_path / "latest").readlink().name == second.name
    point_latest_to(first)
    assert (tmp_path / "latest").resolve() == first
    for other in (lambda link: link.symlink_to("/etc"), lambda link: link.mkdir()):
        link = tmp_path / "latest"
        link.unlink(missing_ok=True)
        other(link)
        before = link.lstat().st_ino
        point_latest_to(second)
        assert link.lstat().st_ino == before
    assert not list(tmp_path.glob(".latest*"))
