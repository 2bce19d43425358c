"""The command that a stopped run prints is read as the launch that was typed, to go on with it."""

import shlex
from typing import NoReturn

import pytest

from rackrun.catdog.recipes import RECIPES
from rackrun.cli import dispatch
from rackrun.launcher.commands import local, ray, ssh
from rackrun.launcher.commands.parse import job_template
from rackrun.launcher.commands.ray import RayOptions
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.lifecycle.data_preparation import DEMO
from rackrun.launcher.lifecycle.launch_spec import LaunchSettings
from rackrun.launcher.run.job import JobTemplate, TaskWork, Work, without_option
from rackrun.launcher.run.settings import LocalOptions, Options
from rackrun.training.config import from_command_line

RUN = "20260102-030405-demo"


class Asked(Exception):
    """What a line asks for: what is to run, with which options and jobs."""

    def __init__(self, work: Work, options: Options, jobs: JobTemplate) -> None:
        super().__init__()
        assert isinstance(work, TaskWork)
        self.work, self.options, self.jobs = work, options, jobs


def asked(monkeypatch: pytest.MonkeyPatch, line: str) -> Asked:
    """Read a line as its script does, up to where it would reach for hosts."""

    def on_this_machine(
        work: Work | None, options: LocalOptions, again: tuple[str, ...]
    ) -> NoReturn:
        work = work or DEMO
        raise Asked(work, options, job_template("local", options, work, again))

    def over_ssh(work: Work, options: SshOptions, again: tuple[str, ...]) -> NoReturn:
        raise Asked(work, options, job_template("ssh", options, work, again))

    def on_ray(work: Work, options: RayOptions, settings: LaunchSettings) -> NoReturn:
        raise Asked(work, options, settings.jobs)

    monkeypatch.setattr(local, "start", on_this_machine)
    monkeypatch.setattr(ssh, "start", over_ssh)
    monkeypatch.setattr(ray, "prepared", on_ray)
    with pytest.raises(Asked) as raised:
        dispatch.run(shlex.split(line.removeprefix("rackrun ")))
    return raised.value


@pytest.mark.parametrize(
    "line",
    [
        "./run-local",
        "./run-local --nproc 2 --runs 'my runs'",
        "./run-ssh --name 'a b' hosts.txt",
        "./run-ray --runs there catdog --data=/s --epochs 2",
        "rackrun ray",
        "./run-ssh --detach --max-restarts 1 hosts.txt catdog --data /s --resume latest",
    ],
)
def test_it_asks_for_the_same_and_the_run(monkeypatch, tmp_path, line):
    """The demo too, with ranks counted by hand, of a detached run and on Ray."""
    monkeypatch.chdir(tmp_path)
    first = asked(monkeypatch, line)
    run = str(first.jobs.runs / RUN)
    printed = shlex.join(first.jobs.resume_command(RUN))
    assert printed.split()[0] == line.split()[0]
    again = asked(monkeypatch, printed)
    options = (*without_option(first.work.options, "--resume"), "--resume", run)
    assert again.work == TaskWork(first.work.task, options)
    assert again.options == first.options
    assert again.jobs.typed == first.jobs.typed
    settings, _ = from_command_line(RECIPES, again.work.task, list(again.work.options))
    assert str(settings.resume) == run
