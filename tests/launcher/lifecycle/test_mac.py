"""A launcher without what only Linux has, as on macOS, as far as Linux can show it."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import mypy

from tests.lab.hosts import ROOT
from tests.lab.warm_server import LEFT_OUT

STUBS = Path(mypy.__file__).parent / "typeshed" / "stdlib"
MODULES = {
    "fcntl": "fcntl.pyi",
    "os": "os/__init__.pyi",
    "resource": "resource.pyi",
    "select": "select.pyi",
    "signal": "signal.pyi",
    "socket": "socket.pyi",
    "time": "time.pyi",
}
WITHOUT_PROC = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc; exec "$@"', "sh")
LAUNCH = """
import importlib, json, pathlib, pkgutil, sys
for module, names in json.loads(sys.argv[1]).items():
    for name in names:
        vars(importlib.import_module(module)).pop(name, None)
assert not list(pathlib.Path("/proc").iterdir())
import rackrun.launcher
for module in pkgutil.walk_packages(rackrun.launcher.__path__, "rackrun.launcher."):
    if not set(module.name.split(".")) & set(json.loads(sys.argv[2])):
        importlib.import_module(module.name)
from rackrun.__main__ import command
command(["./run-ssh", *sys.argv[3:]])
"""


def names_on(platform: str, stub: Path) -> Iterator[str]:
    """Yield what a module has on a platform, as type checkers know it."""
    expected = {"sys": SimpleNamespace(platform=platform, version_info=sys.version_info)}

    def below(statements: list[ast.stmt]) -> Iterator[str]:
        for node in statements:
            if isinstance(node, ast.If):
                holds = eval(compile(ast.Expression(node.test), str(stub), "eval"), expected)
                yield from below(node.body if holds else node.orelse)
            elif isinstance(node, ast.ImportFrom):
                yield from (alias.asname or alias.name for alias in node.names)
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                yield node.target.id

    return below(ast.parse(stub.read_text()).body)


def only_on_linux() -> dict[str, list[str]]:
    return {
        module: sorted({*names_on("linux", STUBS / stub)} - {*names_on("darwin", STUBS / stub)})
        for module, stub in MODULES.items()
    }


def test_it_launches_without_what_only_linux_has(start_lab):
    """No name that typeshed has for Linux alone, and nothing in /proc: all modules that launch are
    imported, a run on a host ends well, and the host is verified."""
    missing = only_on_linux()
    assert "pidfd_open" in missing["os"] and "epoll" in missing["select"]
    lab = start_lab(1)
    hosts = lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}")
    args = ("--ssh-config", os.fspath(lab.config), os.fspath(hosts), "--", "echo", "ran")
    program = ("-c", LAUNCH, json.dumps(missing), json.dumps(LEFT_OUT))
    done = subprocess.run(
        [*WITHOUT_PROC, sys.executable, *program, *args],
        cwd=lab.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(lab.home)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr
    (result,) = lab.folder.glob("runs/2*/result.json")
    assert set(json.loads(result.read_text())["hosts"].values()) == {"clean"}
