"""The program that looks at a host before a run: it answers questions and changes nothing.

At the order `become` its process reads the next program instead, which is the run's agent: so a
host starts one Python for both. What few questions need is imported where it is needed, since every
launch waits for this program to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time

from launcher.remote import locks, service
from launcher.remote.files import INSTALLED, file_digest
from launcher.remote.holders import holder_of, in_the_way, taken_gpus, user_name
from launcher.remote.locks import HELD, TICKET, lock_path, queue, release, remove_lock
from launcher.remote.network import address_of, route
from launcher.remote.notes import notes, put_note
from launcher.remote.waiting import find_program, lines_of, output_of, within

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

FOLDER_SECONDS = 10.0  # for a disk to answer; one that is gone never would
INTERPRETER_SECONDS = 20.0
HOME_SECONDS = 2.0  # for what is remembered of hosts, which a launch can do without
SILENT_SECONDS = 600  # a launcher that lost its network leaves an SSH session that never ends
LARGEST_NUMBER = 2**53  # what JSON holds exactly; a disk in a cloud may claim 8 EiB
NAMED_FILES = 5
MOST_WAITERS = 256
LEAST_TMP = 8 << 20  # for the agent of a run, and what torchrun writes about failures
KFD = "/dev/kfd"  # the driver of AMD's GPUs

DESCRIBED: dict[tuple[str, str], dict[str, Any]] = {}
"""What this program found out about interpreters."""

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


_OPTIONAL = ("archs", "missing")


def serve(bundle: object) -> None:
    """Answer orders from standard input until it ends, or another program takes over."""
    os.chdir("/")  # an interpreter started in a user's folder might import modules from there
    service.announce()  # leaves with the first answer: its order was sent with this program
    signal.signal(signal.SIGALRM, _leave)
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "image": image,
        "replace": _replace_by,
        "gpus": gpus,
        "code": code,
        "address": address_of,
        "route": route,
        "listen": listen,
        "hush": hush,
        "reach": reach,
        "shards": shards,
        "clock": clock,
        "hold": hold,
        "unlock": unlock,
        "occupancy": occupancy,
        "remember": remember,
        "note": note,
    }
    try:
        if service.serve(orders, SILENT_SECONDS) == "become":
            become()  # the agent takes over our locks, and lets go of the rest
    finally:
        release()  # also where a launcher that was killed takes no answer any more


def _leave(*reason: object) -> None:
    """End at once, in the middle of a wait."""
    release()
    os._exit(1)


def become() -> None:
    """Run the program that comes next on standard input, in this process."""
    length = sys.stdin.buffer.readline()
    if length:
        loader = sys.stdin.buffer.read(int(length))
        program: dict[str, Any] = {"__name__": "rackrun_agent"}
        exec(loader, program)
        program["serve"](loader)


def clock() -> dict[str, Any]:
    """Return the time of this host."""
    return {"time": time.time()}


def look(
    workdir: str,
    python: str,
    parts: list[str],
    contained: bool = False,
    turn: str = "",
    waits: bool = False,
    packages: Sequence[str] = (),
    weights: str = "",
    cache: str = "",
    name: str = "",
    chooses: bool = False,
) -> dict[str, Any]:
    """Return facts that are known at once: account, machine, and what ranks would run on.

    `parts` are the endings of the lock files that the run would hold alone. `contained`: the
    interpreter is that of a container image, which `image` describes. `turn`: the place of the
    launch in the queue, after all smaller ones; empty: before all. `waits`: it joins the queue.
    `packages`: what the interpreter must be able to import. `weights`: a file to be read.
    `cache`: a folder to be written. `name`: what hosts.txt calls the host. `chooses`: return which
    GPUs are taken.
    """
    workdir = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)))
    connection = _connection()
    lock, planted = _lock_path(connection)
    queue(lock, parts if waits else [], turn)
    try:
        facts = within(
            FOLDER_SECONDS, lambda: _look_into(workdir, python, weights, cache, contained)
        )
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    interpreter = (python or "python3") if contained else facts["python"]
    count = gpu_count()
    return {
        **clock(),
        **facts,
        "machine": machine(),
        "address": _address_in(connection),
        "lock": lock,
        "lock_problem": _lock_problem(planted),
        "history": _history_of(name),
        "notes": notes(lock),
        **in_the_way(lock, parts, turn),
        "workdir": workdir,
        "python": interpreter,
        "interpreter": {} if contained else _described(interpreter, packages, workdir, chooses),
        "user": {"uid": os.getuid(), "gid": os.getgid(), "name": user_name(os.getuid())},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": count,
        "taken": taken_gpus(lock, count, turn) if chooses else [],
        "open_files": os.sysconf("SC_OPEN_MAX"),
    }


def _look_into(
    workdir: str, python: str, weights: str, cache: str, contained: bool
) -> dict[str, Any]:
    """Return facts about the disk of the working directory; a container may see other files."""
    file, folder = os.path.join(workdir, weights), os.path.join(workdir, cache)
    return {
        "workdir_problem": workdir_problem(workdir),
        "tmp_problem": tmp_problem(),
        "python": _find_interpreter(workdir, "" if contained else python),
        "weights_problem": "" if contained or not weights else _why_unreadable(file),
        "cache_problem": "" if contained or not cache else cache_problem(folder),
        "disk_free": min(disk_free(workdir), LARGEST_NUMBER),
    }


def _why_unreadable(file: str) -> str:
    """Return why a file cannot be read; empty when it can."""
    try:
        with open(file, "rb") as opened:
            opened.read(1)
    except OSError as error:
        return f"{file}: {error.strerror}"
    return ""


def image(name: str, command: list[str], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return the id of a container image, and facts about the interpreter that `command` runs."""
    try:
        ids = lines_of("docker", "image", "inspect", "--format", "{{.Id}}", name)
        if not ids:
            return {"error": _why_no_image(name)}
    except OSError as error:
        return {"error": f"docker: {error.strerror}; install it, or leave out --image"}
    return {"id": ids[0].rpartition(":")[2][:12], "interpreter": describe(command, packages)}


def _why_no_image(name: str) -> str:
    """Return why docker shows no image: it may be missing, or docker may not answer."""
    if lines_of("docker", "version", "--format", "{{.Server.Version}}"):
        return f"there is no image {name}; type there: docker pull {name}"
    user = user_name(os.getuid())
    return (
        f"docker does not answer {user}: is it running? is {user} in its group?"
        f" type: sudo usermod -aG docker {user}"
    )


def _replace_by(command: list[str]) -> dict[str, Any]:
    """Replace this process by another program, which then reads standard input."""
    program = find_program(command[0])
    if program is not None:
        release()
        service.reply({})
        os.execv(program, command)
    return {"error": f"there is no {command[0]} on this host"}


def gpus(**options: Any) -> dict[str, Any]:
    """Return model, memory and health of every GPU; imported here, for hosts that have some."""
    from launcher.remote import gpus

    return gpus.gpus(**options)


def gpu_count() -> int:
    """Return the number of GPUs; AMD's count where their tools are installed."""
    count = len([name for name in os.listdir("/dev") if is_gpu(name)])
    if count or not os.path.exists(KFD) or find_program("rocm-smi") is None:
        return count
    from launcher.remote import gpus

    return gpus.amd_gpus()


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


def listen(**options: Any) -> dict[str, Any]:
    """Hold a port for the other hosts to try; see `ports`, which few hosts need."""
    from launcher.remote import ports

    return ports.listen(**options)


def hush() -> dict[str, Any]:
    """Release that port."""
    from launcher.remote import ports

    return ports.hush()


def reach(**options: Any) -> dict[str, Any]:
    """Call the first host at its port."""
    from launcher.remote import ports

    return ports.reach(**options)


def shards(**options: Any) -> dict[str, Any]:
    """Read the manifest of the shards, and some of them; see `shard_access`."""
    from launcher.remote import shard_access

    return shard_access.shards(**options)


def hold(path: str, shared: bool) -> dict[str, Any]:
    """Lock a file until this program ends; return its holder when another process has it."""
    if locks.hold(path, shared):
        return {"holder": ""}
    holder = holder_of([path])
    return {**holder, "holder": holder["holder"] or "another launch"}


def occupancy(workdir: str, name: str) -> dict[str, Any]:
    """Return who uses this host and waits for it, how busy it is, and what happened to it."""
    from launcher.remote.holders import uses, waiting

    lock, planted = _lock_path(_connection())
    count = gpu_count()
    parts = ["", *(f".gpu{number}" for number in range(count))]
    try:
        free = within(FOLDER_SECONDS, lambda: disk_free(os.path.expanduser(workdir)))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    return {
        **clock(),
        "load": os.getloadavg()[0],
        "uses": list(uses(lock, parts)),
        "queue": list(waiting(lock))[:MOST_WAITERS],
        "cores": len(os.sched_getaffinity(0)),
        "gpus": count,
        "disk_free": min(free, LARGEST_NUMBER),
        "lock_problem": _lock_problem(planted),
        "history": _history_of(name),
        "notes": notes(lock),
    }


def remember(name: str, lines: str) -> dict[str, Any]:
    """Keep lines about this host, as hosts.txt calls it, in the home of this account."""
    from launcher.remote import history

    within(HOME_SECONDS, lambda: history.append(name, lines))
    return {}


def note(text: str, at: float) -> dict[str, Any]:
    """Leave other accounts a note why this host is not to be used; no text: it may be."""
    lock, _ = _lock_path(_connection())
    problem = put_note(lock, text, at)
    return {"error": problem} if problem else {}


def _history_of(name: str) -> str:
    """Return what this account remembers of this host; nothing where its home does not answer."""
    from launcher.remote import history

    with contextlib.suppress(TimeoutError):
        return str(within(HOME_SECONDS, lambda: history.read(name)))
    return ""


def unlock() -> dict[str, Any]:
    """Remove the locks that `hold` has made, but not the tickets."""
    for path in [path for path in HELD if TICKET not in path]:
        remove_lock(path, HELD.pop(path))
    return {}


def _connection() -> list[str]:
    """Return the addresses and ports of both ends of the SSH connection; empty without one."""
    return os.environ.get("SSH_CONNECTION", "").split()


def _address_in(connection: list[str]) -> str:
    """Return this host's address in the SSH connection; empty where it is not known."""
    address = connection[2] if len(connection) == 4 else ""
    return address if "." in address or ":" in address else ""  # not UNKNOWN


def _lock_path(connection: list[str]) -> tuple[str, str]:
    """Return the lock of this host, and what is in its way; each sshd on loopback is a host."""
    loopback = len(connection) == 4 and connection[2].startswith("127.")
    name = "-".join(connection[2:]) if loopback else machine()
    return lock_path(name)


def _lock_problem(planted: str) -> str:
    """Return why runs of other accounts may not see ours, and who can mend it; empty if they do."""
    with contextlib.suppress(OSError):  # it has just been removed
        owner = user_name(os.lstat(planted).st_uid) if planted else ""
        shown = os.fsencode(planted).decode(errors="replace")
        if owner:
            return (
                f"{shown} cannot be locked, so runs of other accounts may use this host at the "
                f"same time; ask {owner}, who owns it, to remove it"
            )
    return ""


def machine() -> str:
    """Return an identity that all names of one machine share, and no other machine has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}-{namespace}-{socket.gethostname()}".replace("/", "_")


def _find_interpreter(workdir: str, python: str) -> str:
    """Return the named interpreter, else that of the folder's .venv, else the system's."""
    if python:
        path = os.path.expanduser(python)
        return os.path.join(workdir, path) if "/" in path else find_program(path) or path
    for folder in (os.path.join(workdir, INSTALLED), workdir):
        interpreter = os.path.join(folder, ".venv", "bin", "python")
        if os.path.exists(interpreter):
            return interpreter
    return find_program("python3") or "python3"


def _described(
    interpreter: str, packages: Sequence[str], workdir: str, again: bool
) -> dict[str, Any]:
    """Return the same for one on the host; a launch that waits does not need it every time."""
    key = (interpreter, workdir)
    if not (again and key in DESCRIBED):
        DESCRIBED[key] = describe([interpreter], packages, workdir)
    return DESCRIBED[key]


def describe(
    command: list[str], packages: Sequence[str] = (), workdir: str = "/"
) -> dict[str, Any]:
    """Return the versions of an interpreter, which this command starts, and of its torch.

    Also which of these packages it lacks; the ranks find those in their working directory as well.
    """
    interpreter = command[-1]
    try:
        args = [*command, "-c", DESCRIBE, workdir, *packages]
        output, complaint = output_of(args, INTERPRETER_SECONDS)
    except TimeoutError:
        return {"error": f"{interpreter} does not answer"}
    except OSError as error:
        return {"error": f"{interpreter}: {error.strerror}"}
    try:
        facts = json.loads(output)
        if not isinstance(facts, dict) or set(facts) - {*_OPTIONAL} != {"version", "torch", "cuda"}:
            raise TypeError
        lacking = facts.pop("missing", ())
        missing = [name for name in packages if name in lacking]
        return {**{name: str(value) for name, value in facts.items()}, "missing": missing}
    except (TypeError, ValueError, RecursionError):
        lines = complaint.decode(errors="replace").strip().splitlines()
        of_docker = [line for line in lines if line.startswith("docker: ")]
        return {"error": f"{interpreter}: {[*of_docker, *lines[-1:], 'no answer'][0]}"}


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


def disk_free(workdir: str) -> int:
    """Return the bytes free for this account where the working directory is, or would be."""
    while not os.path.exists(workdir):
        workdir = os.path.dirname(workdir)
    space = os.statvfs(workdir)
    return space.f_bavail * space.f_frsize


def is_gpu(name: str) -> bool:
    """Return True for the device of one GPU, False for one that all GPUs share."""
    return name.startswith("nvidia") and name[6:].isdigit()
