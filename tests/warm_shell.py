"""An interpreter whose imports are done: a script to call as `python`, and the server it calls.

    warm_shell.py SOCKET PID     serves until that process has ended

What is started by the script runs in a process forked from the server, in the network and under the
host name of the script, and with its project. The script waits for it, passes signals on, and ends
with its exit code. tests/warm.py does the same for children of a test; this is for commands that
start `python` themselves, as ./run-local and agents on hosts do.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
from pathlib import Path

LIBRARIES = (
    *("fabric", "paramiko", "tyro", "rich.table", "rich.live", "jinja2", "simplejpeg"),
    *("matplotlib.figure", "matplotlib.backends.backend_agg", "webdataset", "safetensors.torch"),
    *("torch", "torch._dynamo", "torch.distributed.optim", "torch.distributed.run"),
    *("torch.utils.tensorboard", "torchvision.transforms.v2", "torchvision.models"),
)
CLIENT = """\
#!{real} -IS
import os, sys
words = ["-c" if word == "-uc" else word for word in sys.argv[1:]]
while words and words[0][:1] == "-" and words[0] not in ("-m", "-c"):
    del words[: 1 + (words[0] in ("-W", "-X"))]
kind = words[0] if words else ""
torch = "torch.distributed.run", "import torch", "from training"
is_ours = kind == "-m" or kind == "-c" and any(name in words[1] for name in torch)
if not is_ours and (not kind.endswith((".py", "/rackrun")) or kind.endswith("agent.py")):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
import json, signal, socket
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({socket!r})
for number in (getattr(signal, "SIG" + name) for name in "INT TERM HUP USR1 ABRT".split()):
    signal.signal(number, lambda number, frame: connection.send(str(int(number)).encode()))
about = dict(words=words, folder=os.getcwd(), environment=dict(os.environ), session=False)
about["project"] = {project!r}
socket.send_fds(connection, [json.dumps(about).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
code = int(connection.recv(64) or 1)
if code < 0:
    if -code != signal.SIGKILL:
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


NAMESPACES = ("net", "uts", "mnt")  # of a host in tests/launcher/netlab.py


def write_client(path: Path, listening: Path, project: str = "") -> None:
    """Write the script that stands for `python`, of a project with an environment of its own."""
    about = {"real": sys.executable, "socket": os.fspath(listening), "project": project}
    path.write_text(CLIENT.format(**about))
    path.chmod(0o755)


class Child:
    """A forked process, and the connection to the script that asked for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.ended = os.pidfd_open(pid)

    def pass_on(self) -> None:
        """Pass a signal on; a script that was killed takes its process along."""
        data = self.connection.recv(64)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, int(data or signal.SIGKILL))

    def close(self) -> None:
        """Send the script the exit status of the process."""
        status = os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(OSError):
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.connection.close()
        os.close(self.ended)


def serve(listening: socket.socket, master: int) -> tuple[dict, list[int]] | None:
    """Return a request and its streams in each forked process, and None once the master ends."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(listening, selectors.EVENT_READ)
        waiting.register(master, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj == master:
                    return None
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                    if not data:
                        connection.close()
                        continue
                    pid = os.fork()
                    if not pid:
                        join(connection)
                        return json.loads(data), descriptors
                    for descriptor in descriptors:
                        os.close(descriptor)
                    child = Child(connection, pid)
                    waiting.register(connection, selectors.EVENT_READ, child)
                    waiting.register(child.ended, selectors.EVENT_READ, child)
                elif key.fileobj == key.data.ended:
                    waiting.unregister(key.data.ended)
                    with contextlib.suppress(KeyError):
                        waiting.unregister(key.data.connection)
                    key.data.close()
                    break  # the other events may be those of this child
                else:
                    key.data.pass_on()


def join(connection: socket.socket) -> None:
    """Enter the namespaces of the script at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    theirs, ours = Path(f"/proc/{struct.unpack('3i', peer)[0]}/ns"), Path("/proc/self/ns")
    for name in NAMESPACES:
        if (theirs / name).readlink() != (ours / name).readlink():
            descriptor = os.open(theirs / name, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"{name} of the script")


def run(words: list[str], project: str) -> None:
    """Do what `python WORDS` does where that project is installed."""
    if project:
        sys.path.insert(0, project)
        sys.executable = f"{project}/.venv/bin/python"
    if words[0].endswith("rackrun/__main__.py"):  # as with -P
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        warm_server.run(words)


def main() -> None:
    """Import, listen, and in each forked process run what was asked for."""
    path, master = Path(sys.argv[1]), os.pidfd_open(int(sys.argv[2]))
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.fspath(path.with_suffix(".new")))
        listening.listen(64)
        path.with_suffix(".new").rename(path)
        request, descriptors = serve(listening, master) or ({}, [])
    if not request:
        shutil.rmtree(path.parent)
        os._exit(0)  # to free what was imported costs a second
    warm_server.become(request, descriptors)
    try:
        run(request["words"], request["project"])
    except SystemExit as end:
        warm_server.leave(end.code)
    except KeyboardInterrupt:
        warm_server.leave(130)
    warm_server.leave(None)


if __name__ == "__main__":
    import warm_server  # beside this file

    sys.path.pop(0)
    main()
