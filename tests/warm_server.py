"""Forks Python processes whose imports are done; started by tests.warm.

    warm_server.py DESCRIPTOR KIND     a Unix socket: one request after another

Importing torch and what an optimizer pulls in costs 7 s of a core, importing the launcher 1 s. A
process forked from here runs a script, a module or a piece of code as a fresh interpreter would.
What is imported of this tree is forgotten where another tree's code is to run.
"""

import atexit
import faulthandler
import gc
import importlib
import importlib.machinery
import json
import os
import pkgutil
import runpy
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, NoReturn

TORCH = (
    "numpy",
    "PIL.Image",
    "simplejpeg",
    "torch",
    "torch._dynamo",  # what the first optimizer imports
    "torch.distributed.optim",
    "torchvision",
)
OURS = ("training.entry", "training.loop", "training.config", "rackrun.run_report.page")
SET_BY_IMPORTS = ("OMP_WAIT_POLICY", "PYTHONWARNINGS", "WDS_SECURE")
ROOT = Path(__file__).parents[1]
NOT_THE_LAUNCHERS = ("__main__", "remote", "ray", "plot")  # hosts' programs, and heavy libraries
WITH_IT = ("tyro", "tests.launcher.drive")
Request = dict[str, Any]


def libraries(kind: str) -> list[str]:
    """Return the modules that processes of a kind find imported: `torch` or `launcher`."""
    if kind == "torch":
        return [*TORCH, *OURS]
    sys.path.insert(0, str(ROOT))
    below = pkgutil.walk_packages([str(ROOT / "launcher")], "launcher.")
    ours = [module.name for module in below if not module.ispkg]
    return [*(name for name in ours if not {*name.split(".")} & {*NOT_THE_LAUNCHERS}), *WITH_IT]


def serve(connection: socket.socket) -> Request | None:
    """Return the request in each forked process, and None after the last client."""
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
    packages = ("rackrun", "shards", "training")
    found = [importlib.machinery.PathFinder.find_spec(name) for name in packages]
    elsewhere = [spec for spec in found if spec and f"{ROOT}{os.sep}" not in f"{spec.origin}"]
    if elsewhere and "training.loop" in sys.modules:
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]


def run(words: list[str]) -> None:
    """Do what `python WORDS` does, of which -m, -c and a script are known."""
    sys.path[:0] = [folder for folder in os.environ.get("PYTHONPATH", "").split(":") if folder]
    if words[0] == "-m":
        sys.path.insert(0, str(Path.cwd()))
        forget_another_tree()
        sys.argv = words[1:]
        runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
    elif words[0] == "-c":
        sys.path.insert(0, "")
        forget_another_tree()
        sys.argv = ["-c", *words[2:]]
        exec(words[1], {"__name__": "__main__"})
    else:
        sys.path.insert(0, str(Path(words[0]).parent))
        forget_another_tree()
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")


def leave(code: object) -> NoReturn:
    """End as an interpreter does, but leave the imports to the kernel: to free them costs 1 s."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code & 0xFF if isinstance(code, int) else bool(code))


def main() -> None:
    """Import what the kind asks for, serve, and in each forked process run what was asked for."""
    sys.path.pop(0)  # the folder of the tests
    for library in libraries(sys.argv[2]):
        importlib.import_module(library)
    gc.collect()
    gc.freeze()  # what is here stays: collecting it in each process would copy all of it
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    if not request:
        return
    try:
        run(request["words"])
    except SystemExit as end:
        leave(end.code)
    leave(None)


if __name__ == "__main__":
    main()
