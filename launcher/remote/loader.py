"""Makes the modules of a bundle importable on a host, under their real names.

It is sent ahead of the bundle as plain source, and ends with facts about that bundle. Shims and the
server of ranks start with it as well, as a script beside the same bundle.
"""

from __future__ import annotations

import marshal
import sys
import zlib
from types import ModuleType
from typing import Any

SIZES = (0, 0)  # bytes of the two parts: modules compiled, and as source
MAGIC = b""  # of the bytecode
ENTRY = ""  # the module whose `serve` is the program
SCRIPTS = {  # name under which the script is run -> the module whose `serve` it calls
    "__main__": "rackrun.launcher.remote.agent.shim",
}


class Bundle:
    """The modules of a bundle, as one of the finders that Python asks at an import."""

    def __init__(self, loader: bytes, parts: bytes) -> None:
        """Unpack the modules; `loader` and `parts` are kept as they came, for the shims."""
        self.loader = loader
        self.parts = parts
        self.compiled = sys.modules["_frozen_importlib_external"].MAGIC_NUMBER == MAGIC
        part = parts[: SIZES[0]] if self.compiled else parts[SIZES[0] :]
        self.modules = marshal.loads(zlib.decompress(part))  # name -> program, b"" for a package

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        """Return how a module of the bundle is imported; None for all others."""
        if name not in self.modules:
            return None
        ours: Any = self  # a loader as well, by its methods
        return type(sys.__spec__)(name, ours, is_package=not self.modules[name])

    def create_module(self, spec: object) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        """Fill a module."""
        program = self.modules[module.__name__]
        if program and self.compiled:
            code = marshal.loads(program)
        else:
            code = compile(program, path_of(module.__name__), "exec")
        exec(code, module.__dict__)


def path_of(name: str) -> str:
    """Return the file of a module in tracebacks of a host: its path in the repository."""
    return name.replace(".", "/") + ".py"


def run(entry: str, loader: bytes, parts: bytes) -> None:
    """Import a module of a bundle, and with it what it imports; then run it."""
    bundle: Any = Bundle(loader, parts)
    sys.meta_path.insert(0, bundle)
    __import__(entry)
    sys.modules[entry].serve(bundle)


def serve(loader: bytes) -> None:
    """Run the program whose bundle is next on standard input."""
    run(ENTRY, loader, sys.stdin.buffer.read(sum(SIZES)))


def run_script(name: str) -> None:
    """Run the program of this name, out of the bundle beside this script."""
    with open(sys.argv[0] + ".bundle", "rb") as file:
        parts = file.read()
    run(SCRIPTS[name], b"", parts)
