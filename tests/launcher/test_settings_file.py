"""Settings files: read, written by every run, and started again."""

import json
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun import runs as runs_here
from rackrun.launcher.commands import rerun
from rackrun.launcher.commands.parse import parse, split, with_settings, work_of
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.settings import LocalOptions, Options
from rackrun.launcher.settings_file import (
    options_of,
    read_settings,
    settings_text,
    toml_of,
    words_of,
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


def merged(
    path: str, *typed: str, settings: type[Options] = LocalOptions, words: int = 0
) -> list[str]:
    """Return the command line with a settings file."""
    args = ["--config", path, *typed]
    return with_settings(read_settings(Path(path)), args, settings, words)


@pytest.mark.parametrize(
    ("typed", "ours", "rest"),
    [
        (
            (),
            ["--name=night", "--max-restarts=2", "--env=A=1", "--env=B", "rack.txt"],
            ["imagenet", "--epochs=90", "--lr=0.5", "--no-flip", "--synthetic"],
        ),
        (
            ("--name", "day", "other.txt", "imagenet", "--epochs", "3", "--flip"),
            ["--max-restarts=2", "--env=A=1", "--env=B", "--name", "day", "other.txt"],
            ["imagenet", "--lr=0.5", "--synthetic", "--epochs", "3", "--flip"],
        ),
        (
            ("--env", "C", "-H", "gpu01", "--", "true"),
            ["--name=night", "--max-restarts=2", "--env", "C", "-H", "gpu01"],
            ["--", "true"],
        ),
        (
            ("catdog",),
            ["--name=night", "--max-restarts=2", "--env=A=1", "--env=B", "rack.txt"],
            ["catdog"],
        ),
    ],
)
def test_the_command_line_wins_over_the_file(tmp_path, typed, ours, rest):
    """Also for lists and switches; a host file that is not typed is the file's."""
    args = merged(written(tmp_path), *typed, settings=SshOptions, words=1)
    count = 0 if "-H" in typed else 1
    assert split(args, SshOptions, count) == (ours, rest)


def test_a_switch_of_the_file_is_turned_off_by_what_is_typed(tmp_path):
    """`--no-wait` negates --wait; --no-serve is an option of its own."""
    path = written(tmp_path, "[launcher]\nwait = true\nplain = true\nserve = true\n")
    launcher_args, _ = split(merged(path, "--no-wait", settings=SshOptions, words=1), SshOptions, 1)
    options = parse(SshOptions, "ssh", launcher_args, "")
    assert (options.wait, options.plain, options.serving.serve) == (False, True, True)
    options = parse(SshOptions, "ssh", ["--no-serve", "--plain", "--no-plain", "--wait"], "")
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


@pytest.mark.parametrize(
    "args",
    [
        ("--epochs", "2", "--lr", "0.1", "--synthetic", "--no-flip"),
        ("--workers", "-1", "--lr=1e-3", "--data", "/a b/'c'\"d\"", "--seed", "007"),
        ("--recipe=demo", "--class-weights", "cat=2,dog=0.5", "--resume", ""),
    ],
)
def test_options_of_a_task_survive_the_file(args):
    """As a table and back they are the same options with the same values."""
    table = options_of(args)
    again = tomllib.loads(toml_of({}, {"catdog": table}))["catdog"]
    assert options_of(tuple(words_of(again))) == table


def test_the_settings_of_a_launch_are_a_file_that_launches_the_same(tmp_path, monkeypatch):
    """Options that were left alone are not in it; of a secret it has no more than the name."""
    monkeypatch.setenv("TOKEN", "hunter2")
    typed = ["--name", "a b", "--env", "X=1", "--secret", "TOKEN", "--lease-seconds", "20"]
    options = parse(SshOptions, "ssh", [*typed, "--wait", "rack.txt"], "")
    work = TaskWork("catdog", ("--epochs", "2", "--lr=0.1"))
    again = ("rackrun", "ssh", "rack.txt", "catdog")
    text = settings_text("ssh", options, work, again)
    assert "hunter2" not in text
    assert tomllib.loads(text) == {
        "launch": "ssh",
        "typed": list(again),
        "launcher": {
            "name": "a b", "env": ["X=1"], "secret": ["TOKEN"], "lease-seconds": 20.0,
            "wait": True, "hosts": "rack.txt",
        },
        "catdog": {"epochs": 2, "lr": 0.1},
    }  # fmt: skip
    this_job, rest = split(
        merged(written(tmp_path, text), settings=SshOptions, words=1), SshOptions, 1
    )
    assert parse(SshOptions, "ssh", this_job, "") == options
    assert work_of(rest) == TaskWork("catdog", ("--epochs=2", "--lr=0.1"))
    command = Command(("python", "x.py", "--epochs", "3"))
    again = written(tmp_path, settings_text("local", LocalOptions(), command))
    assert work_of(merged(again)) == command


def launched(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str, name: str) -> Path:
    """Return the folder of a run as a launch with these settings leaves it."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(runs_here, "RECORDS", folder / "known")
    path = new_run_folder(Path("runs"), name).path
    written(path, text)
    return path


def again(*args: str) -> list[str]:
    """Return the launch that `rerun` makes of its words."""
    _, file, typed = rerun.read(args)
    return [file.launch, *rerun.command_line(file, typed)]


def test_a_run_is_started_again_from_the_settings_in_its_folder(tmp_path, monkeypatch):
    """However it is named."""
    folder = launched(monkeypatch, tmp_path, 'launch = "local"\ncommand = ["true"]\n', "night")
    for text in ("latest", "runs/latest", "night", str(folder), folder.name):
        assert again(text, "--name", "day") == ["local", "--name", "day", "--", "true"]


RESUMED = """launch = "ssh"
[launcher]
hosts = "rack.txt"
wait = true
[catdog]
data = "shards"
epochs = 90
resume = "runs/20260101-000000-night"
"""


@pytest.mark.parametrize(
    ("typed", "launch"),
    [
        ((), "--wait rack.txt catdog --data=shards --epochs=90"),
        (("--epochs", "3"), "--wait rack.txt catdog --data=shards --epochs 3"),
        (("catdog", "--epochs", "3"), "--wait rack.txt catdog --data=shards --epochs 3"),
        (("--name=b", "--no-flip", "--plain"),
         "--wait --name=b --plain rack.txt catdog DATA --no-flip"),
        (("--class-weights", "cat=2", "dog=1", "--name", "b"),
         "--wait --name b rack.txt catdog DATA --class-weights cat=2 dog=1"),
        (("new.txt", "--epochs", "3"), "--wait new.txt catdog --data=shards --epochs 3"),
        (("--resume", "latest"), "--wait rack.txt catdog DATA --resume latest"),
        (("mnist", "--epochs", "1"), "--wait rack.txt mnist --epochs 1"),
    ],
)  # fmt: skip
def test_options_of_the_task_need_no_task_and_a_rerun_does_not_resume(
    tmp_path, monkeypatch, typed, launch
):
    """What is typed wins, wherever the options of launcher and task stand."""
    launched(monkeypatch, tmp_path, RESUMED, "night")
    launch = launch.replace("DATA", "--data=shards --epochs=90")
    assert " ".join(again("night", *typed)) == f"ssh {launch}"
    assert " ".join(again("--dry-run", "night", *typed)).startswith("ssh --wait --dry-run ")


def test_a_run_over_ssh_is_started_again_from_its_folder(start_lab):
    """Settings lie in the run folder, readable by its owner alone; the new run does the same."""
    two = start_lab(2)
    args = ("--python", str(two.cheap_python()), "--name", "night", "--secret", "TOKEN")
    script = "import os; print('token', len(os.environ['TOKEN']))"
    env = {"TOKEN": "hunter2hunter2"}
    hosts = str(two.write_hosts("slots=1"))
    message = two.result_of(*args, hosts, "--", sys.executable, "-c", script, env=env)
    assert message[0] == 0, message
    (folder,) = two.folder.glob("runs/2*-night")
    assert (folder / "run.toml").stat().st_mode & 0o777 == 0o600
    assert not [
        path for path in folder.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()
    ]
    config = ("--ssh-config", str(two.config))
    again = two.launcher("rerun", "night", *config, "--name", "day", env=env)
    out, err = again.communicate(timeout=120)
    assert (again.returncode, out.count("token 14")) == (0, message[1].count("token 14")), err
    (second,) = two.folder.glob("runs/2*-day")
    plans = [json.loads((run / "plan.json").read_text()) for run in (folder, second)]
    assert plans[0]["hosts"][1]["command"] == plans[1]["hosts"][1]["command"]
    assert plans[0]["run_id"] != plans[1]["run_id"]
