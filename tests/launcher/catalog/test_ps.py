"""The list of runs: those of a folder, those of hosts, and by what they may be called."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from rackrun import runs as runs_here
from rackrun.errors import UsageError
from rackrun.launcher.catalog.folders import runs_in
from rackrun.launcher.catalog.listed import ListedRun, table
from rackrun.launcher.catalog.ps import main
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.lifecycle.task_check import refuse_absent_run
from rackrun.launcher.output.log_files import LogFiles, write_result
from rackrun.launcher.output.record import RunRecord
from rackrun.launcher.remote import processes
from rackrun.launcher.run.job import Job, TaskWork
from rackrun.launcher.run.plan import PlannedHost, make_plan
from rackrun.launcher.run.result import Result
from rackrun.run_folder import new_run_folder, point_latest_to
from rackrun.run_report import __main__ as report
from rackrun.runs import find_run, run_folder
from rackrun.training.run import resume
from tests.lab.detached import SHORT, WAIT

PID = "import os, time; print(os.getpid(), flush=True); time.sleep(999)"
WITHOUT_CTRL_C = ("sh", "-c", "trap '' INT; exec \"$@\"", "sh")


def written(runs: Path, name: str) -> tuple[Job, RunRecord]:
    """Return a job and a run folder as a launcher makes it when a run begins."""
    work = TaskWork("catdog", ("--epochs", "2"))
    job = Job(work, new_run_folder(runs, name))
    host = PlannedHost("gpu01", "127.0.0.1", 1, sys.executable, "/w", str(job.folder.path))
    LogFiles(job.folder, make_plan(job, [host], 29500))
    return job, RunRecord(job.folder)


def ended(job: Job, verdict: str, code: int, step: int) -> Result:
    """Return a result as a supervisor returns it."""
    report = {"step": step}
    nothing = {"host": None, "rank": None, "log": None, "advice": "", "traceback": ""}
    return Result(
        verdict, code, "", codes={0: code}, hosts={}, seconds=1.0, report=report,
        folder=job.folder.path, **nothing,
    )  # fmt: skip


def test_the_list_shows_every_run_of_a_folder_with_its_state_and_step(
    tmp_path, monkeypatch, capsys
):
    """One that runs, one that is done, one that failed, one that was killed; damage is left out."""
    monkeypatch.setattr(runs_here, "RECORDS", tmp_path / "known")
    monkeypatch.chdir(tmp_path)
    runs = tmp_path / "runs"
    live, files = written(runs, "live")
    (live.folder.path / "metrics.jsonl").write_text('{"step": 20}\n{"step": 40}\n{"ste')
    for name, verdict, code, step in (("done", "done", 0, 90), ("broken", "failed", 75, 7)):
        job, _ = written(runs, name)
        write_result(job.folder, ended(job, verdict, code, step))
    hosts, remote = written(runs, "on-hosts")  # whose metrics are on their first host
    hosts.folder.live.write_text('{"step": 33, "curves": []}')
    os.close(written(runs, "killed")[1].file)
    (runs / "20260101-000000-empty").mkdir()
    (runs / "20260101-000001-damaged").mkdir()
    (runs / "20260101-000001-damaged" / "plan.json").write_text('{"run_id": "\\u001b[2J"}')
    assert main(["--json"]) == 0
    content = {run["name"]: run for run in json.loads(capsys.readouterr().out)}
    values = {name: (run["state"], run["exit_code"], run["step"]) for name, run in content.items()}
    assert values == {
        "live": ("running", None, 40),
        "on-hosts": ("running", None, 33),
        "done": ("done", 0, 90),
        "broken": ("failed", 75, 7),
        "killed": ("killed", None, None),
    }
    assert content["live"]["task"] == "catdog"
    assert content["live"]["folder"] == f"runs/{live.folder.path.name}"
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["id", "name", "task", "hosts", "state", "step", "age", "folder"]
    assert any("failed (75)" in line for line in lines)
    os.close(files.file)
    os.close(remote.file)


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
        hosts = detached.status()["hosts"]
        assert [host["state"] for host in hosts] == ["running"] * 3
        running = [process for host in hosts for process in host["processes"]]
        assert {str(each["pid"]) for each in running if each["role"] == "rank"} == {*ranks}
        if how == "its launcher was killed":
            launcher.kill()
            launcher.communicate()
        code, _, err = detached.result_of("stop")
        assert (code, "3 of 3 hosts clean" in err) == (0, True), (how, err)
        assert not [rank for rank in ranks if processes.look_up(int(rank))], how
        if how == "its launcher lives":
            assert launcher.wait(30) == 130
            assert "interrupted: stopped by ./run-ssh stop" in err
            assert not list((detached.home / ".rackrun" / "known").iterdir())  # all were clean
            launcher.communicate()


def test_a_folder_is_found_by_the_name_of_its_run(tmp_path, monkeypatch):
    """Where a run is asked for, its name or the start of its id does; a path stays what it is."""
    monkeypatch.chdir(tmp_path)
    job, files = written(tmp_path / "runs", "night")
    os.close(files.file)
    for moment in ("20260101-000000", "20260102-000000"):
        (tmp_path / "runs" / f"{moment}-twice").mkdir()
    meant = Path("runs") / job.folder.path.name
    (tmp_path / "night").mkdir()  # a folder of the user's: no run
    for text in ("night", job.run_id[:6], job.run_id, str(meant), meant.name, "latest"):
        assert run_folder(text) == meant
    assert run_folder("runs/latest/") == meant
    new_run_folder(tmp_path / "runs", "newer")
    assert run_folder("latest") == run_folder("runs/latest") == run_folder("newer") != meant
    assert run_folder("no-such") == Path("no-such")
    with pytest.raises(UsageError, match="several runs are called twice: runs/.*type the folder"):
        run_folder("twice")
    with pytest.raises(UsageError, match=f"{meant}/checkpoints has no checkpoint"):
        resume.requested_checkpoint("night", "catdog")
    for text, is_there in (("night", True), ("latest", True), ("nope", False), ("./x.pt", False)):
        work = TaskWork("catdog", ("--resume", text))
        with nullcontext() if is_there else pytest.raises(UsageError, match=f"--resume {text}: no"):
            refuse_absent_run(work, tmp_path / "runs")
    report.main(["night"])
    assert (meant / "report.html").exists()


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


def test_of_several_runs_of_a_name_the_one_that_goes_on_is_meant(tmp_path, monkeypatch):
    """A folder with its result shows that the other is over."""
    monkeypatch.setattr(runs_here, "RECORDS", tmp_path / "known")
    monkeypatch.chdir(tmp_path)
    over, _ = written(tmp_path / "runs", "night")
    write_result(over.folder, ended(over, "done", 0, 5))
    earlier = over.folder.path.rename(tmp_path / "runs" / "20260101-000000-night")
    live, _ = written(tmp_path / "runs", "night")
    run = find_run("night")
    assert run is not None and run.id == live.run_id
    assert str(run) == f"run {live.run_id[:8]} (night), runs/{live.folder.path.name}"
    write_result(live.folder, ended(live, "done", 0, 5))
    with pytest.raises(UsageError, match="several runs are called night: runs/.*, runs/"):
        find_run("night")
    for text, folder in ((over.run_id[:8], earlier), (live.run_id[:12], live.folder.path)):
        run = find_run(text)
        assert run is not None and run.folder == Path("runs") / folder.name


def test_names_of_hosts_move_no_cursor():
    """A list of runs is one line for each, whatever hosts say."""
    run = ListedRun(
        "3fa81c02",
        "\x1b[2J",
        "a\nb",
        ("gpu01", "gpu02", "gpu03", "gpu04"),
        "done",
        0,
        1,
        1.0,
        "f",
    )
    text = table([run])
    assert (text.count("\n"), "\x1b" in text, "gpu[01-04]" in text) == (4, False, True)
    assert text.endswith("\n1 run: 1 done\n")


def test_hosts_tell_of_their_runs_and_a_run_is_found_by_its_name(detached):
    """Those that run, from a folder in which none of them was started."""
    run = detached.detach("--name", "night", detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    for cwd, words in ((detached.home, ()), (detached.work, (detached.hosts,))):
        env = {"HOME": str(detached.lab.home if words else detached.home)}
        code, out, err = detached.lab.result_of(*words, "--json", verb=("ps",), cwd=cwd, env=env)
        assert code == 0, err
        (found,) = [one for one in json.loads(out) if one["run"].startswith(run)]
        assert (found["name"], found["state"]) == ("night", "running")
        assert set(found["hosts"]) == {"127.0.0.2", "127.0.0.3", "127.0.0.4"}
        assert found["folder"].startswith("127.0.0.2:" if words else "runs/")
    detached.run = "night"
    assert detached.status()["run"].startswith(run)
    assert detached.result_of("stop", "--force")[0] == 0
    assert list(runs_in(detached.home / "no-such-folder")) == []
