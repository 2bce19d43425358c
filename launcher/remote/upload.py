"""The code of a run on a host: what differs, taking it, and making its environment."""

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
from collections.abc import Callable, Iterator
from typing import Any

from rackrun.contract import variables
from rackrun.launcher.remote.files import (
    INSTALLED,
    PIECE_BYTES,
    checked_path,
    contents,
    file_digest,
    path_below,
    project_python,
)
from rackrun.launcher.remote.processes import all_pids, environment_of
from rackrun.launcher.remote.service import reply

MANIFEST = f"{INSTALLED}/files"
"""Lists the files that were copied to a working directory: those deleted here are deleted there."""

IGNORED = f"{INSTALLED}/.gitignore"
"""Hides both from git: the folder may be the user's own working tree, as in a home of all hosts."""

INCOMING = ".rackrun-incoming-"
"""Start of the name of the folder beside it, in which files wait until all have come."""

MANIFEST_BYTES = 1 << 26
MOST_RUNS = 10  # named of those that work in a folder
LONGEST_LINE = 500  # of what makes the environment
FORGOTTEN_SECONDS = 86400  # an older folder of incoming files is no longer in use
COMMON_MODE = 0o644
_ELSEWHERE = (errno.ENOTDIR, errno.ELOOP)
_SCRIPTS = (  # folder below the project -> what makes an environment there
    (INSTALLED, "rackrun/launcher/venv.sh"),
    ("", "launcher/venv.sh"),  # a checkout
)


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
            return {checked_path(path) for path in paths}
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


def unpack(root: str, paths: list[str], count: int) -> dict[str, Any]:
    """Take a tar of so many files.

    The folder changes only when all of them have come, whole. A file that was copied earlier and
    is not among `paths`, which lists all files, is removed.
    """
    import tarfile  # 10 ms that other programs spare

    problem: OSError | None = None
    arrived: list[str] = []
    incoming = ""
    try:
        incoming = _new_incoming(root)
    except OSError as error:
        problem = error
    try:
        # block by block, as the next order follows the last one
        stdin, block = sys.stdin.buffer, tarfile.BLOCKSIZE
        with tarfile.open(fileobj=stdin, mode="r|", bufsize=block) as stream:
            for member in stream:
                arrived.append(member.name)
                try:
                    if problem is None:
                        take(incoming, stream, member)
                except OSError as error:
                    problem = OSError(error.errno, error.strerror, member.name)
        if problem:
            raise problem
        if len(arrived) < count:
            raise tarfile.ReadError
        exchange(root, incoming, arrived, paths)
    except tarfile.TarError:
        raise OSError(errno.EBADMSG, "the stream of files is damaged") from None
    finally:
        shutil.rmtree(incoming, ignore_errors=True)
    return {}


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


def take(incoming: str, stream: Any, member: Any) -> None:
    """Write one file, or link, of a tar into the folder of those that wait for the others."""
    path = path_below(incoming, member.name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if member.issym():
        os.symlink(member.linkname, path)
        return
    with open(path, "xb") as file:
        shutil.copyfileobj(stream.extractfile(member), file)
        os.fchmod(file.fileno(), member.mode & 0o777)


def exchange(root: str, incoming: str, arrived: list[str], paths: list[str]) -> None:
    """Remove deleted files, write the list of all, and move new ones to their places.

    The list comes first: a file that is there after a kill, and in no list, would stay for ever.
    """
    for path in sorted(brought(root) - set(paths)):
        remove(root, path)
    os.makedirs(os.path.join(incoming, INSTALLED), exist_ok=True)
    for path, text in ((MANIFEST, json.dumps(paths)), (IGNORED, "*\n")):
        with open(os.path.join(incoming, path), "x") as file:
            file.write(text)
    for path in (MANIFEST, IGNORED, *arrived):
        target = path_below(root, path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(incoming, path), target)


def remove(root: str, path: str) -> None:
    """Remove a file, and the folders around it as long as nothing is in them."""
    try:
        os.unlink(path_below(root, path))
        while path := os.path.dirname(path):
            os.rmdir(path_below(root, path))
    except OSError as error:  # gone already, replaced by something of the host's, or not empty
        if error.errno not in (*_ELSEWHERE, errno.ENOENT, errno.EISDIR, errno.ENOTEMPTY):
            raise


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


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "differences": differences,
    "unpack": unpack,
    "environment": environment,
}
