"""The command that a stopped run prints is read as the launch that was typed, to go on with it."""

import shlex
from typing import NoReturn

import pytest

from rackrun.catdog.recipes import RECIPES
from rackrun.cli import dispatch
from rackrun.launcher.commands import local, ray, ssh_run
from rackrun.launcher.run.job import Job, TaskWork, Work, without_option
from rackrun.launcher.run.settings import Options
from rackrun.run_folder import RunFolder
from rackrun.training.config import from_command_line

RUN = "20260102-030405-demo"


class Asked(Exception):
    """What a line asks for: what is to run, under which options, and how that is typed."""

    def __init__(self, work: Work, options: Options, typed: tuple[str, ...]) -> None:
        super().__init__()
        assert isinstance(work, TaskWork)
        self.work, self.options, self.typed = work, options, typed


def asked(monkeypatch: pytest.MonkeyPatch, line: str) -> Asked:
    """Read a line as its script does, up to where it would reach for hosts."""

    def spec_of(work: Work, options: Options, typed: tuple[str, ...]) -> NoReturn:
        raise Asked(work, options, typed)

    for way in (local, ssh_run, ray):
        monkeypatch.setattr(way, "spec_of", spec_of)
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
    run = first.options.runs / RUN
    job = Job(first.work, RunFolder(run), first.options, typed=first.typed)
    printed = shlex.join(job.resume)
    assert printed.split()[0] == line.split()[0]
    again = asked(monkeypatch, printed)
    options = (*without_option(first.work.options, "--resume"), "--resume", str(run))
    assert again.work == TaskWork(first.work.task, options)
    assert again.options == first.options
    assert again.typed == first.typed
    settings, _ = from_command_line(RECIPES, again.work.task, list(again.work.options))
    assert str(settings.resume) == str(run)
