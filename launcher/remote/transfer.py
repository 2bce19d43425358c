"""The program that carries files to a host and back: code before a run, results after it.

Below a folder it follows no link: another account may have put one there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote import service
from rackrun.launcher.remote.files import (
    INSTALLED,
    PIECE_BYTES,
    READ,
    contents,
    explained,
    file_digest,
    project_python,
)
from rackrun.launcher.remote.processes import all_pids, environment_of
from rackrun.launcher.remote.service import reply

MANIFEST = ".rackrun-files"
"""Lists the files that were copied to a working directory: those deleted here are deleted there."""

INCOMING = ".rackrun-incoming-"
"""Start of the name of the folder beside it, in which files wait until all have come."""

MANIFEST_BYTES = 1 << 26
PLAN_BYTES = 1 << 26
MOST_RUNS = 10  # named of those that work in a folder
LONGEST_LINE = 500  # of what makes the environment
FORGOTTEN_SECONDS = 86400  # an older folder of incoming files is no longer in use
COMMON_MODE = 0o644
_SCRIPTS = (  # folder below the project -> what makes an environment there
    (INSTALLED, "rackrun/launcher/venv.sh"),
    ("", "launcher/venv.sh"),  # a checkout
)
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def serve() -> None:
    """Carry out orders from standard input until it ends."""
    service.announce()
    sys.stdout.buffer.flush()
    service.serve(
        {
            "differences": differences,
            "unpack": unpack,
            "environment": environment,
            "results": results,
            "send": send,
        }
    )


# -- paths


def proper(path: str) -> str:
    """Return a path that stays below its folder; raise OSError for any other."""
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b""
    if b"\0" in encoded or {b"", b".", b".."} & set(encoded.split(b"/")):
        raise OSError(errno.EINVAL, "is not the name of a file below the folder", path)
    return path


@contextlib.contextmanager
def folder_of(root: int, path: str, make: bool = False) -> Iterator[tuple[int, str]]:
    """Yield the folder that holds a path below an open one, and the last name of the path.

    It is opened name by name, and no link on the way is followed. Errors name the whole path.
    """
    *parents, name = proper(path).split("/")
    folder = os.dup(root)
    try:
        for parent in parents:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(parent, dir_fd=folder)
            below = os.open(parent, FOLDER | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = below
        yield folder, name
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            error.strerror = "a link or a file is where a folder should be"
        raise OSError(error.errno, error.strerror or str(error), path) from error
    finally:
        os.close(folder)


@contextlib.contextmanager
def opened(root: str) -> Iterator[int]:
    """Yield a folder that the user has named, and that links may lead to."""
    folder = os.open(root, FOLDER)
    try:
        yield folder
    finally:
        os.close(folder)


# -- code


def differences(root: str, files: dict[str, str], modes: dict[str, int]) -> dict[str, Any]:
    """Return which of these files are missing or differ, and how many copied ones were deleted.

    `root` is relative to the home directory; `modes` has the files with another mode than most.
    """
    root = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(root)))
    if root in ("/", os.path.expanduser("~")):
        return {"error": f"{root} cannot hold the code; name a folder: workdir= in hosts.txt"}
    differing = [
        path
        for path, digest in files.items()
        if differs(os.path.join(root, path), digest, modes.get(path, COMMON_MODE))
    ]
    surplus = len(brought(root) - set(files))
    runs = runs_in(root) if differing or surplus else []
    return {"root": root, "paths": differing, "surplus": surplus, "runs": runs}


def runs_in(root: str) -> list[str]:
    """Return the names of runs of this account whose ranks work in a folder; at most ten."""
    names = set()
    mark = f"{variables.RUN_NAME}=".encode()
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended, or is another account's
            if os.path.samefile(f"/proc/{pid}/cwd", root):
                names |= {
                    variable[len(mark) :].decode(errors="replace")
                    for variable in environment_of(pid)
                    if variable.startswith(mark)
                }
    return sorted(names)[:MOST_RUNS]


def differs(path: str, digest: str, mode: int) -> bool:
    """Return True when content, privacy or the executable bit of a file differ."""
    if file_digest(path) != digest:
        return True
    actual = os.lstat(path).st_mode
    if not stat.S_ISREG(actual):
        return False
    opened_up = not mode & 0o077 and actual & 0o077
    return bool((actual ^ mode) & stat.S_IXUSR or opened_up)


def brought(root: str) -> set[str]:
    """Return the files that were copied here earlier; raise OSError for a list that is damaged."""
    manifest = os.path.join(root, MANIFEST)
    try:
        paths = json.loads(contents(manifest, MANIFEST_BYTES))
        if isinstance(paths, list) and all(isinstance(path, str) for path in paths):
            return {proper(path) for path in paths}
    except FileNotFoundError:
        return set()
    except (ValueError, RecursionError):
        pass
    except OSError as error:
        if error.filename != manifest:
            problem = f"lists {error.filename!r}, which was never copied; look at it, remove it"
            raise OSError(error.errno, problem, manifest) from None
        raise
    raise OSError(errno.EBADMSG, "is damaged; look at it, remove it, and try again", manifest)


def unpack(root: str, paths: list[str]) -> dict[str, Any]:
    """Take a stream of files: for each a JSON line, then its bytes; an empty line ends it.

    The folder changes only when all of them have come, whole. A file that was copied earlier and
    is not among `paths`, which lists all files, is removed.
    """
    problem: OSError | None = None
    taken: list[str] = []
    incoming = ""
    try:
        incoming = _new_incoming(root)
    except OSError as error:
        problem = error
    try:
        line = sys.stdin.buffer.readline()
        while line.strip():
            header = _header_of(line)
            taken.append(header["path"])
            try:
                take(incoming, header)
            except OSError as error:  # go on reading: the next order follows the stream
                problem = problem or error
            line = sys.stdin.buffer.readline()
        if problem:
            raise problem
        if line:
            exchange(root, incoming, taken, paths)
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {}


def _header_of(line: bytes) -> dict[str, Any]:
    kinds = {"path": str, "size": int, "mode": int, "link": bool}
    try:
        header = json.loads(line)
        if {name: type(header[name]) for name in kinds} == kinds and header["size"] >= 0:
            return dict(header)
    except (ValueError, RecursionError, TypeError, LookupError):
        pass
    raise OSError(errno.EBADMSG, "the stream of files is damaged")


def _new_incoming(root: str) -> str:
    # A machine that went down in the middle of a copy leaves such a folder.
    os.makedirs(root, exist_ok=True)
    for name in os.listdir(root):
        path = os.path.join(root, name)
        with contextlib.suppress(OSError):  # another copy may have just removed it
            if name.startswith(INCOMING):
                status = os.lstat(path)
                is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
                if is_ours and time.time() - status.st_mtime > FORGOTTEN_SECONDS:
                    shutil.rmtree(path, ignore_errors=True)
    return tempfile.mkdtemp(prefix=INCOMING, dir=root)


def take(incoming: str, header: dict[str, Any]) -> None:
    """Write one file, or link, into the folder of those that wait for the others."""
    left = header["size"]
    try:
        with opened(incoming) as root, folder_of(root, header["path"], make=True) as (folder, name):
            if header["link"]:
                content, left = sys.stdin.buffer.read(left), 0
                if b"\0" in content:
                    raise OSError(errno.EINVAL, "is a link whose target is not a path")
                os.symlink(content, os.fsencode(name), dir_fd=folder)
                return
            with os.fdopen(os.open(name, WRITE, 0o600, dir_fd=folder), "wb") as file:
                while left:
                    piece = sys.stdin.buffer.read(min(left, PIECE_BYTES))
                    left = left - len(piece) if piece else 0
                    file.write(piece)
                os.fchmod(file.fileno(), header["mode"] & 0o777)
    finally:
        skip(left)


def skip(size: int) -> None:
    """Pass over bytes of a stream."""
    while size:
        piece = sys.stdin.buffer.read(min(size, PIECE_BYTES))
        size = size - len(piece) if piece else 0


def exchange(root: str, incoming: str, taken: list[str], paths: list[str]) -> None:
    """Remove deleted files, move new ones to their places, and write the list of all."""
    with opened(root) as target, opened(incoming) as waiting:
        for path in sorted(brought(root) - set(paths)):
            remove(target, path)
        for path in taken:
            with folder_of(waiting, path) as (at, name), folder_of(target, path, True) as (to, _):
                os.replace(name, name, src_dir_fd=at, dst_dir_fd=to)
        with os.fdopen(os.open(MANIFEST, WRITE, COMMON_MODE, dir_fd=waiting), "w") as file:
            json.dump(paths, file)
        os.replace(MANIFEST, MANIFEST, src_dir_fd=waiting, dst_dir_fd=target)


def remove(root: int, path: str) -> None:
    """Remove a file, and the folders around it as long as nothing is in them."""
    try:
        with folder_of(root, path) as (parent, name):
            os.unlink(name, dir_fd=parent)
    except OSError as error:  # gone already, or replaced by something of the host's
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR):
            raise
    folder = os.path.dirname(path)
    while folder:
        try:
            with folder_of(root, folder) as (parent, name):
                os.rmdir(name, dir_fd=parent)
        except OSError:
            return
        folder = os.path.dirname(folder)


def environment(root: str, chosen: dict[str, str]) -> dict[str, Any]:
    """Make the environment of rackrun here, or beside a project; send the output line by line.

    It takes minutes and may print nothing meanwhile, so it is ended when the launcher is gone.
    `chosen` are variables of the launcher that venv.sh obeys, too. For a command of the user's own
    in a project with a uv.lock, fill the project's environment instead.
    """
    is_project = chosen.get(variables.OWN_COMMAND) and project_python(root)
    function = 'venv_project "$1"' if is_project else "venv_python"
    for home, script in _SCRIPTS:
        if os.path.exists(os.path.join(root, home, script)):
            break
    else:
        return {"code": 0}
    with subprocess.Popen(
        ["bash", "-c", f'. "$0"; {function}', script, os.path.abspath(root)],
        cwd=os.path.join(root, home),
        env={**os.environ, **chosen},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as made:
        for line in lines_of(made):
            reply({"line": line.decode(errors="replace").rstrip()[:LONGEST_LINE]})
    return {"code": made.returncode}


def lines_of(made: subprocess.Popen[bytes]) -> Iterator[bytes]:
    """Yield the lines of a program until it ends; kill it at the end of standard input."""
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
            if rest:  # an installer that died in the middle of its last line
                yield rest
            return


# -- results


def results(folder: str, run_id: str, kept: Sequence[str], most: int) -> dict[str, Any]:
    """Return the files of a run folder and their sizes; none when that folder is the launcher's.

    Names in `kept` are left out at the top. More files than `most` are an error. Files whose names
    a terminal cannot show are only counted.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        plan = json.loads(contents(os.path.join(folder, "plan.json"), PLAN_BYTES))
        if isinstance(plan, dict) and plan.get("run_id") == run_id:
            return {"files": {}}  # the launcher's own plan: both see the same folder
    sizes: dict[str, int] = {}
    odd = 0
    for parent, folders, names in os.walk(folder):
        stay = kept if parent == folder else ()
        folders[:] = [name for name in folders if name not in stay]
        for name in names:
            path = os.path.join(parent, name)
            if name in stay or os.path.islink(path) or not os.path.isfile(path):
                continue
            relative = os.path.relpath(path, folder)
            if relative.isprintable():
                sizes[relative] = os.path.getsize(path)
            else:
                odd += 1
        if len(sizes) > most:
            return {"error": f"more than {most} files"}
    return {"files": sizes, "odd": odd}


def send(folder: str, paths: list[str]) -> dict[str, Any]:
    """Send files one after the other: for each its size or an error, its bytes, an error or {}."""
    with opened(folder) as root:
        for path in paths:
            try:
                with folder_of(root, path) as (parent, name):
                    file = os.open(name, READ, dir_fd=parent)
            except OSError as error:
                reply({"error": explained(error)})
                continue
            with os.fdopen(file, "rb") as stream:
                _send_one(stream)
    return {}


def _send_one(stream: Any) -> None:
    # The size is announced already: zeros replace what cannot be read, and the error follows.
    status = os.fstat(stream.fileno())
    left, error = status.st_size if stat.S_ISREG(status.st_mode) else 0, ""
    reply({"size": left})
    while left:
        piece = b""
        try:
            piece = b"" if error else stream.read(min(left, PIECE_BYTES))
            error = error or ("" if piece else "became shorter meanwhile")
        except OSError as problem:
            error = explained(problem)
        piece = piece or bytes(min(left, PIECE_BYTES))
        left -= len(piece)
        sys.stdout.buffer.write(piece)
    reply({"error": error} if error else {})
