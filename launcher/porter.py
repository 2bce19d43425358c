"""The program that carries files to a host and back: code before a run, results after it.

It arrives over standard input as the agent does, needs only the standard library of Python 3.8,
and reads orders until there are no more: a length on a line, then JSON; answers look the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

MARKER = b"\nrackrun porter 1\n"
"""Comes before the first answer: what a login shell prints before it is noise."""

MANIFEST = ".rackrun-files"
"""Lists in a working directory what was brought there, so that what is gone here goes there."""

PIECE_BYTES = 1 << 18
HEAVY = ("checkpoints", "logs")  # stay where they are; the launcher has the logs already


def serve(source: bytes) -> None:
    """Carry out orders from standard input until it ends."""
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "differences": differences,
        "write": write,
        "finish": finish,
        "environment": environment,
        "results": results,
        "checkpoints": checkpoints,
        "read": read,
    }
    sys.stdout.buffer.write(MARKER)
    sys.stdout.buffer.flush()
    while True:
        length = sys.stdin.buffer.readline()
        if not length:
            return
        order = json.loads(sys.stdin.buffer.read(int(length)))
        try:
            answer = orders[order.pop("do")](**order)
        except OSError as error:
            answer = {"error": f"{error.filename or ''}: {error.strerror or error}".lstrip(": ")}
        tell(answer)


def tell(answer: dict[str, Any]) -> None:
    """One answer."""
    text = json.dumps(answer).encode()
    sys.stdout.buffer.write(b"%d\n%s" % (len(text), text))
    sys.stdout.buffer.flush()


# -- code


def differences(root: str, files: dict[str, str]) -> dict[str, Any]:
    """Which of these files are not here or are others; `root` is relative to the home directory."""
    root = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(root)))
    if root in ("/", os.path.expanduser("~")):
        return {"error": f"{root} is no place for code; name another with workdir= in hosts.txt"}
    wanted = [
        path for path, digest in files.items() if digest_of(os.path.join(root, path)) != digest
    ]
    return {"root": root, "paths": wanted}


def write(root: str, path: str, size: int, mode: int, link: bool) -> dict[str, Any]:
    """Take the bytes of one file, or of a link's target, and put them in place whole."""
    target = os.path.join(root, path)
    partial = f"{target}.rackrun-partial"
    content = sys.stdin.buffer.read(size)  # before anything can go wrong: the next order follows
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.lexists(partial):
        os.unlink(partial)
    if link:
        os.symlink(content, os.fsencode(partial))
    else:
        with open(partial, "xb") as file:
            file.write(content)
        os.chmod(partial, mode)
    os.replace(partial, target)
    return {}


def finish(root: str, paths: list[str]) -> dict[str, Any]:
    """Remove what an earlier time brought and this one has no more, and remember what there is."""
    manifest = os.path.join(root, MANIFEST)
    removed = []
    if os.path.exists(manifest):
        with open(manifest) as file:
            removed = sorted(set(json.load(file)) - set(paths))
    for path in removed:
        if os.path.lexists(os.path.join(root, path)):
            os.unlink(os.path.join(root, path))
    os.makedirs(root, exist_ok=True)
    with open(f"{manifest}.partial", "w") as file:
        json.dump(paths, file)
    os.replace(f"{manifest}.partial", manifest)
    return {"removed": len(removed)}


def environment(root: str) -> dict[str, Any]:
    """Make the project's environment, if it says how; its progress is told line by line."""
    if not os.path.exists(os.path.join(root, "launcher", "venv.sh")):
        return {"code": 0}
    with subprocess.Popen(
        ["bash", "-c", '. launcher/venv.sh; venv_python ""'],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as made:
        assert made.stdout is not None
        for line in made.stdout:
            tell({"said": line.decode(errors="replace").rstrip()})
    return {"code": made.returncode}


def digest_of(path: str) -> str:
    """SHA-256 of a file, or of where a link points to; empty when there is neither."""
    if os.path.islink(path):
        return hashlib.sha256(b"link " + os.fsencode(os.readlink(path))).hexdigest()
    if not os.path.isfile(path):
        return ""
    with open(path, "rb") as file:
        return hashlib.sha256(file.read()).hexdigest()


# -- results


def results(folder: str, run_id: str, heavy: Sequence[str] = HEAVY) -> dict[str, Any]:
    """The files of a run folder and their sizes; none when that folder is the launcher's."""
    plan = os.path.join(folder, "plan.json")
    if os.path.exists(plan):
        with open(plan) as file:
            if json.load(file).get("run_id") == run_id:
                return {"files": {}}
    found = {}
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if parent != folder or name not in heavy]
        for name in names:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                found[os.path.relpath(path, folder)] = os.path.getsize(path)
    return {"files": found}


def checkpoints(folder: str) -> dict[str, Any]:
    """Whether a run has saved something that another one can go on from."""
    there = os.path.join(folder, "checkpoints")
    return {"some": os.path.isdir(there) and any(n.endswith(".pt") for n in os.listdir(there))}


def read(folder: str, path: str) -> dict[str, Any]:
    """Send one file: its size as an answer, then its bytes, then how that went."""
    with open(os.path.join(folder, path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        tell({"size": size})
        while size:
            piece = file.read(min(size, PIECE_BYTES)) or bytes(min(size, PIECE_BYTES))
            size -= len(piece)
            sys.stdout.buffer.write(piece)
    return {}
