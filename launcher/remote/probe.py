"""The program that looks at a host before a run: it answers questions and changes nothing.

At the order `become` its process reads the next program instead, which is the run's agent: so a
host starts one Python for both. What few questions need is imported where it is needed, since every
launch waits for this program to start.
"""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import signal
import socket
import sys
import time

from launcher.remote import service
from launcher.remote.files import INSTALLED, file_digest
from launcher.remote.locks import (
    TICKET,
    first_in_line,
    flock,
    lock_path,
    open_lock,
    remove_lock,
    signature,
    take_ticket,
)
from launcher.remote.network import address_of, route
from launcher.remote.processes import look_up
from launcher.remote.waiting import find_program, lines_of, output_of, within

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

FOLDER_SECONDS = 10.0  # for a disk to answer; one that is gone never would
INTERPRETER_SECONDS = 20.0
SILENT_SECONDS = 600  # a launcher that lost its network leaves an SSH session that never ends
LARGEST_NUMBER = 2**53  # what JSON holds exactly; a disk in a cloud may claim 8 EiB
NAMED_FILES = 5
LEAST_TMP = 8 << 20  # for the agent of a run, and what torchrun writes about failures
KFD = "/dev/kfd"  # the driver of AMD's GPUs

HELD: dict[str, int] = {}
"""The locks and tickets of this program: path -> descriptor."""

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
    }
    last = service.serve(orders, SILENT_SECONDS)
    release()
    if last == "become":
        become()


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
    place: str = "",
    waits: bool = False,
    packages: Sequence[str] = (),
    weights: str = "",
) -> dict[str, Any]:
    """Return facts that are known at once: account, machine, and what ranks would run on.

    `parts` are the endings of the lock files that the run would hold alone. `contained`: the
    interpreter is that of a container image, which `image` describes. `place`: the place of the
    launch in the queue, after all smaller ones; empty: before all. `waits`: it joins the queue.
    `packages`: what the interpreter must be able to import. `weights`: a file to be read.
    """
    workdir = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)))
    connection = os.environ.get("SSH_CONNECTION", "").split()
    lock, planted = _lock_path(connection)
    if waits:
        HELD.update(take_ticket(lock + part, place) for part in parts)
    try:
        facts = within(FOLDER_SECONDS, lambda: _look_into(workdir, python, weights, contained))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    interpreter = (python or "python3") if contained else facts["python"]
    return {
        **clock(),
        **facts,
        "machine": machine(),
        "address": _address_in(connection),
        "lock": lock,
        "lock_problem": _lock_problem(planted),
        **in_the_way(lock, parts, place),
        "workdir": workdir,
        "python": interpreter,
        "interpreter": {} if contained else describe([interpreter], packages, workdir),
        "user": {"uid": os.getuid(), "gid": os.getgid(), "name": _user_name(os.getuid())},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": gpu_count(),
        "open_files": os.sysconf("SC_OPEN_MAX"),
    }


def _look_into(workdir: str, python: str, weights: str, contained: bool) -> dict[str, Any]:
    """Return facts about the disk of the working directory; a container may see other files."""
    file = os.path.join(workdir, weights)
    return {
        "workdir_problem": workdir_problem(workdir),
        "tmp_problem": tmp_problem(),
        "python": _find_interpreter(workdir, "" if contained else python),
        "weights_problem": "" if contained or not weights else _why_unreadable(file),
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
    user = _user_name(os.getuid())
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
    try:
        descriptor = open_lock(path)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    try:
        flock(descriptor, shared)
    except BlockingIOError:
        os.close(descriptor)
        holder = holder_of([path])
        return {**holder, "holder": holder["holder"] or "another launch"}
    HELD[path] = descriptor
    return {"holder": ""}


def unlock() -> dict[str, Any]:
    """Remove the locks that `hold` has made, but not the tickets."""
    for path in [path for path in HELD if TICKET not in path]:
        remove_lock(path, HELD.pop(path))
    return {}


def release() -> None:
    """Remove all locks and tickets of this program, but for those that others share."""
    while HELD:
        remove_lock(*HELD.popitem())


def in_the_way(lock: str, parts: list[str], turn: str) -> dict[str, Any]:
    """Return who holds these parts of a host, or else who is before a place in the queue."""
    holder = holder_of([lock + part for part in parts])
    ticket = "" if holder["holder"] else first_in_line(lock, parts, turn)
    with contextlib.suppress(OSError, ValueError, OverflowError):  # gone, or no ticket of a launch
        owner = _user_name(os.stat(ticket).st_uid) if ticket else ""
        since = time.localtime(float(ticket.partition(TICKET)[2].partition("-")[0] or 0))
        if owner:
            return {"holder": f"{owner}, since {time.strftime('%H:%M:%S', since)}", "queued": True}
    return holder


def holder_of(paths: list[str]) -> dict[str, Any]:
    """Return the holder of a lock on one of these files, and its run where that is this user's."""
    with contextlib.suppress(OSError):  # no process holds a file that has just gone
        files = {_inode_of(path): path for path in paths if os.path.lexists(path)}
        for fields in map(str.split, _lines_of_locks() if files else ()):
            if fields[1] == "FLOCK" and fields[5] in files:
                return described(int(fields[4]), files[fields[5]])
    return {"holder": ""}


def described(pid: int, path: str) -> dict[str, Any]:
    """Return the owner and age of the process that has a lock, and its run."""
    process = process_in_words(pid)
    with contextlib.suppress(OSError):
        owner = os.stat(f"/proc/{pid}").st_uid
        run, name = signature(path, owner)
        if run:
            mine = run if owner == os.getuid() else ""
            return {"holder": f"run {run[:8]} ({name}), {process}", "run": mine}
    return {"holder": process}


def _inode_of(path: str) -> str:
    """Return the name of a file in the kernel's list of locks: fd:01:12345, disk and inode.

    On Btrfs and overlays, stat has another number for the device: mountinfo has the disk's.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        inode = os.fstat(descriptor).st_ino
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            mount = next((line.split()[1] for line in file if line.startswith("mnt_id:")), "")
    finally:
        os.close(descriptor)
    with open("/proc/self/mountinfo") as file:
        mounts = {fields[0]: fields[2] for fields in map(str.split, file)}
    major, _, minor = mounts.get(mount, "0:0").partition(":")
    return f"{int(major):02x}:{int(minor):02x}:{inode}"


def _lines_of_locks() -> list[str]:
    """Return all locks of this host; collecting them costs the kernel some time."""
    with open("/proc/locks") as file:
        return file.readlines()


def process_in_words(pid: int) -> str:
    """Return the user, the id and the start time of a process, in words."""
    process = look_up(pid)
    try:
        user = _user_name(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        process = None
    if process is None:
        return f"process {pid}"
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    since = booted + process.started / os.sysconf("SC_CLK_TCK")
    return f"{user}'s process {pid}, since {time.strftime('%H:%M:%S', time.localtime(since))}"


def _user_name(uid: int) -> str:
    """Return the name of a user, or the number when it has no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


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
        owner = _user_name(os.lstat(planted).st_uid) if planted else ""
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
