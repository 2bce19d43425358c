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


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("2001:db8::7", "1:1: write an IPv6 address in brackets: [2001:db8::7]"),
        ("gpu01 4", "1:7: '4' is not a setting; for processes write slots=4"),
        ("gpu01 slot=4", "1:7: slot= is not a setting; did you mean slots="),
        ("gpu01 np=4", "1:7: np= is not a setting; did you mean slots="),
        ("gpu01\n\ngpu03;rm -rf /", "3:1: ';' cannot be part of a host name"),
        (
            "gpu01 slots=2\ngpu01",
            "2:1: gpu01 is on line 1 already; for more processes write slots=N",
        ),
        (
            "gpu01 workdir=$HOME/x",
            "1:7: workdir=$HOME/x: $HOME is not replaced here; write its value",
        ),
        ("gpu01 env=PATH=/opt/bin:${PATH}", "${PATH} is not replaced here; write its value"),
        ("", "1:1: no host in this file; write one host a line"),
        ("gpu01, gpu02", "1:1: ',' cannot be part of a host name; write one host a line"),
        ("gpu01 gpu02", "1:7: 'gpu02' is not a setting (key=value); write one host a line"),
        ("gpu{01..04}", "'{' cannot be part of a host name; a range is written gpu[01-04]"),
        ("gpu01:0-3", "':0-3': a port is written :22; for some GPUs of a host: --include gpu01:0"),
        ("[workers]\ngpu01", "'[workers]': a range is written gpu[01-16] or gpu[1,4-7]; write one"),
        ("gpu01 ansible_host=10.0.0.1", "is not a setting; write user@gpu01:2299"),
        (
            "all:\n  hosts:",
            "1:4: ':': a port is written :22; this is no YAML: write one host a line",
        ),
        ("- gpu01", "'-': a host name does not begin with a dash; write one host a line"),
        ("gpu01 port=2299 user=root", "port= is not a setting; write user@gpu01:2299"),
    ],
)
def test_a_host_file(content, says, capsys):
    """The line, the column, and how it is written: before any host is contacted."""
    Path("mine.txt").write_text(content)
    code, message = answer("./run-ssh mine.txt -- true", capsys)
    assert code == 64
    assert f"error: mine.txt:{says.partition(':')[0]}" in message or "error: mine.txt:1:" in message
    assert says in message


USAGE = [
    # the words before a task
    (
        "./run-ssh none.txt",
        "none.txt: No such file or directory; write one host a line, or type -H",
    ),
    ("./run-ssh one", "one: Is a directory; write one host a line, or type -H gpu01,gpu02"),
    ("./run-ssh gpu01 catdog", "gpu01: No such file or directory; write one host a line"),
    ("./run-ssh catdog", "catdog is a task; the host file comes first: ./run-ssh hosts.txt catdog"),
    ("./run-ssh train.py", "comes first: ./run-ssh hosts.txt -- python train.py"),
    ("./run-ssh python train.py", "comes first: ./run-ssh hosts.txt -- python train.py"),
    ("./run-ssh --hostfile hosts.txt catdog", "without an option: ./run-ssh hosts.txt catdog"),
    ("./run-local report runs/latest", "runs/latest: no such run; ./run-ssh ps lists the runs"),
    ("./run-local predict a3f2 a.jpg", "a3f2: no such run or file; type another; ./run-ssh ps"),
    ("./run-local doctor --out . a3f2 a3f2", "a3f2: no such run or file; type another; ./run-ssh"),
    ("./run-local completion fish", "not for fish; type: ./run-local completion bash|zsh"),
    ("./run-local completion", "for which shell? type: ./run-local completion bash|zsh"),
    ("./run-ssh logs", "logs of which run? type: ./run-ssh logs RUN; ./run-ssh ps lists all"),
    ("./run-ssh --include gpu09 hosts.txt", "gpu09 is not in the host file; did you mean gpu04?"),
    (
        "./run-ssh --max-restarts 1 --spares 4 hosts.txt",
        "leaves fewer than 1 to train; type --spares 3",
    ),
    ("./run-ssh --chek hosts.txt", "--chek: no such option; did you mean --check? type: ./run-ssh"),
    ("./run-ssh --nproc 2 hosts.txt", "--nproc: write slots=2 after the host's name"),
    ("./run-ssh --nnodes 2 hosts.txt", "--nnodes: the host file says which hosts take part"),
    (
        "./run-ssh --ignore-check cods hosts.txt",
        "--ignore-check cods: no such check; there are: python",
    ),
    ("./run-ssh --ssh-config /nope hosts.txt", "/nope: there is no such ssh_config file"),
    ("./run-local --nprocs 2", "--nprocs: no such option; did you mean --nproc? type: ./run-local"),
    ("./run-local --chek hosts.txt", "--chek: only for hosts: ./run-ssh --check"),
    ("./run-local --max-restart 2", "--max-restart: only for hosts: ./run-ssh --max-restarts"),
    ("./run-local --nproc two", "--nproc two: not a number; type: ./run-local --help"),
    ("./run-local --nnodes 2 catdog", "--nnodes: the host file says which hosts take part"),
    ("./run-local --env NOWHERE catdog", "--env NOWHERE: not set here; type: --env NOWHERE=VALUE"),
    ("./run-local --secret FOO=bar catdog", "type: export FOO=..."),
    # the task
    ("./run-local catdgo", "no task 'catdgo'; did you mean catdog?"),
    ("./run-local conver folder pictures out", "mean convert? type: ./run-local convert folder p"),
    ("./run-local --epochs 3", "goes behind one, as in: ./run-local catdog --epochs"),
    (
        "./run-ssh --data out hosts.txt catdog",
        "as in: ./run-ssh hosts.txt catdog --data",
    ),
    ("./run-local -- python trian.py", "no file trian.py; did you mean train.py?"),
    ("./run-local -- train.py", "train.py: not a program by itself; type: -- python train.py"),
    ("./run-local -- ./cut.zip", "./cut.zip: not a program that can be run; type: chmod +x"),
    ("./run-local -- pyton train.py", "pyton: no such program; did you mean python?"),
    ("./run-local -- no-such-program", "no such program; install it, or type its path"),
    ("./run-local zebra", "for a command of your own: ./run-local -- python train.py"),
    ("./run-local train.py --x", "for a command of your own: ./run-local -- python train.py --x"),
    ("./run-local python train.py", "for a command of your own: ./run-local -- python train.py"),
    ("./run-local --nproc 2 python a.py", "./run-local --nproc 2 -- python a.py"),
    ("./run-local hosts.txt catdog", "for the hosts of a file: ./run-ssh hosts.txt catdog"),
    ("./run-ssh hosts.txt train.py", "your own: ./run-ssh hosts.txt -- python train.py"),
    (
        "./run-local -- torchrun --nproc-per-node 2 train.py --lr 1",
        "torchrun: every rank would start a launcher, and train alone; rackrun starts torchrun"
        " itself, so type: -- python train.py --lr 1;",
    ),
    (
        "./run-ssh hosts.txt -- python3 -m torch.distributed.run train.py",
        "torch.distributed.run: every rank would start a launcher",
    ),
    ("./run-local -- accelerate launch train.py", "type: -- python train.py; ranks per host are"),
    ("./run-local -- env A=1 mpirun -n 2 train.py", "mpirun: every rank would start a launcher"),
    ("./run-local --", "-- needs a command; for example: -- python train.py"),
    # options of the launcher behind the task
    ("./run-local catdog --nproc 2", "--nproc goes before catdog: ./run-local --nproc 2 catdog"),
    (
        "./run-local catdog --nproc_per_node=2 --lr 1",
        "--nproc_per_node=2 catdog --lr 1",
    ),
    ("./run-local catdog --max-restarts 2", "--max-restarts: only for hosts: ./run-ssh"),
    ("./run-ssh hosts.txt catdog --max-restarts 2", "./run-ssh --max-restarts 2 hosts.txt catdog"),
    ("./run-ssh hosts.txt catdog --check", "--check goes before catdog: ./run-ssh --check hosts"),
    ("./run-local catdog --nnodes 2", "--nnodes: the host file says which hosts take part"),
    # options of a task
    (
        "catdog --epoch 3",
        "--epoch: no such option; did you mean --epochs? type: ./run-local",
    ),
    ("catdog --epochs three", "--epochs three: not a number; type: ./run-local catdog --help"),
    ("catdog --epochs 0", "--epochs 0 is not 1 or more"),
    ("catdog --recipe demoo", "no recipe 'demoo'; did you mean demo?"),
    ("catdog --global-batch 64", "--global-batch needs --exact-epochs"),
    ("catdog --exact-epochs --aug-repeats 4", "type --aug-repeats 1"),
    ("catdog", "no data: type --data FOLDER|URL (make it with `./run-local convert catdog"),
    ("catdog --model resnet51 --data x", "--model resnet51: no such model; did you mean resnet"),
    ("catdog --model timm:resnet51 --data x", "no such model; did you mean timm:resnet"),
    ("catdog --model refrence --data x", "did you mean reference"),
    ("catdog --extra-data x --data x", "--extra-data x: 'x' is not NAME=WEIGHT"),
    # data, found before a run folder exists
    (
        "./run-local catdog --data demo/shards --extra-data demo/shards=1,/nope=2",
        "/nope: there is no such folder; to make one, type:",
    ),
    (
        "./run-local catdog --data demo/shards --weights demo/shards/dataset.jsn",
        "--weights demo/shards/dataset.jsn: no such file; did you mean demo/shards/dataset.json?",
    ),
    ("./run-local catdog --data demo/shards --weights imagent", "did you mean imagenet?"),
    ("./run-local catdog --data demo/shards --weights demo", "--weights demo: no such file"),
    (
        "./run-local catdog --data /nope",
        "/nope: there is no such folder; to make one, type:",
    ),
    ("./run-local catdog --data pictures", "convert them: ./run-local convert folder pictures OUT"),
    (
        "./run-local catdog --data train.zip",
        "for cats and dogs: ./run-local convert catdog train",
    ),
    (
        "./run-local catdog --data others",
        "of another program, type: ./run-local convert index",
    ),
    ("./run-local catdog --data demo", "not a finished shard folder; did you mean demo/shards?"),
    ("./run-local catdog --data s3://b/x", "data are read from a folder or from http(s)://"),
    (
        "./run-ssh hosts.txt catdog --data s3://b/x",
        "data are read from a folder or from http(s)://",
    ),
    # conversion and serving
    (
        "convert folder flat out",
        "0 class folders in it, at least 2 are needed; expected SRC",
    ),
    (
        "convert folder one out",
        "1 class folder in it, at least 2 are needed; expected SRC",
    ),
    ("convert folder pictures pictures/out", "pictures/out"),
    ("convert folder pictures out --val-percent 200", "--val-percent"),
    ("convert folder pictures out --shortside 9", "--shortside: no such option"),
    (
        "convert catdgo train.zip out",
        "did you mean catdog? type: ./run-local convert --help",
    ),
    ("nginx", "FOLDER: missing; type: ./run-local serve --help"),
    ("nginx others --json", "--json: no such option; type: ./run-local serve --help"),
]


@pytest.mark.parametrize(("typed", "says"), USAGE)
def test_a_command_line(typed, says, folder, capsys):
    """One line, code 64, and nothing is made or contacted."""
    before = sorted(folder.rglob("*"))
    code, message = answer(typed, capsys)
    assert says in message
    assert (code, message.count("\n")) == (64, 1), message
    assert sorted(folder.rglob("*")) == before


OTHERWISE = [
    ("convert folder pictures /proc/out", 74, "No such file or directory; name another folder"),
    ("convert folder pictures train.py/out", 74, "Not a directory; name another folder"),
    (
        "convert catdog cut.zip out",
        65,
        "cut off, damaged, or no zip archive (it has no table of contents); download it again",
    ),
    ("convert verify others", 64, "not a finished shard folder (dataset.json is missing)"),
    ("convert verify demo/shards", 65, "demo/shards"),
]


@pytest.mark.parametrize(("typed", "expected", "says"), OTHERWISE)
def test_a_failure_that_is_no_mistake_in_the_words(typed, expected, says, capsys):
    """What the machine or the data refuse has an exit code of its own, and no traceback."""
    code, message = answer(typed, capsys)
    assert says in message
    assert "Traceback" not in message
    assert code == expected


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
