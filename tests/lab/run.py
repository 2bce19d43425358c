"""Type a command line as a user would: in a process of its own, whose imports are done."""

import fcntl
import os
import select
import shlex
import struct
import subprocess
import termios
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pyte

from tests.lab import warm

MAIN = warm.ROOT / "rackrun" / "__main__.py"
SCRIPTS = ("./run-local", "./run-ssh", "./run-ray")
LAUNCHER = ("ssh", "check", "ps", "rack", "attach", "logs", "status", "stop", "completion")
"""Commands that never import torch."""
Content = str | bytes | Callable[[Path], object]
"""Of a file; a function makes what lies at the path."""


@dataclass(frozen=True)
class Result:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str
    folder: Path
    """Where it was typed."""

    @property
    def said(self) -> str:
        """Return both streams, output first."""
        return self.out + self.err

    @property
    def lines(self) -> list[str]:
        """Return the lines of both streams that are not empty."""
        return [line for line in self.said.splitlines() if line.strip()]


def run(
    line: str | list[str],
    folder: Path,
    *,
    env: Mapping[str, str | None] | None = None,
    stdin: str = "",
    seconds: float = 240.0,
) -> Result:
    """Run a command line in a folder to its end: `rackrun ...`, `./run-ssh ...`, `python ...`.

    The user's home is `folder/home`, unless `env` names another; None in `env` unsets a variable.
    TimeoutExpired after `seconds`.
    """
    with start(line, folder, env=env) as process:
        try:
            out, err = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        return Result(process.wait(), out, err, folder)


def start(
    line: str | list[str],
    folder: Path,
    *,
    env: Mapping[str, str | None] | None = None,
    terminal: "Terminal | None" = None,
) -> warm.Process:
    """Start what `run` runs, and let it go on, with pipes or on a terminal."""
    words = shlex.split(line) if isinstance(line, str) else list(line)
    changes: dict[str, str | None] = {"HOME": os.fspath(folder / "home"), **(env or {})}
    # Other programs, such as pytest-xdist, set the size of a terminal: ours has its own.
    before = {name: os.environ[name] for name in os.environ if name not in ("COLUMNS", "LINES")}
    merged = {name: value for name, value in {**before, **changes}.items() if value is not None}
    Path(merged.get("HOME", folder)).mkdir(parents=True, exist_ok=True)
    program, arguments = _program(words)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return program(
        *arguments,
        cwd=folder,
        env={**merged, "PYTHONPATH": os.fspath(warm.ROOT)},
        project=os.fspath(_project()),
        **(terminal.streams if terminal else pipes),
    )


class Terminal:
    """A real terminal, with a copy of what it shows."""

    def __init__(self, columns: int = 120, lines: int = 30) -> None:
        self.ours, self.theirs = os.openpty()
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(self.theirs)
        self.screen = pyte.Screen(columns, lines)
        self.stream = pyte.ByteStream(self.screen)
        self.bytes = b""
        self.shown = ""

    @property
    def streams(self) -> dict[str, Any]:
        """Return the options of a process that has it as its terminal."""
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), self.theirs)
        return {**streams, "start_new_session": True}

    def type(self, keys: bytes) -> None:
        os.write(self.ours, keys)

    def skip(self) -> None:
        """Let what can be read be gone."""
        while select.select([self.ours], [], [], 0)[0]:
            os.read(self.ours, 1 << 16)

    def text(self) -> str:
        """Return the text on the screen."""
        before = len(self.bytes)
        while select.select([self.ours], [], [], 0)[0]:
            data = os.read(self.ours, 1 << 16)
            self.bytes += data
            self.stream.feed(data)
        if len(self.bytes) > before:  # to draw it takes milliseconds, and tests ask all the time
            self.shown = "\n".join(line.rstrip() for line in self.screen.display)
        return self.shown

    def shows(self, text: str) -> bool:
        return text in self.text()

    def restored(self) -> bool:
        """Return True when cursor and settings are as before."""
        self.text()
        return not self.screen.cursor.hidden and termios.tcgetattr(self.theirs) == self.before


def write(folder: Path, files: Mapping[str, Content]) -> Path:
    """Write files by name into a folder, and return it; a name that ends in `/` makes a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if callable(content):
            content(path)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def _program(words: list[str]) -> tuple[type[warm.Python], list[str]]:
    """Return what forks the command, and the arguments of its Python."""
    if words[0] == "python":
        return warm.Python, words[1:]
    assert words[0] == "rackrun" or words[0] in SCRIPTS, f"{words[0]}: rackrun, {SCRIPTS} or python"
    typed = words[1:] if words[0] == "rackrun" else words
    needs_no_torch = typed[:1] == ["./run-ssh"] or typed[:1] and typed[0] in LAUNCHER
    return (warm.Launcher if needs_no_torch else warm.Python), [os.fspath(MAIN), *typed]


@cache
def _project() -> Path:
    """Return a folder whose `.venv` has torch imported, for what commands start."""
    folder = warm.interpreter().with_name(f"project-{os.getpid()}")
    python = folder / ".venv" / "bin" / "python"
    if not python.exists():
        python.parent.mkdir(parents=True)
        python.symlink_to(warm.interpreter())
    return folder
