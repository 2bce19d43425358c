"""What ranks would run on: an interpreter of the host, or one in a container image."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from rackrun.launcher.remote.disks import call_within
from rackrun.launcher.remote.files import INSTALLED, project_python
from rackrun.launcher.remote.locks import user_name
from rackrun.launcher.remote.processes import run_program

INTERPRETER_SECONDS = 20.0
DOCKER_SECONDS = 30.0
SHARDS_SECONDS = 30.0  # for a manifest and a shard; a server that drips would never end
FILES_SECONDS = 10.0  # more for a process that waits for a dead file server, and stays

OPTIONAL = {"archs", "missing"}
"""Keys that the program below does not always print."""

DESCRIBE = """\
import glob, importlib.util, json, mmap, os, re, sys
facts = {"version": "%d.%d.%d" % sys.version_info[:3], "torch": "", "cuda": ""}
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    version = {}
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        exec(file.read(), version)
    facts.update(torch=version["__version__"], cuda=version.get("cuda") or "")
    library = os.path.join(os.path.dirname(spec.origin), "lib", "libtorch_python.so")
    if facts["cuda"] and glob.glob("/dev/nvidia[0-9]*") and os.path.exists(library):
        with open(library, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            offset = data.find(b"\\0sm_")
            while offset >= 0 and "archs" not in facts:
                text = data[offset + 1 : data.find(b"\\0", offset + 1)]
                if re.fullmatch(rb"((sm|compute)_[0-9]+[a-z]? ?)+", text):
                    facts["archs"] = text.decode()
                offset = data.find(b"\\0sm_", offset + 1)
sys.path.insert(0, sys.argv[1])
facts["missing"] = [name for name in sys.argv[2:] if importlib.util.find_spec(name) is None]
print(json.dumps(facts))
"""
"""Run by the interpreter of the ranks: read torch's version without the cost of importing it.

On a host with GPUs, also find the architectures that torch was built for, in its library.
"""


def find_interpreter(workdir: str, python: str, own_command: bool) -> str:
    """Return the interpreter that was named, or else the one that a run in a folder uses.

    `own_command`: the environment of a project with a uv.lock comes before rackrun's.
    """
    if python:
        path = os.path.expanduser(python)
        return os.path.join(workdir, path) if "/" in path else shutil.which(path) or path
    for interpreter in (
        project_python(workdir) if own_command else "",
        os.path.join(workdir, INSTALLED, ".venv", "bin", "python"),
        os.path.join(workdir, ".venv", "bin", "python"),
    ):
        if os.path.exists(interpreter):
            return interpreter
    return shutil.which("python3") or "python3"


def behind_shim(workdir: str, interpreter: str) -> str:
    """Return what a shim of pyenv, asdf or mise starts in a folder; any other interpreter as it is.

    It is looked at, and started, in other folders than its ranks run in.
    """
    if os.path.basename(os.path.dirname(interpreter)) != "shims" or not os.path.isdir(workdir):
        return interpreter
    return _executable_of([interpreter], workdir) or interpreter


def after_setup(before: list[str], interpreter: str) -> str:
    """Return the python3 that a host's setup leaves first on PATH, as `conda activate` does.

    `before` is the setup, and the working directory; where it fails, `describe` says why.
    """
    return _executable_of([*before, "python3"]) or interpreter


def _executable_of(command: list[str], workdir: str | None = None) -> str:
    """Return the interpreter that a command starts; empty where none answers."""
    program = "import sys; print(sys.executable)"
    try:
        done = run_program([*command, "-c", program], INTERPRETER_SECONDS, workdir)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.decode(errors="replace").strip()


def describe(
    command: list[str], packages: Sequence[str] = (), workdir: str = "/"
) -> dict[str, Any]:
    """Return the versions of an interpreter, which this command starts, and of its torch.

    Also which of these packages it lacks; the ranks find those in their working directory as well.
    """
    interpreter = command[-1]
    try:
        completed = run_program([*command, "-c", DESCRIBE, workdir, *packages], INTERPRETER_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"{interpreter} does not answer"}
    except OSError as error:
        return {"error": f"{interpreter}: {error.strerror}"}
    try:
        facts = {} if completed.returncode else json.loads(completed.stdout)
        if not isinstance(facts, dict) or set(facts) - OPTIONAL != {"version", "torch", "cuda"}:
            raise TypeError
        reported = facts.pop("missing", ())
        missing = [name for name in packages if name in reported]
        return {**{name: str(value) for name, value in facts.items()}, "missing": missing}
    except (TypeError, ValueError, RecursionError):
        lines = completed.stderr.decode(errors="replace").strip().splitlines()
        of_docker = [line for line in lines if line.startswith("docker: ")]
        return {"error": f"{interpreter}: {[*of_docker, *lines[-1:], 'no answer'][0]}"}


def image(
    name: str, command: list[str], packages: Sequence[str] = (), workdir: str = "/"
) -> dict[str, Any]:
    """Return the id of a container image, and facts about the interpreter that `command` runs."""
    try:
        digest = _docker("image", "inspect", "--format", "{{.Id}}", name)
        if not digest:
            return {"error": _why_no_image(name)}
    except OSError as error:
        return {"error": f"docker: {error.strerror}; install it, or leave out --image"}
    except subprocess.TimeoutExpired:
        return {"error": f"docker does not answer within {DOCKER_SECONDS:g} s; is it running?"}
    return {
        "id": digest.rpartition(":")[2][:12],
        "interpreter": describe(command, packages, workdir),
    }


def _docker(*words: str) -> str:
    """Return what docker prints; empty where it fails."""
    done = run_program(["docker", *words], DOCKER_SECONDS)
    return "" if done.returncode else done.stdout.decode(errors="replace").strip()


def _why_no_image(name: str) -> str:
    # It may be missing, or docker may not answer.
    if _docker("version", "--format", "{{.Server.Version}}"):
        return f"there is no image {name}; type there: docker pull {name}"
    user = user_name(os.getuid())
    return (
        f"docker does not answer {user}: is it running? is {user} in its group?"
        f" type: sudo usermod -aG docker {user}"
    )


def shards(
    data: str, command: list[str], workdir: str, every_shard: bool, environment: dict[str, str]
) -> dict[str, Any]:
    """Return name and splits of a data set, as the reader of the ranks finds them.

    `command` starts their interpreter; where that has no rackrun, nothing is returned, and where
    its rackrun lacks this reader, `is_older`. Their environment names the files that identify them
    to a server.
    """
    there = ["env", f"--chdir={workdir}", *(f"{name}={file}" for name, file in environment.items())]
    arguments = [*command[:-1], *there, command[-1], "-m", "rackrun.shards.preflight", data]
    arguments += ["--every-shard"] * every_shard
    seconds = SHARDS_SECONDS * (1 + 2 * every_shard)
    try:
        completed = call_within(seconds + FILES_SECONDS, lambda: run_program(arguments, seconds))
    except (TimeoutError, subprocess.TimeoutExpired):
        return {"error": f"{data}: does not answer in time"}
    message = completed.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if absent := re.search(r"No module named '?rackrun\b(\.?)", message):
        return {"is_older": True} if absent[1] else {}
    if completed.returncode:
        return {"error": message[len("error: ") :] if message.startswith("error: ") else message}
    try:
        facts = json.loads(completed.stdout.strip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        facts = None
    no_answer = {"error": f"{data}: {command[-1]} gives no answer"}
    return facts if isinstance(facts, dict) and facts else no_answer
