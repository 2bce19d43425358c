"""Ranks of a user's own command run in the environment of the project's uv.lock."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.hosts import ROOT, Lab

UV = Path(sys.executable).with_name("uv")
OFFLINE = {**os.environ, "UV_OFFLINE": "1", "PATH": f"{UV.parent}:{os.environ['PATH']}"}
PROJECT = '[project]\nname = "own"\nversion = "1"\nrequires-python = ">=3.11"\n'
TORCHRUN = str(ROOT / "tests" / "lab" / "fake_torchrun.py")
SCRIPT = "import sys, torch\nprint('ran in', sys.prefix)\n"


def project(folder: Path) -> Path:
    """Make a project that depends on nothing, with its lock."""
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    (folder / "train.py").write_text(SCRIPT)
    (folder / "own.py").write_text("def train():\n    return 1\n")
    subprocess.run([UV, "lock", "--quiet"], cwd=folder, env=OFFLINE, check=True)
    return folder


def add_torch(environment: Path) -> None:
    """Put a torch into an environment, as if its lock named it, with a stand-in for torchrun."""
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "torch" / "distributed").mkdir(parents=True)
    (packages / "torch" / "__init__.py").touch()
    (packages / "torch" / "version.py").write_text("__version__, cuda = '2.12', None\n")
    run = f"import runpy\ndef main():\n    runpy.run_path({TORCHRUN!r}, run_name='__main__')\n"
    (packages / "torch" / "distributed" / "run.py").write_text(run)


def local(folder: Path, *args: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    return warm.run(
        *("-m", "rackrun", "./run-local", *args),
        start=warm.Launcher,
        cwd=folder,
        env={**OFFLINE, **variables},
    )


def test_a_command_here_runs_in_the_environment_of_the_lock(tmp_path):
    """uv makes it at the first launch; --dry-run does not. Without a torch: what to type."""
    folder = project(tmp_path / "own project")
    python = folder / ".venv" / "bin" / "python"
    command = ("--", "python", "train.py")
    planned = local(folder, "--dry-run", *command)
    assert f"each rank: '{python}' train.py" in planned.stdout and not python.exists()
    refused = local(folder, *command)
    first, last = refused.stderr.splitlines()
    assert first == (
        f"rackrun: ranks use {python}, the environment of uv.lock;"
        " for another environment type --python"
    )
    assert refused.returncode == 78 and f"{python} has no torch; " in last
    assert "uv add" in last
    add_torch(folder / ".venv")
    ended = local(folder, *command)
    assert (ended.returncode, ended.stdout) == (0, f"ran in {folder / '.venv'}\n"), ended.stderr
    named = local(folder, "--python", str(warm.interpreter()), *command)
    assert named.returncode == 0 and str(folder / ".venv") not in named.stdout + named.stderr
    (folder / "uv.lock").write_text("no lock")
    broken = local(folder, *command)
    assert broken.returncode == 78 and "uv sync --frozen failed" in broken.stderr


def test_a_function_needs_rackrun_in_that_environment(tmp_path):
    """Ranks could not even call it: `uv add rackrun`, and it returns what it returns."""
    folder = project(tmp_path / "own")
    subprocess.run([UV, "sync", "--quiet", "--frozen"], cwd=folder, env=OFFLINE, check=True)
    add_torch(folder / ".venv")
    code = "from rackrun.launcher import launch\nprint(launch('own:train').returned)"
    refused = warm.run("-c", code, start=warm.Launcher, cwd=folder, env=OFFLINE)
    assert "has no rackrun; install it (in a project with a uv.lock: uv add)" in refused.stderr
    (packages,) = folder.glob(".venv/lib/python3*/site-packages")
    (packages / "rackrun.pth").write_text(str(ROOT))
    ended = warm.run("-c", code, start=warm.Launcher, cwd=folder, env=OFFLINE)
    assert ended.stdout == "{0: 1}\n", ended.stderr


@pytest.fixture
def host(start_lab: Callable[[int], Lab]) -> Lab:
    """Return a lab of one host that has uv and no index."""
    lab = start_lab(1)
    path = f"{UV.parent}:{os.environ['PATH']}"
    (lab.hosts[0].folder / ".bashrc").write_text(f"export UV_OFFLINE=1 PATH='{path}'\n")
    return lab


def test_sync_makes_it_on_hosts_and_later_launches_use_it(host):
    """Without --sync nothing is installed; a task has rackrun's environment."""
    folder = project(host.folder / "own")
    (folder / ".gitignore").write_text("runs/\n")
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    subprocess.run(["git", "add", "."], cwd=folder, check=True)
    there = host.folder / "there"
    hosts = str(host.write_hosts(f"workdir={there}"))
    command = (hosts, "--", "python", "train.py")
    code, _, err = host.result_of("--sync", *command, cwd=folder)
    assert code == 78 and f"{there}/.venv/bin/python has no torch" in err, err
    assert "in a project with a uv.lock type: uv add torch" in err
    add_torch(there / ".venv")
    for options in (["--sync"], []):
        code, out, err = host.result_of(*options, *command, cwd=folder)
        assert (code, out) == (0, f"ran in {there / '.venv'}\n"), err
        assert f"ranks use {there}/.venv/bin/python" in err
    shutil.rmtree(there / ".venv")
    code, _, err = host.result_of("--dry-run", *command, cwd=folder)
    assert f"{there}/.venv" not in err and not (there / ".venv").exists()
    (there / "uv.lock").write_text("no lock")
    (folder / "uv.lock").write_text("no lock")
    code, _, err = host.result_of("--sync", *command, cwd=folder)
    assert code == 78 and f"uv sync --frozen failed in {there}" in err
    assert "--sync-wheels" not in err
