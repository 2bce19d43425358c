"""The environment of a project with a uv.lock, on this machine: for the user's own commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from rackrun.errors import MissingProgram
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.output.console import say
from rackrun.launcher.remote.interpreter import describe
from rackrun.launcher.run.job import FunctionCall, Work

OTHER = "for another environment type --python"


def fill_environment(work: Work, python: str) -> None:
    """Have uv fill the environment of the project in the current folder, whose interpreter this is.

    Raises PreflightRefused or MissingProgram if ranks of this work cannot run in it. Whatever the
    lock does not name stays, such as a package of an extra.
    """
    say(f"ranks use {python}, the environment of uv.lock; {OTHER}")
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None and not Path(python).exists():
        raise MissingProgram(f"uv.lock: uv is not installed here; type: pip install uv; {OTHER}")
    if uv and _sync(uv):
        raise PreflightRefused(f"uv sync --frozen failed; see the lines above; {OTHER}")
    needed = ("rackrun",) if isinstance(work, FunctionCall) else ()
    found = describe([python], needed, str(Path.cwd()))
    if "error" in found:
        raise PreflightRefused(f"{found['error']}; {OTHER}")
    missing = found["missing"] if found["torch"] else ["torch"]
    if missing:
        add = f"type: uv add {missing[0]}, or uv sync --extra NAME if an extra has it"
        raise PreflightRefused(f"{python} has no {missing[0]}; {add}; {OTHER}")


def _sync(uv: str) -> int:
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    # that of rackrun, about which uv would warn
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    command = [uv, "sync", "--frozen", "--inexact", *quiet]
    return subprocess.run(command, env=environment, check=False).returncode
