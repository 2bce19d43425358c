"""Python processes that start at once: forked from one that has imported torch, or the launcher."""

import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

from rackrun.launcher.transport.local import free_port
from tests.lab import warm_server, warm_shell

ROOT = Path(__file__).parents[2]
OF_MUTANTS = (
    "MUTANT_UNDER_TEST",
    "MUTANTS_REACHED",
)  # of tests/mutation, for all that a test starts
COLLECTED_BY = os.getpid()  # workers of pytest are forked from this process


@cache
def server(kind: str) -> Path:
    """Return the socket of the server of this kind, one for all workers of pytest."""
    folder = Path(tempfile.gettempdir()) / f"rackrun-warm-{kind}-{COLLECTED_BY}"
    folder.mkdir(exist_ok=True)
    listening = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listening.exists():
            server = subprocess.Popen(
                [sys.executable, warm_server.__file__, listening, str(COLLECTED_BY), kind],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            while not listening.exists():
                assert server.poll() is None, "the server of tests/lab/warm_server.py has ended"
                time.sleep(0.05)
            server.returncode = 0  # not waited for
    return listening


class Python(subprocess.Popen[str]):
    """What `python WORDS` would start, forked from the server, which reports how it ended."""

    kind = "torch"

    def __init__(self, *args: object, project: str | None = None, **options: Any) -> None:
        self.project = project
        super().__init__([str(arg) for arg in args], **{"text": True, **options})

    def _execute_child(self, args: list[str], *rest: Any) -> None:
        """Have it forked by the server."""
        folder, environment = rest[4:6]
        pipes, session = rest[9:15], rest[20]
        streams = [
            pipe if pipe != -1 else options
            for options, pipe in enumerate(pipes[i] for i in (0, 3, 5))
        ]
        request = {
            "words": args,
            "folder": str(folder or Path.cwd()),
            "environment": {
                **{name: os.environ[name] for name in OF_MUTANTS if name in os.environ},
                **(os.environ if environment is None else environment),
            },
            "session": session,
            "project": self.project,
        }
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.server.connect(os.fspath(server(self.kind)))
        socket.send_fds(self.server, [json.dumps(request).encode()], streams)
        self.pid = int(self.server.recv(64))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *rest: Any, **more: Any) -> int | None:
        if self.returncode is None and select.select([self.server], [], [], 0)[0]:
            self.returncode = int(self.server.recv(64) or 1)
            self.server.close()
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None and not select.select([self.server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self._internal_poll()
        assert self.returncode is not None
        return self.returncode


class Launcher(Python):
    """The same for `python -m rackrun.launcher ...`, whose imports are those of this tree."""

    kind = "launcher"


def run(
    *args: object, start: type[Python] = Python, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end and return its code and output."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(*args, **{**streams, **options}) as process:
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ranks(world: int, *args: object, env: dict[str, str], **options: Any) -> list[Python]:
    """Start the ranks of a job on one host, as torchrun would."""
    world_of = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
    }
    return [
        Python(
            *args, env={**env, **world_of, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **options
        )
        for rank in range(world)
    ]


def shell() -> Path:
    """Return the socket of the server that has imported torch."""
    return server("torch")


@cache
def interpreter() -> Path:
    """Return a script to give to commands as `python`: what it starts has imported torch."""
    path = shell().with_name(f"python-{os.getpid()}")
    warm_shell.write_client(path, shell())
    return path
