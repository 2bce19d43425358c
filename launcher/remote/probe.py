"""Questions about a host before a run: what is looked at, and what is held until the run begins."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

from rackrun.contract.cores import cores
from rackrun.launcher.remote import gpus, locks, network, service
from rackrun.launcher.remote.disks import (
    cache_problem,
    call_within,
    disk_free,
    locked_memory_problem,
    open_files_problem,
    shared_memory_problem,
    tmp_problem,
    weights_problem,
    workdir_problem,
)
from rackrun.launcher.remote.files import file_digest
from rackrun.launcher.remote.interpreter import (
    after_setup,
    behind_shim,
    describe,
    find_interpreter,
    image,
    shards,
)
from rackrun.launcher.remote.locks import (
    holder_of,
    lock_path,
    lock_problem,
    release,
    take_tickets,
    taken_gpus,
    tickets,
    user_name,
    uses,
)

FOLDER_SECONDS = 10.0  # for a disk to answer; one that is gone never would
NAMED_FILES = 5
MOST_WAITERS = 256
DRAINED = "/etc/rackrun/drained"
"""The file in which root writes why no run is to use this host."""
REASON_BYTES = 300


def replace_by(command: list[str]) -> dict[str, Any]:
    """Replace this process by another program, which then reads standard input."""
    program = shutil.which(command[0])
    if program is not None:
        release()
        service.reply({})
        os.execv(program, command)
    return {"error": f"there is no {command[0]} on this host"}


# -- what a host is like


def basics(
    workdir: str,
    python: str,
    parts: list[str],
    setup: Sequence[str] = (),
    contained: bool = False,
    turn: str = "",
    waits: bool = False,
    packages: Sequence[str] = (),
    weights: str = "",
    cache: str = "",
    chooses: bool = False,
    visible: dict[str, str] | None = None,
    own_command: bool = False,
    interface: str = "",
) -> dict[str, Any]:
    """Return facts that are known at once: account, machine, and what ranks would run on.

    Most is asked as `Requirements` in the preflight have it. `parts` are the endings of the lock
    files that the run would hold alone. `setup` goes before the working directory and the command
    of the interpreter. `contained`: that is one of a container image, which `image` describes.
    `visible`: variables of the ranks that choose GPUs, over this account's; None: by number.
    """
    workdir = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)))
    lock = lock_of_host()
    take_tickets(lock, parts if waits else [], turn)
    # A container may see other files, so what its ranks need is not looked up on the host.
    files = ("", "", "") if contained else (python, weights, cache)
    try:
        facts = call_within(FOLDER_SECONDS, lambda: disk_facts(workdir, *files, own_command))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    shared = facts_of_host(lock, parts)
    interpreter = (python or "python3") if contained else facts["python"]
    is_of_path = facts.pop("is_of_path")
    described: dict[str, Any] = {}
    address, problems = (own_endpoint() or [""])[0], facts["problems"]
    if not contained:
        before = [*setup, workdir] if setup and not problems["workdir"] else []
        if before and is_of_path:
            interpreter = after_setup(before, interpreter)
        described = describe([*before, interpreter], packages, workdir)
    if interface:
        address, problems["interface"] = network.address_of(interface)
    problems["open files"] = open_files_problem()
    problems["shared memory"] = shared_memory_problem()
    problems["locked memory"] = locked_memory_problem()
    return {
        **facts,
        **shared,
        "problems": {about: problem for about, problem in problems.items() if problem},
        "gpus": shared["gpus"] if visible is None else gpus.gpus_of_ranks(visible),
        "machine": machine(),
        "address": address if "." in address or ":" in address else "",  # sshd may write UNKNOWN
        "lock": lock,
        **holder_of(lock, parts, turn),
        "workdir": workdir,
        "python": interpreter,
        "interpreter": described,
        "user": {"uid": os.getuid(), "gid": os.getgid(), "name": user_name(os.getuid())},
        "taken": taken_gpus(lock, shared["gpus"], turn) if chooses else [],
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    }


def disk_facts(
    workdir: str, python: str, weights: str, cache: str, own_command: bool
) -> dict[str, Any]:
    """Return facts that need file systems to answer; relative paths start at `workdir`."""
    interpreter = find_interpreter(workdir, python, own_command)
    return {
        "problems": {
            "workdir": workdir_problem(workdir),
            "tmp": tmp_problem(),
            "weights": weights_problem(os.path.join(workdir, weights)) if weights else "",
            "cache": cache_problem(os.path.join(workdir, cache)) if cache else "",
        },
        "python": behind_shim(workdir, interpreter),
        "is_of_path": not python and interpreter == (shutil.which("python3") or "python3"),
        "disk_free": disk_free(workdir),
    }


def occupancy(workdir: str) -> dict[str, Any]:
    """Return who uses this host and waits for it, and how busy it is."""
    lock = lock_of_host()
    try:
        free = call_within(FOLDER_SECONDS, lambda: disk_free(os.path.expanduser(workdir)))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    shared = facts_of_host(lock, [""])
    return {
        **shared,
        "load": os.getloadavg()[0],
        "uses": uses(lock, shared["gpus"]),
        "queue": [waiter for _, _, waiter in tickets(lock)][:MOST_WAITERS],
        "disk_free": free,
    }


def facts_of_host(lock: str, parts: list[str]) -> dict[str, Any]:
    """Return what `basics` and `occupancy` both report."""
    return {
        "time": time.time(),
        "cores": cores(),
        "gpus": gpus.gpu_count(),
        "lock_problem": lock_problem([lock, *(lock + part for part in parts)]),
        "drained": drained(),
    }


def drained() -> str:
    """Return why root has taken this host out of use: the first line of a file; empty: in use."""
    try:
        with open(DRAINED, "rb") as file:
            line = file.readline(REASON_BYTES).decode(errors="replace").strip()
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"{DRAINED}: {error.strerror}"
    return line or f"{DRAINED} gives no reason"


def own_endpoint() -> list[str]:
    """Return this host's address and port in the SSH connection; nothing without one."""
    fields = os.environ.get("SSH_CONNECTION", "").split()
    return fields[2:] if len(fields) == 4 else []


def lock_of_host() -> str:
    """Return the lock of this host; each sshd on loopback is a host."""
    address = own_endpoint()
    on_loopback = bool(address) and address[0].startswith("127.")
    return lock_path("-".join(address) if on_loopback else machine())


def machine() -> str:
    """Return an identity that all names of one machine share, and no other machine has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    # Containers and network namespaces of one machine are hosts of their own.
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}-{namespace}-{socket.gethostname()}".replace("/", "_")


def code(root: str, files: dict[str, str]) -> dict[str, Any]:
    """Return the files that are missing, and those whose SHA-256 differs."""
    missing: list[str] = []
    different: list[str] = []
    for path, digest in files.items():
        actual = file_digest(os.path.join(root, path))
        if actual != digest:
            (different if actual else missing).append(path)
    return {
        "missing": missing[:NAMED_FILES],
        "different": different[:NAMED_FILES],
        "count": len(missing) + len(different),
    }


# -- locks, which last until this program ends


def hold(wanted: list[tuple[str, bool]]) -> dict[str, Any]:
    """Lock files until this program ends; return the holder of one that another process has.

    `wanted`: the path of each, and whether it is shared.
    """
    for path, shared in wanted:
        if not locks.hold(path, shared):
            holder = holder_of(path, [""], "")
            return {**holder, "holder": holder["holder"] or "another launch"}
    return {"holder": ""}


def unlock() -> dict[str, Any]:
    """Let go of locks and port for other launches, but stay in the queue."""
    locks.unlock()
    network.release_port()
    return {}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "look": basics,
    "image": image,
    "replace": replace_by,
    "gpus": gpus.gpus,
    "code": code,
    "route": network.route,
    "listen": network.listen,
    "shards": shards,
    "hold": hold,
    "unlock": unlock,
    "occupancy": occupancy,
}
