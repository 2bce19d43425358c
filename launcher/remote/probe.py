"""The program that looks at a host before a run: it answers questions and changes nothing.

It arrives over standard input as the agent does, needs only the standard library of Python 3.8,
and reads orders until there are no more: a length on a line, then JSON; answers look the same.
At the order `become` its process reads the next program instead, which is the run's agent: so a
host starts one Python for both. For its speed, what few questions need is imported where it is.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import pwd
import select
import signal
import socket
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # without the cost of typing
if TYPE_CHECKING:
    import threading
    import urllib.error
    import urllib.request
    from collections.abc import Callable
    from typing import Any

MARKER = b"\nrackrun probe 1\n"
"""Comes before the first answer: what a login shell prints before it is noise."""

CONNECT_SECONDS = 5.0
FOLDER_SECONDS = 10.0  # for a disk to say anything; one that is gone would never
SHARDS_SECONDS = 30.0  # for a card and a shard; a server that drips would never end
INTERPRETER_SECONDS = 20.0
PROGRAM_SECONDS = 30.0
SILENT_SECONDS = 600  # a launcher that lost its network leaves us a session without an end
READ_BYTES = 1 << 16
CARD_BYTES = 1 << 26
MOST_MOVES = 5  # redirects that are followed, as the ranks do; on the same server only
MOST_CALLERS = 512
NONCE_BYTES = 16
PROOF_BYTES = 32
LARGEST_NUMBER = 2**53  # what JSON holds exactly; a disk in a cloud may claim 8 EiB
NAMED_FILES = 5
NAME_LETTERS = 255
SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40  # an interface's name and address, in the kernel's words on 64 bits

HELD: dict[str, int] = {}
"""The files that `hold` has locked: path -> descriptor."""

LISTENERS: list[tuple[socket.socket, threading.Thread]] = []
"""What `listen` has opened, and who greets there."""

STRANGER = "somebody else answers there"

DESCRIBE = """\
import importlib.util, json, os, sys
said = {"version": "%d.%d.%d" % sys.version_info[:3], "torch": "", "cuda": ""}
spec = importlib.util.find_spec("torch")
if spec is not None and spec.origin:
    told = {}
    with open(os.path.join(os.path.dirname(spec.origin), "version.py")) as file:
        exec(file.read(), told)
    said.update(torch=told["__version__"], cuda=told.get("cuda") or "")
print(json.dumps(said))
"""
"""Run by the interpreter of the ranks; reads torch's version without the cost of importing it."""


def serve(source: bytes) -> None:
    """Answer orders from standard input until it ends, or another program takes over."""
    os.chdir("/")  # a folder of somebody's choice is no place to start interpreters in
    orders: dict[str, Callable[..., dict[str, Any]]] = {
        "look": look,
        "image": image,
        "replace": replace_by,
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
    }
    sys.stdout.buffer.write(MARKER)  # goes with the first answer, whose order came along with us
    signal.signal(signal.SIGALRM, leave)
    while True:
        signal.alarm(SILENT_SECONDS)
        length = sys.stdin.buffer.readline()
        if not length:
            release()
            return
        order = json.loads(sys.stdin.buffer.read(int(length)))
        signal.alarm(0)
        if order["do"] == "become":
            release()
            become()
            return
        try:
            answer = orders[order.pop("do")](**order)
        except OSError as error:
            answer = {"error": error.strerror or str(error)}
        tell(answer)


def leave(*reason: object) -> None:
    """End in the middle of a wait."""
    release()
    os._exit(1)


def tell(answer: dict[str, Any]) -> None:
    """One answer."""
    text = json.dumps(answer).encode()
    sys.stdout.buffer.write(b"%d\n%s" % (len(text), text))
    sys.stdout.buffer.flush()


def become() -> None:
    """Run the program that comes next on standard input, as if it were the first."""
    length = sys.stdin.buffer.readline()
    if length:
        source = sys.stdin.buffer.read(int(length))
        program: dict[str, Any] = {"__name__": "rackrun_agent"}
        exec(source, program)
        program["serve"](source)


def clock() -> dict[str, Any]:
    """What time it is here."""
    return {"time": time.time()}


def look(workdir: str, python: str, parts: list[str], contained: bool = False) -> dict[str, Any]:
    """What can be known at once: who and where we are, and what the ranks would run on.

    `parts` are the endings of the lock files that the run would hold alone. `contained`: the
    interpreter is that of an image, which `image` looks at.
    """
    workdir = os.path.abspath(os.path.join(os.path.expanduser("~"), os.path.expanduser(workdir)))
    connection = os.environ.get("SSH_CONNECTION", "").split()
    lock = lock_path(connection)
    try:
        there = within(FOLDER_SECONDS, lambda: look_into(workdir, "" if contained else python))
    except TimeoutError:
        return {"error": f"{workdir} does not answer: a file server that is gone?"}
    interpreter = (python or "python3") if contained else there["python"]
    return {
        **clock(),
        **there,
        "machine": machine(),
        "address": address_in(connection),
        "lock": lock,
        "holder": holder_of([lock + part for part in parts]),
        "workdir": workdir,
        "python": interpreter,
        "interpreter": {} if contained else describe([interpreter]),
        "user": {"uid": os.getuid(), "gid": os.getgid(), "name": user_name(os.getuid())},
        "cores": len(os.sched_getaffinity(0)),
        "gpus": len([name for name in os.listdir("/dev") if is_gpu(name)]),
        "open_files": os.sysconf("SC_OPEN_MAX"),
    }


def look_into(workdir: str, python: str) -> dict[str, Any]:
    """What only the disk of the working directory can say."""
    return {
        "workdir_problem": workdir_problem(workdir),
        "python": find_interpreter(workdir, python),
        "disk_free": min(disk_free(workdir), LARGEST_NUMBER),
    }


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """Return what some work returns; raise TimeoutError when that takes too long.

    It is left to a thread: neither a dead file server nor a slow name server hears a signal.
    """
    import _thread  # threading would take as long to import as Python takes to start

    found: list[Any] = []
    running = _thread.allocate_lock()
    running.acquire()

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))
        finally:
            running.release()

    _thread.start_new_thread(run, ())
    if not running.acquire(timeout=seconds):
        raise TimeoutError(errno.ETIMEDOUT, "takes too long")
    value, error = found[0]
    if error is not None:
        raise error
    return value


def image(name: str, command: list[str]) -> dict[str, Any]:
    """The id of an image, and what the interpreter in it is like; `command` starts that."""
    try:
        told = lines_of("docker", "image", "inspect", "--format", "{{.Id}}", name)
    except OSError as error:
        return {"error": f"docker: {error.strerror}"}
    if not told:
        return {"error": f"there is no image {name}, or docker does not let us look"}
    return {"id": told[0].rpartition(":")[2][:12], "interpreter": describe(command)}


def replace_by(command: list[str]) -> dict[str, Any]:
    """Give this process to another program, which gets what comes in from now on."""
    program = find_program(command[0])
    if program is not None:
        release()
        tell({})
        os.execv(program, command)
    return {"error": f"there is no {command[0]} on this host"}


def gpus() -> dict[str, Any]:
    """Model and memory of every GPU, and the processes that are on them now."""
    program = find_program("nvidia-smi")
    if program is None:
        return {"gpus": [], "processes": []}
    fields = "index,name,memory.total,memory.used"
    rows = [line.split(", ") for line in query(program, "--query-gpu=" + fields)]
    apps = [line.split(", ") for line in query(program, "--query-compute-apps=pid,used_memory")]
    return {
        "gpus": [{"name": row[1], "total": number(row[2]), "used": number(row[3])} for row in rows],
        "processes": [{"pid": number(app[0]), "name": name_of(number(app[0]))} for app in apps],
    }


def code(root: str, files: dict[str, str]) -> dict[str, Any]:
    """Which of these files are not here, and which have another SHA-256 than given."""
    missing: list[str] = []
    different: list[str] = []
    for path, digest in files.items():
        found = file_digest(os.path.join(root, path))
        if found != digest:
            (different if found else missing).append(path)
    return {
        "missing": missing[:NAMED_FILES],
        "different": different[:NAMED_FILES],
        "count": len(missing) + len(different),
    }


def route(address: str) -> dict[str, Any]:
    """The device and our own address that the kernel takes towards an address or name, and its."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))
        ours, theirs = sock.getsockname()[0], sock.getpeername()[0]
    return {"address": ours, "interface": interface_of(ours), "master": theirs}


def address_of(interface: str) -> dict[str, Any]:
    """The first address of a device."""
    found = [address for address, name in addresses() if name == interface]
    if found:
        return {"address": found[0]}
    known = ", ".join(sorted({name for _, name in addresses()}))
    return {"error": f"there is no device {interface} with an address; there are: {known}"}


def listen(address: str, port: int, token: str) -> dict[str, Any]:
    """Listen on a port that is free here, for the other hosts to try, until `hush`."""
    import threading

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError as error:
        listener.close()
        return {"error": f"port {port}: {error.strerror}"}
    listener.listen(1024)
    greeter = threading.Thread(target=greet, args=(listener, token.encode()), daemon=True)
    greeter.start()
    LISTENERS.append((listener, greeter))
    return {"port": listener.getsockname()[1]}


def hush() -> dict[str, Any]:
    """Listen no more: the port is free for the one whom it was kept for."""
    while LISTENERS:
        listener, greeter = LISTENERS.pop()
        listener.shutdown(socket.SHUT_RDWR)  # wakes the greeter
        greeter.join(CONNECT_SECONDS)
        listener.close()
    return {}


def greet(listener: socket.socket, token: bytes) -> None:
    """Prove to whoever calls that we know the token, without telling it; many may call at once.

    The caller hangs up first, so that no port stays in use.
    """
    waiting = select.epoll()
    callers: dict[int, tuple[socket.socket, float]] = {}  # the oldest first
    listener.setblocking(False)
    waiting.register(listener, select.EPOLLIN)
    while True:
        for descriptor, _ in waiting.poll(1.0):
            if descriptor == listener.fileno():
                if not let_in(listener, waiting, callers):
                    hang_up(callers, 0)
                    return
            elif descriptor in callers and not answered(callers[descriptor][0], token):
                callers.pop(descriptor)[0].close()
        late = sum(since < time.monotonic() - CONNECT_SECONDS for _, since in callers.values())
        hang_up(callers, min(len(callers) - late, MOST_CALLERS))


def let_in(
    listener: socket.socket, waiting: select.epoll, callers: dict[int, tuple[socket.socket, float]]
) -> bool:
    """Take one more call; False when we are hushed."""
    try:
        caller, _ = listener.accept()
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            hang_up(callers, len(callers) // 2)
            time.sleep(0.01)  # there may be nobody to hang up on
        return error.errno != errno.EINVAL
    caller.setblocking(False)
    callers[caller.fileno()] = caller, time.monotonic()
    waiting.register(caller, select.EPOLLIN)
    return True


def answered(caller: socket.socket, token: bytes) -> bool:
    """Answer a caller's number, which comes in one piece; whether it is to be listened to."""
    try:
        number = caller.recv(NONCE_BYTES)
        if len(number) == NONCE_BYTES:
            caller.sendall(proof(token, number))
    except OSError:
        return False
    return bool(number)


def hang_up(callers: dict[int, tuple[socket.socket, float]], left: int) -> None:
    """Hang up on those who called first, until so many are left."""
    for descriptor in list(callers)[: max(0, len(callers) - left)]:
        callers.pop(descriptor)[0].close()


def proof(token: bytes, number: bytes) -> bytes:
    """What only who knows the token can answer to a number."""
    import hmac

    return hmac.digest(token, number, "sha256")


def reach(address: str, port: int, token: str) -> dict[str, Any]:
    """Whether the listener of the master can be reached from here, and is the one we mean."""
    number = os.urandom(NONCE_BYTES)
    deadline = time.monotonic() + CONNECT_SECONDS
    heard = b""
    with socket.create_connection((address, port), timeout=CONNECT_SECONDS) as sock:
        sock.sendall(number)
        while len(heard) < PROOF_BYTES:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = sock.recv(PROOF_BYTES - len(heard))
            heard += data
            if not data:
                break
    return {} if heard == proof(token.encode(), number) else {"error": STRANGER}


def shards(
    data: str, workdir: str, every_shard: bool, environment: dict[str, str]
) -> dict[str, Any]:
    """Whether the card of a shard folder or server can be read from here, and its shards."""
    try:
        if not data.startswith(("http://", "https://")):
            folder = os.path.join(workdir, os.path.expanduser(data))
            return {"dataset": within(FOLDER_SECONDS, lambda: dataset_in(folder))}
        files = {**os.environ, **environment}
        return {
            "dataset": within(
                SHARDS_SECONDS * (1 + 2 * every_shard),
                lambda: dataset_at(data.rstrip("/") + "/", workdir, every_shard, files),
            )
        }
    except FileNotFoundError as error:
        return {"error": f"there is no {error.filename}"}
    except TimeoutError:
        return {"error": f"{data}: does not answer in time"}
    except Unfit as error:
        return {"error": str(error)}


class Unfit(Exception):
    """A server or a card that the ranks could not read from, either."""


def dataset_at(base: str, workdir: str, every_shard: bool, files: dict[str, str]) -> str:
    """The name of the data set that a server has, some of whose shards can be read."""
    if os.path.isdir(workdir):
        os.chdir(workdir)  # as the ranks do, who may know their secrets by relative paths
    reader = reader_of(base, files)
    name, shards = card_of(fetch(reader, base + "dataset.json"), base)
    for shard in shards if every_shard else shards[:1]:
        fetch(reader, base + shard, first_byte=True)
    return name


def dataset_in(folder: str) -> str:
    """The name of the data set in a shard folder."""
    with open(os.path.join(folder, "dataset.json"), "rb") as file:
        return card_of(file.read(CARD_BYTES + 1), folder)[0]


def card_of(body: bytes, where: str) -> tuple[str, list[str]]:
    """The name of a data set, and those of its shards; raises Unfit for what is no card."""
    try:
        if len(body) > CARD_BYTES:
            raise ValueError
        card = json.loads(body)
        shards = [shard["name"] for split in card["splits"] for shard in split["shards"]]
        if not all(isinstance(name, str) for name in (card["dataset"], *shards)):
            raise TypeError
    except (KeyError, TypeError, ValueError, RecursionError):
        raise Unfit(f"{where}: dataset.json is not a card of ours") from None
    return card["dataset"][:NAME_LETTERS], shards


def holder_of(paths: list[str]) -> str:
    """Who holds a lock on one of these files; empty when nobody does."""
    with contextlib.suppress(OSError):  # a file that has just gone is held by nobody
        files = {identity(path) for path in paths if os.path.lexists(path)}
        for fields in map(str.split, lines_of_locks() if files else ()):
            if fields[1] == "FLOCK" and fields[5] in files:
                return process_in_words(int(fields[4]))
    return ""


def identity(path: str) -> str:
    """A file as the kernel's list of locks names it: fd:01:12345, the disk and the inode.

    What stat calls the device is another number on Btrfs and overlays: mountinfo has the disk's.
    """
    descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW)
    try:
        inode = os.fstat(descriptor).st_ino
        with open(f"/proc/self/fdinfo/{descriptor}") as file:
            mount = next((line.split()[1] for line in file if line.startswith("mnt_id:")), "")
    finally:
        os.close(descriptor)
    with open("/proc/self/mountinfo") as file:
        mounts = {words[0]: words[2] for words in map(str.split, file)}
    major, _, minor = mounts.get(mount, "0:0").partition(":")
    return f"{int(major):02x}:{int(minor):02x}:{inode}"


def lines_of_locks() -> list[str]:
    """All locks of this host; the kernel takes its time to collect them."""
    with open("/proc/locks") as file:
        return file.readlines()


def release() -> None:
    """Remove the files that we held alone; whoever waits for one makes a new one."""
    for path, descriptor in HELD.items():
        with contextlib.suppress(OSError):  # others share it, or it is another user's file
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def hold(path: str, shared: bool) -> dict[str, Any]:
    """Lock a file until this program ends; says who holds it otherwise."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # it may be a link, or a pipe
    if not os.path.lexists(path):
        with contextlib.suppress(FileExistsError):
            created = os.open(path, flags | os.O_CREAT | os.O_EXCL)
            os.fchmod(created, 0o644)  # whatever the umask is: it is there for all accounts
            os.close(created)
    try:
        descriptor = os.open(path, flags)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            return {"error": "is no plain file; have it removed"}
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return {"holder": holder_of([path]) or "another launch"}
    HELD[path] = descriptor
    return {"holder": ""}


# -- what the answers are made of


def address_in(connection: list[str]) -> str:
    """The address that we were called at; empty where sshd has none: behind a pipe, or no sshd."""
    address = connection[2] if len(connection) == 4 else ""
    return address if "." in address or ":" in address else ""  # not UNKNOWN


def lock_path(connection: list[str]) -> str:
    """The file that a run on this host locks; several sshd on loopback are hosts of their own."""
    loopback = len(connection) == 4 and connection[2].startswith("127.")
    name = "-".join(connection[2:]) if loopback else machine()
    return f"/tmp/rackrun-{name}.lock"


def process_in_words(pid: int) -> str:
    """Whose process it is and since when it runs."""
    try:
        status = os.stat(f"/proc/{pid}")
        with open(f"/proc/{pid}/stat") as file:
            ticks = int(file.read().rpartition(")")[2].split()[19])
    except OSError:
        return f"process {pid}"
    since = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    user = user_name(status.st_uid)
    return f"{user}'s process {pid}, since {time.strftime('%H:%M:%S', time.localtime(since))}"


def user_name(uid: int) -> str:
    """What a user is called here, or the number when nobody says."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def reader_of(base: str, files: dict[str, str]) -> urllib.request.OpenerDirector:
    """What asks a server as the ranks will: by no proxy, and with the secrets that files hold.

    It is put together by hand: it follows no redirect, so the password goes to no other server.
    """
    import base64
    import ssl
    import urllib.request

    trust = ssl.create_default_context(cafile=files.get("RACKRUN_CA"))
    if "RACKRUN_CERTIFICATE" in files:
        trust.load_cert_chain(files["RACKRUN_CERTIFICATE"], files.get("RACKRUN_KEY"))
    reader = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(context=trust),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.HTTPErrorProcessor(),
    ):
        reader.add_handler(handler)
    if "RACKRUN_CREDENTIALS" in files and is_private(base):
        with open(files["RACKRUN_CREDENTIALS"], "rb") as file:
            secret = base64.b64encode(file.read(READ_BYTES).strip()).decode()
        reader.addheaders = [("Authorization", f"Basic {secret}")]
    return reader


def is_private(url: str) -> bool:
    """Whether nobody reads along on the way: TLS, or this machine by its number."""
    import urllib.parse

    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    here = host == "::1" or (host.startswith("127.") and host.replace(".", "").isdigit())
    return parts.scheme == "https" or here


def fetch(reader: urllib.request.OpenerDirector, url: str, first_byte: bool = False) -> bytes:
    """The body of a URL up to a limit, or its first byte; raises Unfit, in words for people."""
    import http.client
    import urllib.error

    place = url
    for _ in range(MOST_MOVES + 1):
        try:
            return body_of(reader, place, first_byte)
        except urllib.error.HTTPError as error:
            with error:
                place = moved(place, error)
        except urllib.error.URLError as error:
            raise Unfit(f"{url}: {reason_of(error.reason)}") from error
        except OSError as error:
            raise Unfit(f"{url}: {reason_of(error)}") from error
        except (http.client.HTTPException, ValueError) as error:
            raise Unfit(f"{url}: answers no HTTP ({type(error).__name__})") from error
    raise Unfit(f"{url}: too many redirects")


def reason_of(error: object) -> str:
    """Why nothing came, as the system says it."""
    return str(getattr(error, "strerror", None) or error)


def body_of(reader: urllib.request.OpenerDirector, url: str, first_byte: bool) -> bytes:
    """What a server answers to one request."""
    import urllib.request

    request = urllib.request.Request(url, headers={"Range": "bytes=0-0"} if first_byte else {})
    with reader.open(request, timeout=CONNECT_SECONDS) as reply:
        body: bytes = reply.read(1 if first_byte else CARD_BYTES + 1)
        return body


def moved(url: str, error: urllib.error.HTTPError) -> str:
    """Where a redirect leads on the same server; raises Unfit for all other answers."""
    import urllib.parse

    target = error.headers.get("Location", "")
    if error.code not in (301, 302, 303, 307, 308):
        raise Unfit(f"{url}: {error.code} {error.reason}") from error
    try:
        there = urllib.parse.urljoin(url, target)
        before, after = urllib.parse.urlsplit(url), urllib.parse.urlsplit(there)
    except ValueError:
        target = ""
    if not target or (before.scheme, before.netloc) != (after.scheme, after.netloc):
        raise Unfit(f"{url}: {error.code} to {target or 'nowhere'}, which is not followed")
    return there


def machine() -> str:
    """What two names of one machine have in common, and two machines or containers have not."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        boot = file.read().strip()
    namespace = os.stat("/proc/self/ns/net").st_ino
    return f"{boot}-{namespace}-{socket.gethostname()}".replace("/", "_")


def find_interpreter(workdir: str, python: str) -> str:
    """The named interpreter, else that of the project's environment, else the system's."""
    if python:
        path = os.path.expanduser(python)
        return os.path.join(workdir, path) if "/" in path else find_program(path) or path
    own = os.path.join(workdir, ".venv", "bin", "python")
    return own if os.path.exists(own) else find_program("python3") or "python3"


def find_program(name: str) -> str | None:
    """Where a program is, by PATH."""
    paths = [os.path.join(folder, name) for folder in os.get_exec_path()]
    return next((path for path in paths if os.access(path, os.X_OK)), None)


def describe(command: list[str]) -> dict[str, Any]:
    """The version of an interpreter, which this command starts, and of its torch."""
    interpreter = command[-1]
    try:
        told, complaint = heard_from([*command, "-c", DESCRIBE], INTERPRETER_SECONDS)
    except TimeoutError:
        return {"error": f"{interpreter} does not answer"}
    except OSError as error:
        return {"error": f"{interpreter}: {error.strerror}"}
    try:
        said: dict[str, Any] = json.loads(told)
        if set(said) != {"version", "torch", "cuda"}:
            raise TypeError
        return {name: str(value) for name, value in said.items()}
    except (TypeError, ValueError, RecursionError):
        lines = complaint.decode(errors="replace").strip().splitlines()
        of_docker = [line for line in lines if line.startswith("docker: ")]
        return {"error": f"{interpreter}: {[*of_docker, *lines[-1:], 'no answer'][0]}"}


def heard_from(command: list[str], seconds: float) -> tuple[bytes, bytes]:
    """What a program prints, and its complaints; TimeoutError when they do not end in time.

    To import subprocess for this would cost a host half as much as to start Python.
    """
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, out_end, 1),
        (os.POSIX_SPAWN_DUP2, err_end, 2),
    ]
    with open(out, "rb", 0), open(err, "rb", 0):
        try:
            pid = os.posix_spawnp(
                *(command[0], command, os.environ),
                file_actions=actions,
                setsigdef=[signal.SIGPIPE],
            )
        finally:
            os.close(out_end)
            os.close(err_end)
        try:
            heard = read_all((out, err), time.monotonic() + seconds)
        finally:
            os.kill(pid, signal.SIGKILL)  # it has said all, or has had its time
            os.waitpid(pid, 0)
    return heard[out], heard[err]


def read_all(pipes: tuple[int, ...], deadline: float) -> dict[int, bytes]:
    """What comes out of pipes until all of them end; TimeoutError when that takes too long."""
    heard = dict.fromkeys(pipes, b"")
    left = list(pipes)
    while left:
        ready, _, _ = select.select(left, [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(errno.ETIMEDOUT, "takes too long")
        for pipe in ready:
            data = os.read(pipe, READ_BYTES)
            heard[pipe] += data
            if not data:
                left.remove(pipe)
    return heard


def workdir_problem(workdir: str) -> str:
    """Why no run could be started there; empty when it could."""
    if not os.path.isdir(workdir):
        return f"there is no folder {workdir}"
    if not os.access(workdir, os.W_OK | os.X_OK) or os.statvfs(workdir).f_flag & os.ST_RDONLY:
        return f"{workdir} cannot be written"
    return ""


def disk_free(workdir: str) -> int:
    """Bytes that we may still write where the working directory is, or would be."""
    while not os.path.exists(workdir):
        workdir = os.path.dirname(workdir)
    space = os.statvfs(workdir)
    return space.f_bavail * space.f_frsize


def file_digest(path: str) -> str:
    """SHA-256 of a file, or of where a link points to; empty when there is neither."""
    import hashlib

    if os.path.islink(path):
        return hashlib.sha256(b"link " + os.fsencode(os.readlink(path))).hexdigest()
    if not os.path.isfile(path):
        return ""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(lambda: file.read(READ_BYTES), b""):
            digest.update(piece)
    return digest.hexdigest()


def interface_of(address: str) -> str:
    """The name of the device that has this address."""
    if address.startswith("127."):
        return "lo"
    return dict(addresses()).get(address, "")


def addresses() -> list[tuple[str, str]]:
    """Every address of this host with the device that has it."""
    import array

    room = array.array("B", bytes(256 * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(sock, SIOCGIFCONF, request))[0]
    found = []
    for start in range(0, length, IFREQ_BYTES):
        entry = room[start : start + IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is an alias on eth0
        found.append((socket.inet_ntoa(entry[20:24]), name))
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as file:
            for line in file:
                packed, *_, name = line.split()
                found.append((socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed)), name))
    return found


def query(program: str, what: str) -> list[str]:
    """The lines that nvidia-smi prints about something."""
    return lines_of(program, what, "--format=csv,noheader,nounits")


def lines_of(*argv: str) -> list[str]:
    """The lines that a program prints."""
    told, _ = heard_from(list(argv), PROGRAM_SECONDS)
    return [line for line in told.decode(errors="replace").splitlines() if line]


def is_gpu(name: str) -> bool:
    """Whether this is the device of a GPU, not one that all of them share."""
    return name.startswith("nvidia") and name[6:].isdigit()


def number(text: str) -> int:
    """A number of nvidia-smi, which says [N/A] where it has none."""
    return int(text) if text.strip().isdigit() else 0


def name_of(pid: int) -> str:
    """The name of a process, if it still is there and in our sight."""
    try:
        with open(f"/proc/{pid}/comm") as file:
            return file.read().strip()
    except OSError:
        return "?"
