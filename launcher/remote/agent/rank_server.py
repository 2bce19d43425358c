"""Ranks that start at once: forked from a process which has imported what they need.

    torchrun ──▶ shim ──process id──▶ server ──▶ the rank's parent ──▶ rank
                   ◀──process id of the rank, how it ended──┘

torchrun's process forks the server after `import torch`, so a host imports torch once. The server
imports the modules of the task during the rendezvous of torchrun. It ends when all ranks are
forked, or torchrun is gone, or a copy of it would not work: ranks then start as fresh processes.

A rank's parent does what a shim does for a rank that it has started itself. It ends the rank when
the shim is gone; when it is killed itself, the kernel does.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import sys
from typing import Any

from rackrun.launcher.remote.processes import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_PDEATHSIG,
    environment_of,
    exit_status,
    fork,
    kill_descendants,
    link_target,
    names_in,
    prctl,
    reaped,
    signal_pipe,
)

WAITING_SHIMS = 4096  # a shim that finds no room would start its rank afresh
REQUEST_BYTES = 64  # the process id of a shim
GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri")


def serve(bundle: Any) -> None:
    """Fork the server, which ends with torchrun; continue as torchrun."""
    gc.disable()  # the imports are not over
    torchrun = os.getpid()
    server = RankServer(os.path.dirname(sys.argv[0]), bundle)
    if os.fork() == 0:
        try:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() == torchrun:
                server.run()
        finally:
            os._exit(0)
    server.listener.close()
    forget(bundle)


class RankServer:
    """Forks a rank for each shim that asks."""

    def __init__(self, scratch: str, bundle: Any) -> None:
        self.bundle = bundle
        with open(f"{scratch}/command.json", "rb") as file:
            self.order: dict[str, Any] = json.loads(file.read())
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(f"{scratch}/server")
        self.listener.listen(WAITING_SHIMS)

    def run(self) -> None:
        """Import, then fork as many ranks as there are."""
        forget(self.bundle)
        os.chdir(self.order["workdir"])
        if sys.path[:1] == [""]:
            sys.path[0] = os.getcwd()  # as in `python -m`
        for name in self.order["preload"]:
            __import__(name)
        if not _can_fork():
            return
        gc.freeze()  # a collection in a rank would write to all of it, and so copy it
        for _ in range(self.order["processes"]):
            self._fork_rank()

    def _fork_rank(self) -> None:
        shim, _ = self.listener.accept()
        request, streams, _, _ = socket.recv_fds(shim, REQUEST_BYTES, 3)
        # Not the rank itself, but its parent: somebody has to wait for the rank, and this server
        # is to end when all are forked.
        if request and os.fork() == 0:
            try:
                self.listener.close()
                self._be_parent(shim, environment_of(int(request)), streams)
            finally:
                os._exit(0)
        shim.close()
        for descriptor in streams:
            os.close(descriptor)

    def _be_parent(self, shim: socket.socket, environment: list[bytes], streams: list[int]) -> None:
        os.setsid()
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        signals = signal_pipe()

        def program() -> None:
            shim.close()
            for descriptor in (signals, signal.set_wakeup_fd(-1), *streams):
                os.close(descriptor)
            self._be_rank(environment)

        out, err = streams[1:]
        pid = fork(program, (streams[0], out, err), signal.SIGKILL)
        for descriptor in streams:
            os.close(descriptor)
        shim.send(json.dumps([pid, os.getpid()]).encode())
        status = _end_of(pid, shim, signals)
        kill_descendants()
        if status:
            shim.send(json.dumps(status).encode())

    def _be_rank(self, environment: list[bytes]) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)
        inherited = environment_of(os.getpid())  # the imports may have set others
        for pair in environment:
            name, equals, value = pair.partition(b"=")
            if equals and pair not in inherited:
                os.environb[name] = value
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()  # else all ranks would draw the same numbers
        command: list[str] = self.order["command"]
        _show_command(command)
        run_module(command[command.index("-m") + 1 :])


def _end_of(pid: int, shim: socket.socket, signals: int) -> tuple[int, int] | None:
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        selector.register(shim, selectors.EVENT_READ)
        while True:
            for child, status in reaped():
                if child == pid:
                    return exit_status(status)
            for key, _ in selector.select():
                if key.fd != signals:
                    return None  # the shim sends nothing more: its end has closed
                os.read(signals, 4096)


def _can_fork() -> bool:
    import threading  # costs the shims too much, and is imported here anyway

    # A fork has one thread, and cannot use a GPU that this process has opened. Threads of OpenBLAS,
    # which numpy starts, are not Python's, and not counted: OpenBLAS ends them before a fork.
    opened = [link_target(f"/proc/self/fd/{number}") for number in names_in("/proc/self/fd")]
    has_gpu = any(path.startswith(GPU_DEVICES) for path in opened)
    return threading.active_count() == 1 and not has_gpu


def _show_command(command: list[str]) -> None:
    import ctypes

    # `ps` reads the command from where it lay in memory when this process was started.
    with open("/proc/self/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = b"\0".join(os.fsencode(arg) for arg in command)[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def forget(bundle: Any) -> None:
    """Remove the bundle's modules: the task may import the real ones of these names."""
    finders: list[Any] = sys.meta_path
    finders.remove(bundle)
    for name in bundle.modules:
        sys.modules.pop(name, None)


def run_module(args: list[str]) -> None:
    """Run a module as the main program of this process, to its end."""
    import runpy
    from types import ModuleType

    sys.argv = ["-m", *args[1:]]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        runpy._run_module_as_main(args[0])  # type: ignore[attr-defined]
        os._exit(0)
    except BaseException as error:  # `training` exits by itself, with codes of its own
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(1)
