"""Processes of a host: read from /proc, started, signalled and ended, by pid and start time."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import time
from collections.abc import Collection, Iterator

KILL_SECONDS = 10.0  # after that, what SIGKILL does not end is named as a survivor
PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36

MOST_OPEN_FILES = 1 << 16
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that ask a program to end."""
HANDLED = (*ENDING, signal.SIGCHLD)
"""Signals that wake agent and shim by way of a pipe."""


class Process:
    """A process as /proc shows it; pid and `started` together belong to no other one."""

    def __init__(
        self, pid: int, name: str, state: str, parent: int, started: int, ticks: int
    ) -> None:
        """Take the state as a letter, the start in ticks since boot, and the ticks on a processor.

        The ticks include those of its children that have ended.
        """
        self.pid = pid
        self.name = name
        self.state = state
        self.parent = parent
        self.started = started
        self.ticks = ticks


def look_up(pid: int) -> Process | None:
    """Return the process with this id, or None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    # The name is in parentheses and may itself contain them: the last one ends it.
    name, _, fields = text.partition("(")[2].rpartition(")")
    values = fields.split()
    if values[0] in "ZX":
        return None
    ticks = sum(map(int, values[11:15]))
    return Process(pid, name, values[0], int(values[1]), int(values[19]), ticks)


def all_pids() -> list[int]:
    """Return the ids of all processes that are visible on this host."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def all_processes() -> Iterator[Process]:
    """Yield everything that runs on this host."""
    for pid in all_pids():
        process = look_up(pid)
        if process is not None:
            yield process


def descendants(*roots: int) -> list[Process]:
    """Return everything below these processes: what they started, and that in turn."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    below: list[Process] = []
    parents = list(roots)
    while parents:
        born = children.get(parents.pop(), [])
        below += born
        parents += [process.pid for process in born]
    return below


def processor_ticks(roots: Collection[int]) -> dict[int, int]:
    """Return how long each of these and its descendants have run on a processor, in ticks."""
    processes = {process.pid: process for process in all_processes()}
    ticks = dict.fromkeys(roots, 0)
    for process in processes.values():
        ancestor: Process | None = process
        while ancestor is not None and ancestor.pid not in ticks:
            ancestor = processes.get(ancestor.parent)
        if ancestor is not None:
            ticks[ancestor.pid] += process.ticks
    return ticks


def state_of(pid: int) -> str:
    """Return the letter of a process's state: R, S, D, T for stopped; empty when it is gone."""
    process = look_up(pid)
    return process.state if process else ""


def is_mine(pid: int) -> bool:
    """Return True for a process that this account started; a setuid program runs as another."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1]) == os.getuid()
    return False


def environment_of(pid: int) -> list[bytes]:
    """Return the variables that a process was started with; none of another account's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return file.read().split(b"\0")
    return []


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def link_target(path: str) -> str:
    """Return the target of a link; empty when it is gone, as one in /proc may be."""
    with contextlib.suppress(OSError):
        return os.readlink(path)
    return ""


def names_in(folder: str) -> list[str]:
    """Return the names in a folder of the kernel's; none where it is gone, as in /proc."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def kill(process: Process) -> None:
    """Send SIGKILL, if the process id still belongs to this process."""
    now = look_up(process.pid)
    if now is not None and now.started == process.started:
        send_signal(process.pid, signal.SIGKILL)


def kill_descendants() -> None:
    """Send SIGKILL to everything below this process until nothing is left, or time is up."""
    deadline = time.monotonic() + KILL_SECONDS
    left = descendants(os.getpid())
    while left and time.monotonic() < deadline:
        # The lowest first: a shim that lives ends its daemons itself if this process is killed now.
        for process in reversed(left):
            kill(process)
        for _ in reaped():
            pass
        time.sleep(0.005)
        left = descendants(os.getpid())


def send_signal(pid: int, signum: int) -> None:
    """Send a signal, and continue a stopped process, which would not take it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
        os.kill(pid, signal.SIGCONT)


def spawn(
    argv: list[str],
    environment: dict[str, str],
    workdir: str,
    streams: tuple[int, int, int],
    death_signal: int,
) -> int:
    """Start a program in its own session; return its process id.

    The kernel sends it `death_signal` when this process dies.
    """
    parent = os.getpid()
    # Until exec, the child has this process's handlers, which would swallow the program's signals.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid
    try:
        os.setsid()
        for signum in HANDLED:
            if signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() == parent:  # else it died before prctl, and no signal will come
            os.chdir(workdir)
            # Programs read it, too; where sshd started, it would be the account's home.
            os.execvpe(argv[0], argv, {**environment, "PWD": workdir})
    except OSError as error:
        reason = f"{error.strerror}{_why_no_program(argv[0], error)}"
        os.write(2, f"rackrun: cannot start {argv[0]}: {reason}\n".encode())
    finally:
        os._exit(127)


def _why_no_program(path: str, error: OSError) -> str:
    """Return why a file that is there could not be started, and what to type; empty if unknown."""
    try:
        with open(path, "rb") as file:
            line = file.readline(256)
    except OSError:
        return ""
    if isinstance(error, PermissionError):
        return f"; type there: chmod +x {path}"
    if error.errno == errno.ENOEXEC:
        return f"; its first line names no program: type -- bash {path}"
    if line.rstrip(b"\n").endswith(b"\r"):
        return f"; its lines end as on Windows: type sed -i 's/\\r$//' {path}"
    program = line[2:].split()[:1] if line.startswith(b"#!") else []
    return f"; its first line names {program[0].decode(errors='replace')}" if program else ""


def run_program(
    command: list[str], seconds: float, workdir: str | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Return how a program ended and what it printed; raise OSError, or TimeoutExpired if late."""
    return subprocess.run(
        command, cwd=workdir, stdin=subprocess.DEVNULL, capture_output=True, timeout=seconds
    )


def raise_limits() -> None:
    """Raise this process's soft limits of open files and locked memory, for its children, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def signal_pipe() -> int:
    """Have the HANDLED signals only write their number into a pipe; return its reading end."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in HANDLED:
        signal.signal(signum, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    return reading


def reaped() -> Iterator[tuple[int, int]]:
    """Yield process id and raw status of the children that have ended since the last call."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def exit_status(status: int) -> tuple[int, int]:
    """Return a raw status as code and signal; one of the two is 0."""
    return (0, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), 0)


def prctl(option: int, value: int | bytes) -> None:
    """Ask the kernel for something about this process; raises OSError when it refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    argument = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, argument, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} refused")
