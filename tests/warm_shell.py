"""An interpreter whose imports are done: a script to call as `python`, and the server it calls.

    warm_shell.py SOCKET FOLDER     serves until its standard input ends

What is started by the script runs in a process forked from the server, with the project of FOLDER.
The script waits for it, passes signals on, and ends with its exit code. tests/warm.py does the same
for children of a test; this is for commands that start `python` themselves, as ./run-local does.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
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
words = sys.argv[1:]
while words and words[0][:1] == "-" and words[0] not in ("-m", "-c"):
    del words[: 1 + (words[0] in ("-W", "-X"))]
kind = words[0] if words else ""
is_ours = kind == "-m" or kind == "-c" and "torch.distributed.run" in words[1]
if not is_ours and (not kind.endswith((".py", "/rackrun")) or kind.endswith("agent.py")):
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
import json, signal, socket
connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
connection.connect({socket!r})
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: connection.send(str(int(number)).encode()))
about = dict(words=words, folder=os.getcwd(), environment=dict(os.environ), session=False)
socket.send_fds(connection, [json.dumps(about).encode()], [0, 1, 2])
for descriptor in (0, 1, 2):
    os.close(descriptor)
code = int(connection.recv(64) or 1)
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
os._exit(code)
"""


def write_client(path: Path, listening: Path) -> None:
    """Write the script that stands for `python`."""
    path.write_text(CLIENT.format(real=sys.executable, socket=os.fspath(listening)))
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
        """Tell the script how the process ended."""
        status = os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(OSError):
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.connection.close()
        os.close(self.ended)


def serve(listening: socket.socket) -> tuple[dict, list[int]] | None:
    """Return a request and its streams in each forked process, and None at the end of the input."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(listening, selectors.EVENT_READ)
        waiting.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in waiting.select():
                if key.fileobj == 0:
                    return None
                if key.fileobj is listening:
                    connection, _ = listening.accept()
                    data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
                    if not data:
                        connection.close()
                        continue
                    pid = os.fork()
                    if not pid:
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


def run(words: list[str], project: str) -> None:
    """Do what `python WORDS` does where that project is installed."""
    sys.path.insert(0, project)
    if words[0].endswith("rackrun/__main__.py"):  # as with -P
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")
    else:
        warm_server.run(words)


def main() -> None:
    """Import, listen, and in each forked process run what was asked for."""
    path, project = sys.argv[1:]
    for library in LIBRARIES:
        importlib.import_module(library)
    gc.collect()
    gc.freeze()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen(64)
        request, descriptors = serve(listening) or ({}, [])
    if not request:
        os._exit(0)  # to free what was imported costs a second
    warm_server.become(request, descriptors)
    sys.executable = f"{project}/.venv/bin/python"
    try:
        run(request["words"], project)
    except SystemExit as end:
        warm_server.leave(end.code)
    except KeyboardInterrupt:
        warm_server.leave(130)
    warm_server.leave(None)


if __name__ == "__main__":
    import warm_server  # beside this file

    sys.path.pop(0)
    main()
