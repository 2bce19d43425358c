"""Mistakes of a first day: each answer says what is wrong, where, and what to type.

A row is what was typed, the exit code, and parts of the answer. Commands run in this process, in a
folder with the files that the rows name; hosts that are contacted belong to one lab.
"""

import json
import os
import socket
import subprocess
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import rackrun.convert.__main__ as convert
import rackrun.nginx.__main__ as nginx
from rackrun.cli.dispatch import run
from rackrun.commandline.options import options
from rackrun.commandline.program import report
from rackrun.contract.tasks import TASKS, package_of
from rackrun.launcher.commands.parse import ELSEWHERE, OF_TASKS, names_of, split
from rackrun.launcher.commands.ray import RayOptions
from rackrun.launcher.commands.settings import NodeOptions, SshOptions
from rackrun.launcher.remote.locks import lock
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.settings_file import typed_options
from rackrun.terminal import clean_lines
from rackrun.training.config import Config
from rackrun.training.entry import run_command
from tests.lab.hosts import Lab

COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "./run-local": lambda words: run(["./run-local", *words]),
    "./run-ssh": lambda words: run(["./run-ssh", *words]),
    "catdog": lambda words: run_command("catdog", "./run-local catdog", ["check", *words]),
    "convert": convert.main,
    "nginx": nginx.main,
}


def answer(typed: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command line without quotes, and what it says on the terminal."""
    command, *args = typed.split()
    try:
        code = COMMANDS[command](args) or 0
    except SystemExit as end:
        code = int(end.code or 0)
    except Exception as error:
        code = report(error, clean_lines)
    captured = capsys.readouterr()
    return code, captured.out + captured.err


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder as a new user has it: four hosts, a program, images, archives."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "hosts.txt").write_text("gpu01\ngpu02\ngpu03\ngpu04\n")
    (tmp_path / "train.py").write_text("print('trains')\n")
    for kind in ("cat", "dog"):
        (tmp_path / "pictures" / kind).mkdir(parents=True)
        (tmp_path / "pictures" / kind / "1.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "train-000.tar").write_bytes(b"")
    (tmp_path / "demo" / "shards").mkdir(parents=True)
    (tmp_path / "demo" / "shards" / "dataset.json").write_text("{}")
    (tmp_path / "one" / "cat").mkdir(parents=True)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "1.jpg").write_bytes(b"\xff\xd8")
    (tmp_path / "cut.zip").write_bytes(b"PK\3\4 and no more")
    with zipfile.ZipFile(tmp_path / "train.zip", "w") as archive:
        archive.writestr("train/cat.0.jpg", b"\xff\xd8")
    return tmp_path


@pytest.mark.parametrize("learning_rate", ["--lr", "--learning-rate", "--learning_rate"])
def test_names_of_others_are_taken(learning_rate, capsys):
    """Other launchers' names of options mean the same here."""
    line = f"catdog {learning_rate} 0.1 --batch_size 8 --num-workers=2 --wd 0 --data x"
    code, needs = answer(line, capsys)
    assert code == 0
    assert json.loads(needs)["batch_size"] == 8


def test_underscores_are_dashes_wherever_options_are_split():
    """A switch takes no word for its value, and a typed option replaces that of a file."""
    words = ["--dry_run", "--sync_untracked=a_b", "--include", "n_1", "catdog", "--batch_size", "4"]
    ours, rest = split(words, SshOptions)
    assert ours == ["--dry-run", "--sync-untracked=a_b", "--include", "n_1"]
    assert rest == ["catdog", "--batch_size", "4"]
    assert typed_options(rest) == {"batch-size"}


def test_no_option_belongs_to_the_launcher_and_to_a_task():
    """So one behind a task is surely misplaced, whichever way of launching it is."""
    doors = (LocalOptions, SshOptions, RayOptions, NodeOptions)
    launchers = set(ELSEWHERE).union(*map(names_of, doors))
    tasks = [Config, *(cls for task in TASKS for cls in recipes(task))]
    assert not launchers & set().union(*map(names_of, tasks))


def recipes(task: str) -> list[type[Config]]:
    """Return the settings of every recipe of a task."""
    return list(import_module(f"{package_of(task)}.recipes").RECIPES.values())


# -- hosts --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Yield one lab for all rows: two real sshd on loopback addresses."""
    hosts = Lab(tmp_path_factory.mktemp("lab")).ready(2)
    yield hosts
    hosts.stop()


def launched(
    lab: Lab, words: str, capsys: pytest.CaptureFixture[str], settings: str = ""
) -> tuple[int, str]:
    """Return what `./run-ssh WORDS hosts.txt -- true` answers, with settings of the first host."""
    python = f"python={lab.cheap_python()}"
    first, second = (f"{host.line} {python}" for host in lab.hosts)
    if "=" in settings:
        first = f"{lab.hosts[0].line} {settings if 'python=' in settings else python + settings}"
    elif settings:
        first = settings
    Path("hosts.txt").write_text(f"{first}\n{second}\n")
    before, _, after = words.partition("HOSTS")
    return answer(f"./run-ssh --ssh-config {lab.config} {before} hosts.txt {after}", capsys)


UNFIT = [
    (" interface=eth9", 78, "there is no device eth9 with an address; there are: "),
    (" workdir=/data/nothere", 78, "there is no folder /data/nothere; name another with workdir="),
    ("python=/opt/none/python", 78, "/opt/none/python: No such file or directory; name another"),
    ("127.0.0.1:4", 69, "refuses connections; for 4 processes write slots=4 in place of :4"),
    ("127.0.0.1:1023", 69, "for 1023 processes write slots=1023 in place of :1023"),
    ("nowhere.invalid", 69, "there is no host named nowhere.invalid"),
]


@pytest.mark.parametrize(("settings", "expected", "says"), UNFIT)
def test_a_host_that_does_not_fit(lab, settings, expected, says, capsys):
    """A line of the host file that is well-formed and invalid: named before the start."""
    code, message = launched(lab, "--dry-run HOSTS -- true", capsys, settings)
    assert says in message
    assert code == expected


def test_a_host_without_torch(lab, capsys):
    """The interpreter is named, and both ways out."""
    bare = lab.cheap_python(torch="", name="bare")
    code, message = launched(lab, "--dry-run HOSTS -- true", capsys, f"python={bare}")
    assert f"{bare} has no torch; install the same on all hosts, or let --sync" in message
    assert code == 78


KEYS = [
    ("none", "there is no key to log in with; type: ssh-keygen -t ed25519, then ssh-copy-id -p"),
    ("stranger", "none of 1 key was accepted, or the account is disabled; type: ssh-copy-id -p"),
    ("locked", "locked needs a passphrase; type: ssh-add"),
]


@pytest.mark.parametrize(("key", "says"), KEYS)
def test_a_key_that_opens_nothing(lab, key, says, folder, capsys):
    """What is wrong with the login, and the command that mends it."""
    if key != "none":
        secret = "word" if key == "locked" else ""
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", secret, "-f", folder / key]
        subprocess.run(command, check=True)
    before = lab.config.read_text()
    lab.config.write_text(before.replace(str(lab.key), str(folder / key)))
    try:
        code, message = launched(lab, "--dry-run HOSTS -- true", capsys)
    finally:
        lab.config.write_text(before)
    assert says in message
    assert code == 77


@pytest.mark.parametrize("changed", [False, True])
def test_a_host_key(lab, changed, capsys):
    """Unknown: the fingerprint and what to type; changed: said loudly, also with --accept-new."""
    first = lab.hosts[0]
    known_hosts = f"{first.known_as} {lab.hosts[1].public_key}\n" if changed else ""
    lab.known_hosts.write_text(known_hosts)
    try:
        accept = "--accept-new " * changed
        code, message = launched(lab, f"{accept}--dry-run HOSTS -- true", capsys)
    finally:
        lab.trust()
    assert ("has CHANGED" if changed else "--accept-new") in message
    assert ("ssh-keygen" if changed else "SHA256:") in message
    assert code == 77


def test_a_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    """Removed under the shell: no traceback, but a line."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    code, message = answer("./run-ssh --dry-run -H 127.0.0.9 -- true", capsys)
    monkeypatch.chdir(tmp_path)
    assert (code, message) == (
        64,
        "error: the folder that this was typed in is gone; type: cd to another one\n",
    )


def test_what_sync_would_bring_is_no_reason_to_refuse(lab, folder, capsys):
    """Without --sync other code is named; with it, --check and --dry-run look past it."""
    for args in (["init", "-q"], ["add", "train.py"]):
        subprocess.run(["git", "-C", folder, *args], check=True)
    remote = f" workdir={lab.folder}"
    code, message = launched(lab, "--dry-run HOSTS -- true", capsys, remote)
    assert "code: train.py is missing; copy it from here with --sync" in message
    assert code == 78
    for option in ("--check", "--dry-run"):
        code, message = launched(lab, f"--sync {option} HOSTS -- true", capsys, f"{remote}/none")
        assert code == 0, message
    assert "hosts.txt" not in message


def test_a_look_without_a_task_asks_for_no_data(lab, folder, capsys):
    """--check is green on a fresh clone, and --dry-run shows the demo, which it does not make."""
    code, message = launched(lab, "--check HOSTS", capsys)
    assert code == 0, message
    assert "shards" not in message
    code, message = launched(lab, "--dry-run HOSTS", capsys)
    assert code == 0, message
    assert f"catdog --recipe demo --data {folder}/data/demo/shards" in message
    assert not (folder / "data").exists()


def test_data_that_no_host_has(lab, capsys):
    """The folder, the host, and how to make one."""
    code, message = launched(lab, "--dry-run HOSTS catdog --data nodata", capsys)
    assert "no shards at " in message
    assert "type: ./run-local convert --help" in message
    assert code == 65


def test_a_host_or_a_port_that_is_taken(lab, capsys):
    """Who has it, or that it is in use; an image that is not there, or no docker."""
    first = lab.hosts[0]
    with socket.create_server((first.address, 0)) as taken:
        port = taken.getsockname()[1]
        code, message = launched(lab, f"--port {port} --dry-run HOSTS -- true", capsys)
    assert f"cannot listen there: port {port}: Address already in use" in message
    assert code == 78
    path = f"/tmp/rackrun-{first.address}-{first.port}.lock"
    with os.fdopen(lock(path, shared=False)):
        code, message = launched(lab, "--dry-run HOSTS -- true", capsys)
    assert "in use by another run: " in message
    assert code == 78
    code, message = launched(lab, "--image no/such:image --dry-run HOSTS -- true", capsys)
    assert "image: " in message
    assert "docker" in message
    assert code == 78


def test_the_options_that_go_behind_a_task_are_those_of_training():
    """A hint names none that a task does not have, nor one of the launcher."""
    assert set(OF_TASKS) <= {option.name for option in options(Config)}
    assert not set(OF_TASKS) & names_of(SshOptions)
