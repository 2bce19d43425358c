"""This machine as the only host of a launch, or as one node of a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from rackrun.errors import MissingPackage, MissingProgram
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.output.console import say
from rackrun.launcher.remote.files import project_python
from rackrun.launcher.run.job import Work, is_own_command
from rackrun.machine import typed_folder

LOOPBACK = "127.0.0.1"


def interpreter(python: str, work: Work) -> str:
    """Return the interpreter of the ranks, which are started in another folder than this one."""
    if "/" in python:
        return str(Path(python).absolute())
    if of_project := project_interpreter(work, python):
        return of_project
    if not python and find_spec("torch") is None:
        raise MissingPackage("torch")
    return python or sys.executable


def project_interpreter(work: Work, python: str) -> str:
    """Return the interpreter of the project that the current folder is, if ranks are to use it."""
    return project_python(str(typed_folder())) if is_own_command(work) and not python else ""


def fill_environment(python: str) -> None:
    """Have uv fill the environment of the project in the current folder, whose interpreter this is.

    Whatever the lock does not name stays, such as a package of an extra.
    """
    other = "for another environment type --python"
    say(f"ranks use {python}, the environment of uv.lock; {other}")
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        if not Path(python).exists():
            raise MissingProgram(f"uv.lock: there is no uv here; type: pip install uv; {other}")
        return
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    # that of rackrun, about which uv would warn
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    command = [uv, "sync", "--frozen", "--inexact", *quiet]
    if subprocess.run(command, env=environment, check=False).returncode:
        raise PreflightRefused(f"uv sync --frozen failed; see the lines above; {other}")
