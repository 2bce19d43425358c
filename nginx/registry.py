"""The folder that each server leaves while it runs: how others find it, and how it is ended.

/run/rackrun-nginx-0/rackrun-nginx-<folder>-<port>/
├── record.json     what is served where, and by which process or container
├── etc/            nginx.conf and secrets, readable by the serving user
├── scratch/        the one folder that a native nginx may write to
├── access.log      a line of JSON for each request
└── error.log       nginx's error log
"""

import dataclasses
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rackrun.atomic import write_whole
from rackrun.commands import called
from rackrun.errors import DataError, Problem
from rackrun.machine import boot_id
from rackrun.nginx.site import Site
from rackrun.shapes import LARGEST_NUMBER, AtMost, Between, Matches, Misshapen, parsed

GRACE_SECONDS = 5.0
RECORD_BYTES = 1 << 16
POLL_SECONDS = 0.01
_ENDED = ("", "Z", "X")  # states of /proc/PID/stat: no process, a zombie, one that dies


class RecordError(DataError):
    """A file in the place of a record that no server of this user can have written."""


@dataclass(frozen=True)
class ServerProcess:
    """A process that cannot be mistaken for a later one of the same number."""

    pid: Annotated[int, Between(0, 1 << 22)]
    ticks: Annotated[int, Between(0, LARGEST_NUMBER)]  # when it was started, since boot
    boot: Annotated[str, Matches(r"[0-9a-f-]{36}|")]  # empty where the kernel names none
    namespace: Annotated[str, Matches(r"pid:\[[0-9]{1,20}\]|")]  # in which it has this number

    @classmethod
    def of(cls, pid: int) -> "ServerProcess":
        """Return the process that has this number now; ticks are 0 if there is none."""
        return cls(pid, _ticks(pid), boot_id(), pid_namespace())

    @property
    def alive(self) -> bool:
        """Return True while it runs; a zombie does not."""
        return self.ticks > 0 and self._is_visible and _ticks(self.pid) == self.ticks

    @property
    def is_elsewhere(self) -> bool:
        """Return True if it may run in another container, which has process numbers of its own."""
        return self._is_of_this_boot and not self._is_visible

    @property
    def _is_of_this_boot(self) -> bool:
        return self.boot in ("", boot_id())

    @property
    def _is_visible(self) -> bool:
        return self._is_of_this_boot and self.namespace == pid_namespace()

    def end(self) -> None:
        """End the process and its group: TERM, a grace, KILL; returns when all are gone.

        The group is its own (it was started in a new session), so nothing else is in it. It
        outlives a leader that was killed, as nginx's workers do.
        """
        if self.pid <= 1 or not self._is_visible or _ticks(self.pid) not in (0, self.ticks):
            return
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal_number)
            if _group_ended(self.pid, GRACE_SECONDS):
                return


def pid_namespace() -> str:
    """Return the kernel's name of the list of processes that this one is in; empty for none."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


def _ticks(pid: int) -> int:
    state, start = _stat(pid, 3, 22)
    return 0 if state in _ENDED else int(start)


def _stat(pid: int, *fields: int) -> tuple[str, ...]:
    """Return fields of one reading of /proc/PID/stat.

    They go by their numbers in proc(5), from 3, and are all empty where there is no such process.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ("",) * len(fields)
    stat = text.rpartition(")")[2].split()
    return tuple(stat[field - 3] for field in fields)


def _group_ended(group: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while True:
        pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
        members = (_stat(pid, 3, 5) for pid in pids)
        if all(number != str(group) or state in _ENDED for state, number in members):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_SECONDS)


@dataclass(frozen=True)
class ServerRecord:
    """A server of this user, as another command finds it."""

    name: Annotated[str, Matches(r"rackrun-nginx-[0-9a-f]{8}-[0-9]{1,5}")]
    folder: Annotated[str, AtMost(4096)]
    url: Annotated[str, Matches(r"https?://[0-9A-Za-z.:%\[\]]{2,64}:[0-9]{1,5}/")]
    process: ServerProcess
    container: bool
    since: Annotated[float, Between(0, 1 << 35)]  # seconds since 1970

    @property
    def home(self) -> Path:
        """The folder of this server's files."""
        return base() / self.name

    @property
    def runs_as(self) -> str:
        """Return the kind of server: a container, or a process."""
        return f"container {self.name}" if self.container else f"nginx, pid {self.process.pid}"

    @property
    def plain(self) -> dict[str, object]:
        """Return what other programs may want to know of it."""
        pid = None if self.container else self.process.pid
        where = {"folder": self.folder, "url": self.url}
        return {**where, "container": self.container, "pid": pid, "since": self.since}

    def write(self) -> None:
        """Put the record where other commands look for it, whole."""
        write_whole(self.home / "record.json", json.dumps(dataclasses.asdict(self)).encode())

    def forget(self) -> None:
        """Remove the server's folder."""
        shutil.rmtree(self.home, ignore_errors=True)


def name_of(site: Site) -> str:
    """Return the unique name of a server's folder and container."""
    parts = (site.folder, site.address, os.getuid(), pid_namespace())
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
    return f"rackrun-nginx-{digest[:8]}-{site.port}"


def base() -> Path:
    """Return the folder of all servers of this user; Problem if another user made it."""
    root = os.getuid() == 0
    # Root's servers run as another user, who must be able to pass through.
    parent = Path("/run") if root else Path(os.getenv("XDG_RUNTIME_DIR") or tempfile.gettempdir())
    path = parent / f"rackrun-nginx-{os.getuid()}"
    path.mkdir(mode=0o711, exist_ok=True)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise Problem(f"{path}: not a folder of this user alone; remove it")
    return path


def records() -> list[ServerRecord]:
    """Return every record, of living servers and of those that were killed."""
    read_records = (read(path) for path in sorted(base().iterdir()) if path.is_dir())
    return [record for record in read_records if record]


def clear() -> None:
    """Remove the folders of starts that were killed before they left a record. Only when alone."""
    for path in base().iterdir():
        if path.is_dir() and not (path / "record.json").exists():
            shutil.rmtree(path, ignore_errors=True)


def read(home: Path) -> ServerRecord | None:
    """Return the record in a server's folder, or None while there is none; raises RecordError."""
    try:
        text = (home / "record.json").read_bytes()
    except FileNotFoundError:
        return None
    try:
        record = parsed(text, ServerRecord, RECORD_BYTES)
    except Misshapen as error:
        raise _no_record(home, str(error)) from None
    if record.name != home.name:  # what is ended and removed goes by this name
        raise _no_record(home, "it is that of another server")
    return record


def _no_record(home: Path, why: str) -> RecordError:
    return RecordError(
        f"{home}/record.json: not as {called('serve')} leaves it ({why}); end what it served, then"
        f" type: rm -r {shlex.quote(str(home))}"
    )


@contextmanager
def alone() -> Iterator[None]:
    """Hold off every other start and stop of this user meanwhile."""
    with (base() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
