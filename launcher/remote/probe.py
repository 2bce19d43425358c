"""The program that looks at a host before a run: it answers questions and changes nothing.

At the order `become` its process reads the next program instead, which is the run's agent: so a
host starts one Python for both.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from rackrun.contract.cores import cores
from rackrun.launcher.remote import gpus, locks, network, service
from rackrun.launcher.remote.files import INSTALLED, file_digest, project_python
from rackrun.launcher.remote.gpus import gpu_count
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
from rackrun.launcher.remote.processes import names_in
from rackrun.launcher.remote.waiting import within

FOLDER_SECONDS = 10.0  # for a disk to answer; one that is gone never would
INTERPRETER_SECONDS = 20.0
DOCKER_SECONDS = 30.0
SHARDS_SECONDS = 30.0  # for a manifest and a shard; a server that drips would never end
SILENT_SECONDS = 600  # a launcher that lost its network leaves an SSH session that never ends
LARGEST_NUMBER = 2**53  # what JSON holds exactly; a disk in a cloud may claim 8 EiB
NAMED_FILES = 5
MOST_WAITERS = 256
DRAINED = "/etc/rackrun/drained"
"""Where root writes why no run is to use this host."""
REASON_BYTES = 300
LEAST_TMP = 8 << 20  # for the agent of a run, and what torchrun writes about failures

LEAST_SHARED = 512 << 20
LEAST_LOCKED = 1 << 30
INFINIBAND = "/sys/class/infiniband"

DESCRIBED: dict[tuple[str, str], dict[str, Any]] = {}
"""What `describe` has returned, by interpreter and working directory."""

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


def serve() -> None:
    """Answer orders from standard input until it ends, or another program takes over."""
    os.chdir("/")  # an interpreter started in a user's folder might import modules from there
    service.announce()  # leaves with the first answer: its order was sent with this program
    signal.signal(signal.SIGALRM, _leave)
    try:
        if service.serve(ORDERS, SILENT_SECONDS) == "become":
            become()  # the agent takes over our locks, and lets go of the rest
    finally:
        release()  # also where a launcher that was killed takes no answer any more


def _leave(*reason: object) -> None:
    release()
    os._exit(1)  # in the middle of a read, which a signal handler that returns would resume


def become() -> None:
    """Run the program that comes next on standard input, in this process."""
    line = sys.stdin.buffer.readline()
    if line:
        size, name = line.split()
        sys.stdin.buffer.read(int(size))  # the archive, in which this program came, too
        importlib.import_module(name.decode()).serve()


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
) -> dict[str, Any]:
    """Return facts that are known at once: account, machine, and what ranks would run on.

    `parts` are the endings of the lock files that the run would hold alone. `setup`: what goes
    before the working directory and the command of the interpreter. `contained`: the
    interpreter is that of a container image, which `image` describes. `turn`: the place of the
    launch in the queue, after all smaller ones; empty: before all. `waits`: it joins the queue.
    `packages`: what the interpreter must be able to import. `weights`: a file to be read.
    `visible`: variables of the ranks that choose GPUs, over this account's; None: by number.
    `cache`: a folder to be written. `chooses`: return which GPUs are taken. `own_command`: the
    environment of a project with a uv.lock comes before rackrun's.
    """
    workdir = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)))
    lock = lock_of_host()
    take_tickets(lock, parts if waits else [], turn)
    # A container may see other files, so what its ranks need is not looked up on the host.
    files = ("", "", "") if contained else (python, weights, cache)
    try:
        facts = within(FOLDER_SECONDS, lambda: disk_facts(workdir, *files, own_command))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    shared = facts_of_host(lock, parts)
    interpreter = (python or "python3") if contained else facts["python"]
    described: dict[str, Any] = {}
    if not contained:
        before = [*setup, workdir] if setup and not facts["workdir_problem"] else []
        described = _described([*before, interpreter], packages, workdir, again=not chooses)
    address = (own_endpoint() or [""])[0]
    return {
        **facts,
        **shared,
        "gpus": _gpus_of_ranks(shared["gpus"], visible),
        "machine": machine(),
        "address": address if "." in address or ":" in address else "",  # sshd may write UNKNOWN
        "lock": lock,
        **holder_of(lock, parts, turn),
        "workdir": workdir,
        "python": interpreter,
        "interpreter": described,
        "user": {"uid": os.getuid(), "gid": os.getgid(), "name": user_name(os.getuid())},
        "taken": taken_gpus(lock, shared["gpus"], turn) if chooses else [],
        "open_files": os.sysconf("SC_OPEN_MAX"),
        "shared_memory_problem": shared_memory_problem(),
        "locked_memory_problem": locked_memory_problem(),
    }


def _described(
    command: list[str], packages: Sequence[str], workdir: str, again: bool
) -> dict[str, Any]:
    """Return what `describe` does, or did: a launch that waits to choose hosts asks on and on."""
    key = (command[-1], workdir)
    if again or key not in DESCRIBED:
        DESCRIBED[key] = describe(command, packages, workdir)
    return DESCRIBED[key]


def _gpus_of_ranks(count: int, visible: dict[str, str] | None) -> int:
    """Return how many of a host's GPUs these variables leave to ranks; None: all of them."""
    if visible is None or not count:
        return count
    named = gpus.visible_gpus({**os.environ, **visible})
    return count if named is None else len(named)


def disk_facts(
    workdir: str, python: str, weights: str, cache: str, own_command: bool
) -> dict[str, Any]:
    """Return facts that need file systems to answer; relative paths start at `workdir`."""
    return {
        "workdir_problem": workdir_problem(workdir),
        "tmp_problem": tmp_problem(),
        "python": _behind_shim(workdir, _find_interpreter(workdir, python, own_command)),
        "weights_problem": weights_problem(os.path.join(workdir, weights)) if weights else "",
        "cache_problem": cache_problem(os.path.join(workdir, cache)) if cache else "",
        "disk_free": disk_free(workdir),
    }


def occupancy(workdir: str) -> dict[str, Any]:
    """Return who uses this host and waits for it, and how busy it is."""
    lock = lock_of_host()
    try:
        free = within(FOLDER_SECONDS, lambda: disk_free(os.path.expanduser(workdir)))
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
        **clock(),
        "cores": cores(),
        "gpus": gpu_count(),
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


def clock() -> dict[str, Any]:
    """Return the time of this host."""
    return {"time": time.time()}


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


# -- what ranks would run


def _find_interpreter(workdir: str, python: str, own_command: bool) -> str:
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


def _behind_shim(workdir: str, interpreter: str) -> str:
    """Return what a shim of pyenv, asdf or mise starts in a folder; any other interpreter as it is.

    It is looked at, and started, in other folders than its ranks run in.
    """
    if os.path.basename(os.path.dirname(interpreter)) != "shims" or not os.path.isdir(workdir):
        return interpreter
    try:
        done = subprocess.run(
            [interpreter, "-c", "import sys; print(sys.executable)"],
            cwd=workdir,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=INTERPRETER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return interpreter  # why is found out when it is described
    return done.stdout.decode(errors="replace").strip() or interpreter


def describe(
    command: list[str], packages: Sequence[str] = (), workdir: str = "/"
) -> dict[str, Any]:
    """Return the versions of an interpreter, which this command starts, and of its torch.

    Also which of these packages it lacks; the ranks find those in their working directory as well.
    """
    interpreter = command[-1]
    try:
        asked = subprocess.run(
            [*command, "-c", DESCRIBE, workdir, *packages],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=INTERPRETER_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"{interpreter} does not answer"}
    except OSError as error:
        return {"error": f"{interpreter}: {error.strerror}"}
    try:
        facts = {} if asked.returncode else json.loads(asked.stdout)
        if not isinstance(facts, dict) or set(facts) - OPTIONAL != {"version", "torch", "cuda"}:
            raise TypeError
        lacking = facts.pop("missing", ())
        missing = [name for name in packages if name in lacking]
        return {**{name: str(value) for name, value in facts.items()}, "missing": missing}
    except (TypeError, ValueError, RecursionError):
        lines = asked.stderr.decode(errors="replace").strip().splitlines()
        of_docker = [line for line in lines if line.startswith("docker: ")]
        return {"error": f"{interpreter}: {[*of_docker, *lines[-1:], 'no answer'][0]}"}


def image(
    name: str, command: list[str], packages: Sequence[str] = (), workdir: str = "/"
) -> dict[str, Any]:
    """Return the id of a container image, and facts about the interpreter that `command` runs."""
    try:
        found = _docker("image", "inspect", "--format", "{{.Id}}", name)
        if not found:
            return {"error": _why_no_image(name)}
    except OSError as error:
        return {"error": f"docker: {error.strerror}; install it, or leave out --image"}
    except subprocess.TimeoutExpired:
        return {"error": f"docker does not answer within {DOCKER_SECONDS:g} s; is it running?"}
    return {
        "id": found.rpartition(":")[2][:12],
        "interpreter": describe(command, packages, workdir),
    }


def _docker(*words: str) -> str:
    """Return what docker prints; empty where it fails."""
    done = subprocess.run(
        ["docker", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=DOCKER_SECONDS,
    )
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


def shards(
    data: str, command: list[str], workdir: str, every_shard: bool, environment: dict[str, str]
) -> dict[str, Any]:
    """Return name and splits of a data set, as the reader of the ranks finds them.

    `command` starts their interpreter; where that has no rackrun, nothing is returned. Their
    environment names the files that identify them to a server.
    """
    there = ["env", f"--chdir={workdir}", *(f"{name}={file}" for name, file in environment.items())]
    asked = [*command[:-1], *there, command[-1], "-m", "rackrun.shards.check", data]
    seconds = SHARDS_SECONDS * (1 + 2 * every_shard)
    try:
        done = within(
            seconds + FOLDER_SECONDS,  # a process that waits for a dead file server stays
            lambda: subprocess.run(
                [*asked, *(["--every-shard"] if every_shard else [])],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=seconds,
            ),
        )
    except (TimeoutError, subprocess.TimeoutExpired):
        return {"error": f"{data}: does not answer in time"}
    said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if "No module named" in said and "rackrun" in said:
        return {}
    if done.returncode:
        return {"error": said[len("error: ") :] if said.startswith("error: ") else said}
    try:
        found = json.loads(done.stdout.strip().rpartition(b"\n")[2])
    except (ValueError, RecursionError):
        found = None
    no_answer = {"error": f"{data}: {command[-1]} gives no answer"}
    return found if isinstance(found, dict) and found else no_answer


# -- locks, which last until this program ends


def hold(path: str, shared: bool) -> dict[str, Any]:
    """Lock a file until this program ends; return its holder when another process has it."""
    if locks.hold(path, shared):
        return {"holder": ""}
    holder = holder_of(path, [""], "")
    return {**holder, "holder": holder["holder"] or "another launch"}


def unlock() -> dict[str, Any]:
    """Let go of the locks that `hold` has taken, but stay in the queue."""
    locks.unlock()
    return {}


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {
    "look": basics,
    "image": image,
    "replace": replace_by,
    "gpus": gpus.gpus,
    "code": code,
    "address": network.address_of,
    "route": network.route,
    "listen": network.listen,
    "release_port": network.release_port,
    "reach": network.reach,
    "shards": shards,
    "clock": clock,
    "hold": hold,
    "unlock": unlock,
    "occupancy": occupancy,
}
