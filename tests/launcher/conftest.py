"""Fixtures of the launcher's tests."""

import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.transport.local import free_port
from tests.lab import warm
from tests.lab.detached import DetachedLab
from tests.lab.hosts import Lab, processes_with, root, user, users
from tests.lab.needs import need
from tests.lab.network import NetLab
from tests.lab.waiting import until
from tests.lab.warm import ROOT


@pytest.fixture
def detached(start_lab: Callable[[int], Lab]) -> Iterator[DetachedLab]:
    """Yield three hosts for a detached run; end what is left of it."""
    lab = DetachedLab(start_lab(3))
    yield lab
    lab.kill()


@pytest.fixture
def detached_on_one(start_lab: Callable[[int], Lab]) -> Iterator[DetachedLab]:
    """Yield the same with one host."""
    lab = DetachedLab(start_lab(1))
    yield lab
    lab.kill()


@pytest.fixture
def pair(net: Callable[[int], NetLab]) -> NetLab:
    """Return two hosts behind cables."""
    return net(2)


def project(lab: Lab) -> Path:
    """Make a working tree under git: a script, a package, a link, an ignored file."""
    folder = lab.folder / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("from package import words\nprint(words.HELLO)\n")
    (folder / "package" / "words.py").write_text("HELLO = 'hello from the tree'\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho run\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    (folder / ".gitignore").write_text("ignored\nruns/\n")
    (folder / "ignored").write_text("stays here\n")
    subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
    return folder


@pytest.fixture
def passable() -> Iterator[Lab]:
    """Yield a lab in a folder that other accounts can enter; pytest closes its own to them."""
    need("root")
    folder = Path(tempfile.mkdtemp(prefix="rackrun-passable-"))
    folder.chmod(0o755)
    lab = Lab(folder)
    yield lab
    lab.stop()
    shutil.rmtree(folder)


@pytest.fixture
def account(passable: Lab) -> Iterator[Lab]:
    """Yield such a lab with an account of its own, which may read what its sshd has to."""
    root("useradd", "--no-create-home", "--home-dir", "/", "--shell", "/bin/bash", user())
    root("usermod", "--password", "*", user())  # neither a password nor locked
    yield passable
    passable.stop()
    until(lambda: user() not in users(), "no process of the account is left", 20)
    root("userdel", user())


@pytest.fixture
def mounted() -> Iterator[Callable[..., None]]:
    """Yield `mounted(folder, options)`, which mounts a small file system there for the test."""
    need("root")
    made: list[str] = []

    def mount(folder: Path, *options: str) -> None:
        root("mount", *(options or ("--bind", str(folder))), str(folder))
        made.append(str(folder))

    yield mount
    for folder in reversed(made):
        root("umount", "--lazy", folder)


TMPFS = ("-t", "tmpfs", "none", "-o")


PIECES = [
    *("'", '"', "$(touch canary)", "`id`", "$$", "${local_rank}", "$HOME", "\\", "\n", "\t", " "),
    *(";", "&", "|", ">", "<", "*", "?", "~", "!", "#", "%n", "%s", "{}", "--", "-o", "=", ","),
    *("\r", "\x1b[31m", "\x7f", "é", "漢字", "🐈", "\u202e", "\udc80", "\udcff", "a", "0"),
]


def hostile(count: int, seed: int, pieces: Sequence[str] = PIECES) -> list[str]:
    chance = random.Random(seed)
    return ["".join(chance.choices(pieces, k=chance.randrange(9))) for _ in range(count)]


SAY = "import os; print(*(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'RACKRUN_RUN_FOLDER')))"


class Nodes:
    """Some launchers of one run on loopback, and every process that descends from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.canary = f"RUN_CANARY={uuid.uuid4()}"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, node: int, nodes: int, *args: str) -> subprocess.Popen[str]:
        """Start one launcher as a scheduler does."""
        name, _, value = self.canary.partition("=")
        given = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "NNODES": str(nodes),
            "NODE_RANK": str(node),
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            name: value,
        }
        self.started.append(
            warm.Launcher(
                *("-m", "tests.lab.cheap_node", "--runs", str(self.folder), *args),
                cwd=ROOT,
                env={**os.environ, **given},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
        return self.started[-1]

    def start_all(self, nodes: int, *args: str) -> list[subprocess.Popen[str]]:
        """Start this many launchers, the last one first."""
        return [self.start(node, nodes, *args) for node in reversed(range(nodes))][::-1]

    @property
    def run(self) -> Path:
        """Return the only run folder."""
        (run,) = self.folder.glob("2*")
        return run

    def left(self) -> dict[int, str]:
        """Return the processes that still run."""
        return processes_with(self.canary)

    def stop(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    some = Nodes(tmp_path / "runs")
    yield some
    some.stop()


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Wait for all; return the exit code, output and messages of each."""
    return [
        (process.returncode, out, err)
        for process, (out, err) in [(process, process.communicate()) for process in processes]
    ]


def python(script: str, *args: str) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", script, *args)


def connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port))
    except ConnectionRefusedError:
        return None


HONEST = {"node": 1, "nodes": 2, "processes": 1, "name": "n1", "job": "", "resume": ""}


def agreed(**changes: Any) -> dict[str, Any]:
    return {
        **{"run_id": "0" * 32, "folder": RUN, "names": ["n0", "n1"], "slots": [1, 1]},
        **changes,
    }


RUN = "20260101-120000-toy"
