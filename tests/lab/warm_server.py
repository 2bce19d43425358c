"""Forks Python processes whose imports are done; started by tests.lab.warm.

    warm_server.py SOCKET PID KIND     serves until that process has ended

Importing torch and what an optimizer pulls in costs 7 s of a core, importing the launcher 1 s. A
process forked from here runs a script, a module or a piece of code as a fresh interpreter would. A
client sends words, folder, environment and streams, gets the process id and then the exit code, and
may send signals meanwhile; the process ends with the connection. What is imported of this tree is
forgotten where another tree's code is to run.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

TORCH = (
    *("fabric", "paramiko", "rich.table", "rich.live", "jinja2", "numpy", "PIL.Image"),
    *("webdataset", "safetensors.torch"),
    *("simplejpeg", "torch", "torch._dynamo", "torch.distributed.optim", "torch.distributed.run"),
    *("torch.utils.tensorboard", "torchvision.transforms.v2", "torchvision.models"),
)
"""torch._dynamo is what the first optimizer imports."""

OURS = ("training", "launcher", "convert", "imagenet", "catdog", "mnist")
"""Packages whose commands start with all their imports done."""

SET_BY_IMPORTS = ("OMP_WAIT_POLICY", "PYTHONWARNINGS", "WDS_SECURE")
ROOT = Path(__file__).parents[2]
LEFT_OUT = ("__main__", "remote", "ray", "mlflow_run", "wandb_run", "worker_preload")
"""Programs of hosts, what imports heavy libraries, and what is for loader workers alone."""
NAMESPACES = ("net", "uts", "mnt")  # of a host in tests/lab/network.py
Request = dict[str, Any]


def libraries(kind: str) -> list[str]:
    """Return the modules that processes of a kind find imported: `torch` or `launcher`."""
    if kind == "torch":
        own = [name for package in OURS for name in modules_of(package)]
        return [*TORCH, *own, "rackrun.cli.dispatch", "rackrun.run_report.page"]
    return modules_of("launcher")


def modules_of(package: str) -> list[str]:
    """Return the modules of a package of ours by their full names."""
    below = pkgutil.walk_packages([str(ROOT / package)], f"rackrun.{package}.")
    names = [module.name for module in below if not module.ispkg]
    return [name for name in names if not {*name.split(".")} & {*LEFT_OUT}]


def rehearse_a_rank() -> None:
    """Do what each rank does, for what it imports and keeps on the way."""
    from rackrun.catdog.recipes import RECIPES
    from rackrun.run_report.template import engine
    from rackrun.training.config import from_command_line

    from_command_line(RECIPES, "catdog", ["--synthetic"])
    for template in ("run.html", "compare.html"):
        engine().get_template(template)


def rehearse_a_launch() -> None:
    """Do what each launcher does, for what it imports and keeps on the way."""
    from rackrun.launcher.commands.parse import read
    from rackrun.launcher.commands.settings import SSH_HEAD, SshOptions
    from rackrun.launcher.transport.bootstrap import opening

    read("ssh", SshOptions, SSH_HEAD, ["--check", "hosts.txt"])
    opening()


class Child:
    """A forked process, and the connection to the one that asked for it."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self.connection, self.pid = connection, pid
        self.ended = os.pidfd_open(pid)
        with contextlib.suppress(OSError):
            connection.send(str(pid).encode())

    def pass_on(self) -> None:
        """Pass a signal on; one that asked and is gone takes its process along."""
        data = self.connection.recv(64)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, int(data or signal.SIGKILL))

    def close(self) -> None:
        """Send how the process ended."""
        status = os.waitpid(self.pid, 0)[1]
        with contextlib.suppress(OSError):
            self.connection.send(str(os.waitstatus_to_exitcode(status)).encode())
        self.connection.close()
        os.close(self.ended)


def serve(listening: socket.socket, master: int) -> tuple[Request, list[int]] | None:
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
    """Enter the namespaces of the process at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    theirs, ours = Path(f"/proc/{struct.unpack('3i', peer)[0]}/ns"), Path("/proc/self/ns")
    for name in NAMESPACES:
        if (theirs / name).readlink() != (ours / name).readlink():
            descriptor = os.open(theirs / name, os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
                raise OSError(ctypes.get_errno(), f"{name} of the process that asked")


def become(request: Request, descriptors: list[int]) -> None:
    """Take over the streams, the environment and the folder that were asked for."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 4096)
    if request["session"]:
        if os.isatty(0):
            os.login_tty(0)
        else:
            os.setsid()
    os.chdir(request["folder"])
    kept = {name: os.environ[name] for name in SET_BY_IMPORTS if name in os.environ}
    os.environ.clear()
    os.environ.update(kept | request["environment"])
    tempfile.tempdir = None
    write_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=write_through)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    if os.environ.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    if "torch" in sys.modules:
        threads = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
        sys.modules["torch"].set_num_threads(threads)


def forget_another_tree() -> None:
    """Have our modules imported anew where those of a clone, or of a host, come first."""
    spec = importlib.machinery.PathFinder.find_spec("rackrun")
    is_elsewhere = spec and f"{ROOT}{os.sep}" not in f"{spec.origin}"
    if is_elsewhere and "rackrun.training.train" in sys.modules:
        for name in [name for name in sys.modules if name.partition(".")[0] == "rackrun"]:
            del sys.modules[name]


def run(args: list[str], project: str | None) -> None:
    """Do what `python WORDS` does, of which -m, -c and a script are known, in a project's .venv."""
    if project:
        sys.path.insert(0, project)
        sys.executable = f"{project}/.venv/bin/python"
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if args[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        forget_another_tree()
        sys.argv = args[1:]
        runpy._run_module_as_main(args[1])
    elif args[0] == "-c":
        sys.path.insert(0, "")
        forget_another_tree()
        sys.argv = ["-c", *args[2:]]
        exec(args[1], {"__name__": "__main__"})
    else:
        is_door = args[0].endswith("rackrun/__main__.py")  # which is called with -P
        sys.path.insert(0, str(Path(args[0]).parents[is_door]))
        forget_another_tree()
        sys.argv = args
        runpy.run_path(args[0], run_name="__main__")


def leave(code: object) -> NoReturn:
    """End as an interpreter does, but leave the imports to the kernel: to free them costs 1 s."""
    threading._shutdown()
    atexit._run_exitfuncs()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else bool(code))


def main(path: Path, master: int, kind: str) -> None:
    """Import what the kind asks for, serve, and in each forked process run what was asked for."""
    sys.path[0] = str(ROOT)  # not the folder of this file; an installed rackrun may be another
    for library in libraries(kind):
        importlib.import_module(library)
    if kind == "torch":
        rehearse_a_rank()
    else:
        rehearse_a_launch()
    gc.collect()
    gc.freeze()  # what is here stays: collecting it in each process would copy all of it
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(os.fspath(path.with_suffix(".new")))
        listening.listen(64)
        path.with_suffix(".new").rename(path)
        request, descriptors = serve(listening, os.pidfd_open(master)) or ({}, [])
    if not request:
        shutil.rmtree(path.parent)
        os._exit(0)  # to free what was imported costs a second
    become(request, descriptors)
    try:
        run(request["words"], request["project"])
    except SystemExit as end:
        leave(end.code)
    except KeyboardInterrupt:
        if request["project"] is None:
            raise
        leave(130)
    except Exception:
        sys.excepthook(*sys.exc_info())
        leave(1)
    leave(None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
