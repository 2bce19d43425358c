"""Type a command line as a user would: in a process of its own, whose imports are done."""

import os
import shlex
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

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
    words = shlex.split(line) if isinstance(line, str) else list(line)
    changes: dict[str, str | None] = {"HOME": os.fspath(folder / "home"), **(env or {})}
    merged = {name: value for name, value in {**os.environ, **changes}.items() if value is not None}
    Path(merged.get("HOME", folder)).mkdir(parents=True, exist_ok=True)
    start, arguments = _program(words)
    with start(
        *arguments,
        cwd=folder,
        env={**merged, "PYTHONPATH": os.fspath(warm.ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        project=os.fspath(_project()),
    ) as process:
        try:
            out, err = process.communicate(stdin, timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    return Result(process.returncode, out, err, folder)


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
