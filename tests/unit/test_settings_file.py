"""Settings files: read, written by every run, and started again."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.launcher.commands.local import LocalLaunch
from rackrun.launcher.commands.parse import CommandLine, read
from rackrun.launcher.commands.rerun import settings_to_repeat
from rackrun.launcher.commands.settings import SSH_HEAD, SshOptions
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.settings_file import (
    settings_text,
    toml_of,
)
from rackrun.run_folder import new_run_folder

FILE = """\
launch = "ssh"
[launcher]
hosts = "rack.txt"
name = "night"
max_restarts = 2
env = ["A=1", "B"]
[imagenet]
epochs = 90
lr = 0.5
flip = false
synthetic = true
"""


def written(folder: Path, text: str = FILE) -> str:
    path = folder / "run.toml"
    path.touch(0o600)
    path.write_text(text)
    return str(path)


def over_ssh(*typed: str) -> CommandLine[SshOptions]:
    """Return what `rackrun ssh` makes of these words."""
    return read("ssh", SshOptions, SSH_HEAD, typed)


FILE_WORDS = "--name night --max-restarts 2 --env A=1 --env B"


@pytest.mark.parametrize(
    ("typed", "words", "work"),
    [
        ("", f"{FILE_WORDS} rack.txt", "imagenet --epochs=90 --lr=0.5 --no-flip --synthetic"),
        ("--name day other.txt imagenet --epochs 3 --flip",
         "--name day --max-restarts 2 --env A=1 --env B other.txt",
         "imagenet --lr=0.5 --synthetic --epochs 3 --flip"),
        ("imagenet --epochs=3 --name day",
         "--name day --max-restarts 2 --env A=1 --env B rack.txt",
         "imagenet --lr=0.5 --no-flip --synthetic --epochs=3"),
        ("catdog", f"{FILE_WORDS} rack.txt", "catdog"),
    ],
)  # fmt: skip
def test_the_command_line_wins_over_the_file(tmp_path, monkeypatch, typed, words, work):
    """Also for lists and switches; a host file that is not typed is the file's."""
    monkeypatch.setenv("B", "2")
    line = over_ssh("--config", written(tmp_path), *typed.split())
    task, *options = work.split()
    assert sorted(line.launch_words) == sorted(words.split())
    assert line.work == TaskWork(task, tuple(options))


def test_typed_hosts_and_a_typed_command_take_the_place_of_those_of_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("B", "2")
    monkeypatch.setenv("C", "3")
    line = over_ssh("--config", written(tmp_path), *["--env", "C", "-H", "gpu01", "--", "true"])
    assert (line.options.host_list, line.options.env) == ("gpu01", ("C",))
    assert line.options.hosts == Path("hosts.txt")
    assert line.work == Command(("true",))


def test_a_switch_of_the_file_is_turned_off_by_what_is_typed(tmp_path):
    """`--no-wait` negates --wait; --no-serve is an option of its own."""
    path = written(tmp_path, "[launcher]\nwait = true\nplain = true\nserve = true\n")
    options = over_ssh("--config", path, "--no-wait").options
    assert (options.wait, options.plain, options.serving.serve) == (False, True, True)
    options = over_ssh("--no-serve", "--no-plain", "--wait").options
    assert (options.wait, options.plain, options.serving.no_serve) == (True, False, True)


VALUES = st.one_of(
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.lists(st.text(), max_size=3),
)


@given(st.dictionaries(st.text(min_size=1), VALUES, max_size=5))
def test_what_is_written_is_read_again(table):
    """Every text that UTF-8 has, every number: tomllib returns what was given."""
    assert tomllib.loads(toml_of({}, {"launcher": table}) or "launcher = {}")["launcher"] == table


def test_the_settings_of_a_launch_are_a_file_that_launches_the_same(tmp_path, monkeypatch):
    """Options that were left alone are not in it; of a secret it has no more than the name."""
    monkeypatch.setenv("TOKEN", "hunter2")
    typed = ["--name", "a b", "--env", "X=1", "--secret", "TOKEN", "--lease-seconds", "20"]
    options = over_ssh(*typed, "--wait", "rack.txt").options
    work = TaskWork("catdog", ("--epochs", "2", "--lr=0.1"))
    text = settings_text("ssh", options, work)
    assert "hunter2" not in text
    assert tomllib.loads(text) == {
        "launch": "ssh",
        "launcher": {
            "name": "a b", "env": ["X=1"], "secret": ["TOKEN"], "lease-seconds": 20.0,
            "wait": True, "hosts": "rack.txt",
        },
        "catdog": {"epochs": 2, "lr": 0.1},
    }  # fmt: skip
    line = over_ssh("--config", written(tmp_path, text))
    assert line.options == replace(options, config=str(tmp_path / "run.toml"))
    assert line.work == TaskWork("catdog", ("--epochs=2", "--lr=0.1"))
    command = Command(("python", "x.py", "--epochs", "3"))
    path = written(tmp_path, settings_text("local", LocalOptions(), command))
    assert read("local", LocalOptions, LocalLaunch.head, ["--config", path]).work == command


def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, name: str) -> Path:
    """Return the folder of a run as a launch with these settings leaves it."""
    monkeypatch.chdir(folder)
    path = new_run_folder(Path("runs"), name).path
    written(path, text)
    return path


def again(*args: str) -> CommandLine[SshOptions]:
    """Return the launch that `rerun` makes of its words."""
    return read("ssh", SshOptions, SSH_HEAD, args[1:], settings_to_repeat(args))


RESUMED = """launch = "ssh"
[launcher]
hosts = "rack.txt"
wait = true
auto-resume = true
[catdog]
data = "shards"
epochs = 90
resume = "runs/20260101-000000-night"
"""


@pytest.mark.parametrize(
    ("typed", "words", "work"),
    [
        ("", "rack.txt", "catdog DATA"),
        ("--epochs 3", "rack.txt", "catdog --data=shards --epochs 3"),
        ("catdog --epochs 3", "rack.txt", "catdog --data=shards --epochs 3"),
        ("--name=b --no-flip --plain", "--name b --plain rack.txt", "catdog DATA --no-flip"),
        ("--class-weights cat=2,dog=1 --name b", "--name b rack.txt",
         "catdog DATA --class-weights cat=2,dog=1"),
        ("new.txt --epochs 3", "new.txt", "catdog --data=shards --epochs 3"),
        ("--resume latest", "rack.txt", "catdog DATA --resume latest"),
        ("mnist --epochs 1", "rack.txt", "mnist --epochs 1"),
    ],
)  # fmt: skip
def test_options_of_the_task_need_no_task_and_a_rerun_does_not_resume(
    tmp_path, monkeypatch, typed, words, work
):
    """What is typed wins, wherever the options of launcher and task stand."""
    launched(monkeypatch, tmp_path, RESUMED, "night")
    task, *options = work.replace("DATA", "--data=shards --epochs=90").split()
    for line in (again("night", *typed.split()), again("night", "--dry-run", *typed.split())):
        assert sorted({*line.launch_words} - {"--dry-run"}) == sorted(["--wait", *words.split()])
        assert line.work == TaskWork(task, tuple(options))
