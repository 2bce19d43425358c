"""The program that carries files to a host and back: code before a run, results after it.

It arrives over standard input as the agent does, needs only the standard library of Python 3.8,
and reads orders until there are no more: a length on a line, then JSON; answers look the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

MARKER = b"\nrackrun porter 1\n"
"""Comes before the first answer: what a login shell prints before it is noise."""

MANIFEST = ".rackrun-files"
"""Lists in a working directory what was brought there, so that what is gone here goes there."""

INCOMING = ".rackrun-incoming"
"""The folder beside it in which files wait until all of them are there."""

PIECE_BYTES = 1 << 18
HEAVY = ("checkpoints", "logs")  # stay where they are; the launcher has the logs already


def serve(source: bytes) -> None:
    """Carry out orders from standard input until it ends."""
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "differences": differences,
        "unpack": unpack,
        "environment": environment,
        "results": results,
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


def differences(root: str, files: dict[str, str], programs: list[str]) -> dict[str, Any]:
    """Which of these files are not here or are others, and which came earlier and are no more.

    `root` is relative to the home directory; `programs` are those that may be executed.
    """
    root = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(root)))
    if root in ("/", os.path.expanduser("~")):
        return {"error": f"{root} is no place for code; name another with workdir= in hosts.txt"}
    executable = set(programs)
    wanted = [
        path
        for path, digest in files.items()
        if digest_of(os.path.join(root, path)) != digest
        or is_program(os.path.join(root, path)) != (path in executable)
    ]
    return {"root": root, "paths": wanted, "gone": sorted(brought(root) - set(files))}


def brought(root: str) -> set[str]:
    """What an earlier time brought here."""
    manifest = os.path.join(root, MANIFEST)
    if not os.path.exists(manifest):
        return set()
    with open(manifest) as file:
        return set(json.load(file))


def unpack(root: str, gone: list[str], paths: list[str]) -> dict[str, Any]:
    """Take a stream of files: for each a JSON line, then its bytes; an empty line ends it.

    They change the folder only when all of them are here, each of them whole. `gone` is removed,
    and `paths`, all that there is now, is remembered for the next time.
    """
    incoming = os.path.join(root, INCOMING)
    problem: OSError | None = None
    taken: list[str] = []
    shutil.rmtree(incoming, ignore_errors=True)  # of a launcher that went away
    line = sys.stdin.buffer.readline()
    while line.strip():
        header = json.loads(line)
        taken.append(header["path"])
        try:
            take(os.path.join(incoming, header["path"]), header)
        except OSError as error:  # go on: the next order comes behind the stream
            problem = problem or error
        line = sys.stdin.buffer.readline()
    try:
        if problem:
            raise problem
        if line:
            exchange(root, incoming, gone, taken, paths)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {}


def take(target: str, header: dict[str, Any]) -> None:
    """The bytes of one file, or of a link's target, to where it waits for the others."""
    left = header["size"]
    try:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if header["link"]:
            content, left = sys.stdin.buffer.read(left), 0
            os.symlink(content, os.fsencode(target))
            return
        with open(target, "xb") as file:
            while left:
                piece = sys.stdin.buffer.read(min(left, PIECE_BYTES))
                left = left - len(piece) if piece else 0
                file.write(piece)
        os.chmod(target, header["mode"])
    finally:
        sys.stdin.buffer.read(left)


def exchange(root: str, incoming: str, gone: list[str], taken: list[str], paths: list[str]) -> None:
    """Remove what is gone, put what has come in its place, and remember what there is."""
    for path in gone:
        if os.path.lexists(os.path.join(root, path)):
            os.unlink(os.path.join(root, path))
        remove_empty(root, os.path.dirname(path))
    for path in taken:
        target = os.path.join(root, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(incoming, path), target)
    os.makedirs(root, exist_ok=True)
    manifest = os.path.join(root, MANIFEST)
    with open(f"{manifest}.partial", "w") as file:
        json.dump(paths, file)
    os.replace(f"{manifest}.partial", manifest)


def remove_empty(root: str, folder: str) -> None:
    """Remove a folder and those around it, below the root, as long as nothing is in them."""
    while folder:
        try:
            os.rmdir(os.path.join(root, folder))
        except OSError:
            return
        folder = os.path.dirname(folder)


def environment(root: str) -> dict[str, Any]:
    """Make the project's environment, if it says how; its progress is told line by line.

    It takes minutes and may say nothing meanwhile: it is ended when nobody waits for it any more.
    """
    if not os.path.exists(os.path.join(root, "launcher", "venv.sh")):
        return {"code": 0}
    with subprocess.Popen(
        ["bash", "-c", ". launcher/venv.sh; venv_python"],
        cwd=root,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as made:
        for line in lines_of(made):
            tell({"said": line.decode(errors="replace").rstrip()})
    return {"code": made.returncode}


def lines_of(made: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """What a program writes, until its end, or until that of our orders, which ends it as well."""
    assert made.stdout is not None
    output, rest = made.stdout.fileno(), b""
    while True:
        ready, _, _ = select.select([output, 0], [], [])
        if 0 in ready:
            os.killpg(made.pid, signal.SIGKILL)
            return
        data = os.read(output, PIECE_BYTES)
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
        if not data:
            return


def digest_of(path: str) -> str:
    """SHA-256 of a file, or of where a link points to; empty when there is neither."""
    if os.path.islink(path):
        return hashlib.sha256(b"link " + os.fsencode(os.readlink(path))).hexdigest()
    if not os.path.isfile(path):
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(PIECE_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def is_program(path: str) -> bool:
    """Whether a file may be executed by its owner; a link may not, whatever it leads to."""
    mode = os.lstat(path).st_mode
    return stat.S_ISREG(mode) and bool(mode & stat.S_IXUSR)


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
