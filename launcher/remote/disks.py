"""Folders and limits of a host: why a run could not work with them; empty where it could."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Callable
from typing import Any

from rackrun.launcher.remote.processes import names_in

LARGEST_NUMBER = 2**53  # what JSON holds exactly; a disk in a cloud may claim 8 EiB
LEAST_TMP = 8 << 20  # for the agent of a run, and what torchrun writes about failures
LEAST_OPEN_FILES = 1024
LEAST_SHARED = 512 << 20
LEAST_LOCKED = 1 << 30
INFINIBAND = "/sys/class/infiniband"


def call_within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what some work returns; raise TimeoutError when that takes too long.

    A thread does it: a signal interrupts neither a dead file server nor a slow name server.
    """
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(errno.ETIMEDOUT, "takes too long")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def weights_problem(file: str) -> str:
    """Return why a file cannot be read; empty when it can."""
    try:
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""


def workdir_problem(workdir: str) -> str:
    """Return why no run can be started in a folder; empty when one can."""
    if not os.path.isdir(workdir):
        return f"there is no folder {workdir}"
    if not os.access(workdir, os.W_OK | os.X_OK) or os.statvfs(workdir).f_flag & os.ST_RDONLY:
        return f"{workdir} cannot be written"
    return ""


def cache_problem(folder: str) -> str:
    """Return why a folder can be neither written nor made; empty when it can."""
    while not os.path.lexists(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    if not os.path.isdir(folder):
        return f"{folder} is not a folder"
    return workdir_problem(folder)


def tmp_problem() -> str:
    """Return why an agent cannot keep its files in /tmp while a run lasts; empty when it can."""
    space = os.statvfs("/tmp")
    if not os.access("/tmp", os.W_OK | os.X_OK) or space.f_flag & os.ST_RDONLY:
        return "/tmp cannot be written"
    if space.f_bavail * space.f_frsize < LEAST_TMP or (space.f_files and not space.f_favail):
        return "/tmp is full"
    return ""


def open_files_problem() -> str:
    """Return why loader workers would run out of open files; empty when they may have enough."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # to which the agent raises its own limit
    enough = most == resource.RLIM_INFINITY or most >= LEAST_OPEN_FILES
    return "" if enough else f"{most} open files are too few"


def shared_memory_problem() -> str:
    """Return why /dev/shm may end loader workers and NCCL; empty when it has room for them."""
    try:
        space = os.statvfs("/dev/shm")
    except OSError as error:
        return f"/dev/shm: {error.strerror}"
    free = space.f_bavail * space.f_frsize
    return "" if free >= LEAST_SHARED else f"/dev/shm has {free >> 20} MiB free"


def locked_memory_problem() -> str:
    """Return why NCCL cannot give memory to InfiniBand; empty when it can, or there is none."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]  # to which the agent raises its own
    if limit == resource.RLIM_INFINITY or limit >= LEAST_LOCKED or not names_in(INFINIBAND):
        return ""
    return f"a process may lock {limit >> 10} KiB of memory"


def disk_free(workdir: str) -> int:
    """Return the bytes free for this account where the working directory is, or would be."""
    while not os.path.exists(workdir):
        workdir = os.path.dirname(workdir)
    space = os.statvfs(workdir)
    return min(space.f_bavail * space.f_frsize, LARGEST_NUMBER)
