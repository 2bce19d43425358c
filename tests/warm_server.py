"""Forks Python processes that have imported torch already; started by tests.warm.

    warm_server.py DESCRIPTOR     a Unix socket: one request after another

Importing torch and what an optimizer pulls in costs 7 s of a core. A process forked from here runs
a script, a module or a piece of code as a fresh interpreter would, and imports the project anew.
"""

import importlib
import json
import os
import runpy
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

LIBRARIES = (
    "numpy",
    "PIL.Image",
    "simplejpeg",
    "torch",
    "torch._dynamo",  # what the first optimizer imports
    "torch.distributed.optim",
    "torchvision",
)
Request = dict[str, Any]


def serve(connection: socket.socket) -> Request | None:
    """Return the request in each forked process, and None once nobody asks any more."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 3)
        if not data:
            return None
        own, other = os.pipe()
        between = os.fork()
        if not between:
            process = os.fork()
            if process:  # its parent ends at once, so the test process adopts it
                connection.send(str(process).encode())
                os._exit(0)
            os.close(other)
            os.read(own, 1)
            os.close(own)
            connection.close()
            request: Request = json.loads(data)
            become(request, descriptors)
            return request
        for descriptor in (own, other, *descriptors):
            os.close(descriptor)
        os.waitpid(between, 0)
        connection.send(b"adopted")


def become(request: Request, descriptors: list[int]) -> None:
    """Take over the streams, the environment and the folder that were asked for."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, 256)
    if request["session"]:
        os.setsid()
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    tempfile.tempdir = None
    write_through = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stdout.reconfigure(write_through=write_through)
    sys.stderr = os.fdopen(2, "w", 1, closefd=False)
    import torch

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)))


def run(words: list[str]) -> None:
    """Do what `python WORDS` does, of which -m, -c and a script are known."""
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.path.insert(0, "")
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def main() -> None:
    """Import the libraries, serve, and in each forked process run what was asked for."""
    sys.path.pop(0)  # the folder of the tests
    for library in LIBRARIES:
        importlib.import_module(library)
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if request:
        run(request["words"])


if __name__ == "__main__":
    main()
