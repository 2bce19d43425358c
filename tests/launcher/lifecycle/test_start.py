"""How a run starts: with little work on the hosts, and on any Python."""

import ast
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from rackrun.launcher.transport import bootstrap
from tests.lab import warm
from tests.lab.hosts import BUSY, ROOT

SLEEPER = """\
#!/bin/sh
case "$1 $2" in -c*torch.distributed.run*) exec sleep 98762;; esac
exec {python} "$@"
"""


def test_a_host_sees_one_login_and_starts_one_program(start_lab):
    """The agent takes over the process of the probe; results alone are fetched by another one."""
    lab = start_lab(2)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 0, err
    for host, programs in zip(lab.hosts, (2, 1), strict=True):
        assert host.log.count("Accepted publickey") == 1
        assert host.log.count("Starting session: command") == programs, host.log


def test_a_host_file_is_all_that_has_to_be_typed(start_lab):
    """Without any option, and with the user's own ~/.ssh/config."""
    lab = start_lab(1)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    process = lab.typed(str(hosts), "--", "echo", "here")
    out, err = process.communicate()
    assert (process.returncode, out) == (0, "here\n"), err


REMOTE = sorted(
    path
    for room in ("rackrun/launcher/remote", "rackrun/contract")
    for path in (ROOT / room).rglob("*.py")
)


def test_what_runs_on_hosts_is_python_3_8():
    """Hosts may have an older Python than the project: the syntax of these files is that of 3.8."""
    for path in REMOTE:
        ast.parse(path.read_text(), path, feature_version=(3, 8))
    if not pythons(8, 9):
        pytest.skip("unrun on Python 3.8, which is not here; files for hosts have its syntax")


def pythons(first: int, end: int) -> list[str]:
    """Return the Pythons 3.first to 3.end that pyenv has or that are on PATH, one of each."""
    found = []
    for minor in range(first, end):
        installed = sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))
        on_path = shutil.which(f"python3.{minor}")
        if on_path and subprocess.run([on_path, "-c", ""], capture_output=True).returncode:
            on_path = None  # a shim of pyenv for a version that is not chosen
        found += [str(installed[-1])] if installed else [on_path] if on_path else []
    return found


@pytest.mark.parametrize("python", [sys.executable, *pythons(8, 20)])
def test_the_program_runs_on_the_pythons_here(python):
    """From 3.8 on: all modules are imported, and the program is started as on a host."""
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in REMOTE]
    code = f"import sys; sys.path.insert(0, sys.argv[1]); import {', '.join(modules)}"
    with tempfile.NamedTemporaryFile() as archive:
        archive.write(bootstrap.opening().partition(b"\n")[2])
        archive.flush()
        subprocess.run([python, "-ISc", code, archive.name], check=True)
    ended = subprocess.run(
        bootstrap.bootstrap(python), input=bootstrap.opening(), capture_output=True
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.mark.parametrize("python", pythons(4, 8))
def test_an_older_python_says_what_to_type(python):
    """As the system's Python of RHEL 8, which is 3.6."""
    ended = subprocess.run(bootstrap.bootstrap(python), input="", capture_output=True, text=True)
    says = "is older than 3.8; name another one with python= in hosts.txt\n"
    assert (ended.returncode, ended.stderr.endswith(says)) == (1, True), ended.stderr


def test_a_host_whose_torchrun_never_joins_is_named(start_lab):
    """A real torchrun waits for the other host's, which sleeps: 75 in time, and not the waiter."""
    lab = start_lab(2)
    sleeper = lab.folder / "sleeper"
    sleeper.write_text(SLEEPER.format(python=warm.interpreter()))
    sleeper.chmod(0o755)
    hosts = lab.write_hosts(f"python={sys.executable}", f"python={sleeper}")
    code, _, err = lab.result_of("--rendezvous-seconds", "20", str(hosts), "--", "true")
    assert code == 75, err
    last = err.splitlines()[-1]
    assert f"{lab.hosts[1].address}: torchrun has not joined the others for " in last
    assert lab.hosts[0].address not in last
    (folder,) = Path(lab.folder / "runs").glob("2*")
    report = json.loads((folder / "result.json").read_text())
    assert set(report["hosts"].values()) == {"clean"}
    assert report["seconds"] < BUSY * (20.0 + 10.0)
