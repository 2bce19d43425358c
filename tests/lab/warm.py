"""Python processes that start at once: forked from one that has imported torch, or the launcher."""

import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import IO, Any, Self

from tests.lab import warm_server, warm_shell

ROOT = Path(__file__).resolve().parents[2]
IN_A_WORKER = "PYTEST_XDIST_WORKER" in os.environ
STARTED_BY = os.getppid() if IN_A_WORKER else os.getpid()  # workers are children of one pytest
RUN = os.environ.get("PYTEST_XDIST_TESTRUNUID", STARTED_BY)


@cache
def server(kind: str) -> Path:
    """Return the socket of the server of this kind, one for all workers of pytest."""
    folder = Path(tempfile.gettempdir()) / f"rackrun-warm-{kind}-{RUN}"
    folder.mkdir(exist_ok=True)
    listening = folder / "python"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not listening.exists():
            server = subprocess.Popen(
                [sys.executable, warm_server.__file__, listening, str(STARTED_BY), kind],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            while not listening.exists():
                assert server.poll() is None, "the server of tests/lab/warm_server.py has ended"
                time.sleep(0.05)
            server.returncode = 0  # not waited for
    return listening


class Process:
    """What `python WORDS` would start, forked from a server of this kind; used as a Popen is."""

    kind: str

    def __init__(
        self,
        *args: object,
        cwd: Path | None = None,
        env: dict[str, str] | None = None,
        stdin: Any = None,
        stdout: Any = None,
        stderr: Any = None,
        start_new_session: bool = False,
        project: str | None = None,
        errors: str = "strict",
        text: bool = True,
    ) -> None:
        self.args = [str(arg) for arg in args]
        self.returncode: int | None = None
        assert text, "streams of bytes are not offered"
        self.errors = errors
        with contextlib.ExitStack() as theirs:
            self.stdin, into = self._stream(stdin, 0, theirs)
            self.stdout, out = self._stream(stdout, 1, theirs)
            self.stderr, err = self._stream(stderr, 2, theirs)
            request = {
                "words": self.args,
                "folder": str(cwd or Path.cwd()),
                "environment": dict(os.environ if env is None else env),
                "session": start_new_session,
                "project": project,
            }
            self._server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._server.connect(os.fspath(server(self.kind)))
            streams = [into, out, out if stderr == subprocess.STDOUT else err]
            socket.send_fds(self._server, [json.dumps(request).encode()], streams)
        self.pid = int(self._server.recv(64))
        self._read: dict[Any, bytes] = {self.stdout: b"", self.stderr: b""}

    def _stream(
        self, wanted: Any, number: int, theirs: contextlib.ExitStack
    ) -> tuple[IO[str] | None, int]:
        """Return our end of a stream, where it is a pipe, and the descriptor of the process."""
        if wanted == subprocess.DEVNULL:
            return None, theirs.enter_context(Path(os.devnull).open("r+b", 0)).fileno()
        if wanted != subprocess.PIPE:
            given = number if wanted in (None, subprocess.STDOUT) else wanted
            return None, given if isinstance(given, int) else given.fileno()
        read, write = os.pipe()
        ours, descriptor = (write, read) if number == 0 else (read, write)
        theirs.callback(os.close, descriptor)
        return open(ours, "r" if number else "w", errors=self.errors), descriptor  # noqa: PTH123

    def poll(self) -> int | None:
        """Return the exit code, None while it runs."""
        if self.returncode is None and select.select([self._server], [], [], 0)[0]:
            self.returncode = int(self._server.recv(64) or 1)
            self._server.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end; return the exit code."""
        if self.returncode is None and not select.select([self._server], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        code = self.poll()
        assert code is not None
        return code

    def communicate(self, text: str | None = None, timeout: float | None = None) -> tuple[str, str]:
        """Write (64 KiB at most), read both streams to their ends, wait; may be asked again."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        if self.stdin and not self.stdin.closed:
            with contextlib.suppress(BrokenPipeError), self.stdin:
                self.stdin.write(text or "")
        with selectors.DefaultSelector() as waiting:
            for stream in self._read:
                if stream and not stream.closed:
                    waiting.register(stream, selectors.EVENT_READ)
            while waiting.get_map():
                left = None if timeout is None else max(deadline - time.monotonic(), 0)
                ready = waiting.select(left)
                if not ready:
                    raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
                for stream in [key.fileobj for key, _ in ready]:
                    data = os.read(stream.fileno(), 1 << 16)
                    self._read[stream] += data
                    if not data:
                        waiting.unregister(stream)
                        stream.close()
        self.wait(None if timeout is None else max(deadline - time.monotonic(), 0))
        return self._text(self.stdout), self._text(self.stderr)

    def _text(self, stream: IO[str] | None) -> str:
        """Return what communicate() has read, with the ends of lines that a text file has."""
        text = self._read[stream].decode(errors=self.errors)
        return text.replace("\r\n", "\n").replace("\r", "\n")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for stream in (self.stdin, self.stdout, self.stderr):
            if stream:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.wait()


class Python(Process):
    """One that has imported torch."""

    kind = "torch"


class Launcher(Process):
    """The same for `python -m rackrun ./run-ssh ...`, whose imports are those of this tree."""

    kind = "launcher"


def run(
    *args: object, start: type[Python] = Python, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` to its end and return its code and output."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start(*args, **{**streams, **options}) as process:
        out, err = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


_numbers = itertools.count(random.randrange(1000))  # other runs of pytest have the same ranges


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port of an address that nothing listens on.

    Below those that the kernel gives to connections, and from a range of this worker of pytest
    (at most five), so that nobody takes it before the one that it is for.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 10_000 + (worker % 5 * 4 + os.getpid() % 4) * 1000
    while True:
        port = first + next(_numbers) % 1000
        with contextlib.suppress(OSError), socket.create_server((address, port)):
            return port


def ranks(world: int, *args: object, env: dict[str, str], **options: Any) -> list[Python]:
    """Start the ranks of a job on one host, as torchrun would."""
    world_of = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port("")),
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
