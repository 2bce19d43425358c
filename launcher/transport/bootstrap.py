"""Starts our program on a host, encodes its orders, and reads why it failed."""

from __future__ import annotations

import functools
import io
import json
import marshal
import re
import threading
import zipfile
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER
from pathlib import Path
from typing import Any

from rackrun import contract
from rackrun.launcher import remote
from rackrun.terminal import one_line

PACKAGES = (remote, contract)
"""All that the program on hosts is made of."""
PROGRAM = f"{remote.__name__}.program"
LONGEST_COMPLAINT = 300
FRAME = re.compile(r'^  File "[^"\n]*(rackrun/[\w/]+\.py)", line (\d+)', re.MULTILINE)
UNCHECKED = b"\1\0\0\0" + bytes(8)
"""The flags in a .pyc file that keep it from being compared with its source (PEP 552)."""
_PACKING = threading.Lock()

BOOTSTRAP = (
    "import sys,os,importlib as m,signal as s;sys.version_info<(3,8) and sys.exit("
    '"Python %s is older than 3.8; name another one with python= in hosts.txt"'
    "%sys.version.split()[0]);s.alarm(60);i=sys.stdin.buffer;"
    "n=i.readline();d=i.read(int(n));s.alarm(0);"
    'f=open(os.memfd_create("rackrun"),"wb") if hasattr(os,"memfd_create")'
    ' else m.import_module("tempfile").TemporaryFile();f.write(d);f.flush();'
    'sys.path.insert(0,"/proc/self/fd/%d"%f.fileno());'
    f'm.import_module("{PROGRAM}").serve()'
)
"""Reads the program from standard input, its size on a line before it, and starts it.

It is a zip, kept in a file without a name. Pythons built for an old glibc, such as those of conda,
cannot make one in memory. What has not arrived after a minute never will: where a link broke, sshd
may wait for hours.
"""


def opening() -> bytes:
    """Return what `BOOTSTRAP` reads: the program."""
    with _PACKING:  # the connections of many hosts ask at once
        packed = _packed()
    return b"%d\n%s" % (len(packed), packed)


@functools.cache
def _packed() -> bytes:
    """Return the program as a zip, which as a script is the shim of a rank.

    Beside each source lies the bytecode of this Python, which a Python of the same version on the
    host runs: that saves 50 ms of CPU there, and any other one skips it.
    """
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for package in PACKAGES:
            name = package.__name__.replace(".", "/")
            for folder in package.__path__:
                for path in sorted(Path(folder).rglob("*.py")):
                    inside = f"{name}/{path.relative_to(folder)}"
                    archive.writestr(inside, path.read_bytes())
                    archive.writestr(f"{inside}c", _bytecode(path))
        for parent in ("rackrun", "rackrun/launcher"):  # whose own code is for this side only
            archive.writestr(f"{parent}/__init__.py", "")
        script = f"from {remote.__name__}.agent.shim import main\n\nmain()\n"
        archive.writestr("__main__.py", script)
    return data.getvalue()


def _bytecode(path: Path) -> bytes:
    code = SourceFileLoader("program", str(path)).get_code("program")  # compiled once, then kept
    return MAGIC_NUMBER + UNCHECKED + marshal.dumps(code)


def bootstrap(python: str = "python3") -> tuple[str, ...]:
    """Return the command that starts the program: always the same, with nothing of the user's.

    Isolated, so that neither variables nor files of the host change what the program imports.
    """
    return (python, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP)


def order(**fields: Any) -> bytes:
    """Return an order as JSON, with its length on a line before it."""
    text = json.dumps(fields).encode()
    return b"%d\n%s" % (len(text), text)


def last_error_line(printed: str) -> str:
    """Return the last line of standard error; of a traceback, also where it was raised."""
    lines = printed.splitlines()
    if not lines:
        return ""
    last, frames = one_line(lines[-1][:LONGEST_COMPLAINT]), FRAME.findall(printed)
    return f"{last} ({frames[-1][0]}, line {frames[-1][1]})" if frames else last
