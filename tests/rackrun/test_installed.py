"""The wheel, installed into an environment of its own: rackrun works from any folder."""

import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from rackrun import __version__

ROOT = Path(__file__).parents[2]
LIGHT = """
import sys

class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)

sys.meta_path.insert(0, WithoutTorch())
"""


def run(*args: str | Path, **more: object) -> "subprocess.CompletedProcess[str]":
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"env": bare, "capture_output": True, "text": True, "timeout": 300, **more}
    return subprocess.run(args, check=False, **options)


def environment(folder: Path) -> Path:
    """Make an environment that has our packages' dependencies, and not the project."""
    done = run(sys.executable, "-m", "venv", "--without-pip", folder)
    assert done.returncode == 0, done.stderr
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


@dataclass
class Installed:
    """The installed command, and an empty folder to type it in."""

    command: Path
    folder: Path

    def __call__(self, *args: str | Path, **more: object) -> "subprocess.CompletedProcess[str]":
        return run(self.command, *args, cwd=self.folder, **more)


@pytest.fixture(scope="module")
def rackrun(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel from the files of the repository, and install it."""
    folder = tmp_path_factory.mktemp("installed")
    ignored = shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__")
    made = {"data", "runs"}  # at the top; packages have folders of these names

    def left_out(path: str, names: list[str]) -> set[str]:
        return ignored(path, names) | (made if Path(path) == ROOT else set())

    shutil.copytree(ROOT, folder / "source", ignore=left_out, symlinks=True)
    offline = ("--no-build-isolation", "--offline", "--python", sys.executable)
    uv = Path(sys.executable).with_name("uv")
    built = run(uv, "build", "--wheel", *offline, "-o", folder, folder / "source")
    assert built.returncode == 0, built.stderr
    python = environment(folder / "env")
    (wheel,) = folder.glob("*.whl")
    done = run(uv, "pip", "install", "--python", python, "--no-deps", "--offline", wheel)
    assert done.returncode == 0, done.stderr
    (folder / "empty").mkdir()
    return Installed(python.with_name("rackrun"), folder / "empty")


def test_it_runs_where_it_is_typed(rackrun):
    """The run folder is made in the current folder; messages name the command that was typed."""
    assert rackrun("--version").stdout == f"rackrun {__version__}\n"
    ended = rackrun("local", "--", "echo", "ran")
    assert ended.returncode == 0, ended.stderr
    (log,) = rackrun.folder.glob("runs/*-echo/logs/*/*/rank-0.out")
    assert log.read_text() == "ran\n"
    assert "type: rackrun stop --help" in rackrun("stop", "--bogus", "1").stderr


def test_without_torch_it_names_the_extra(rackrun, tmp_path):
    """A light installation says in one line what training here needs."""
    (tmp_path / "sitecustomize.py").write_text(LIGHT)
    refused = rackrun("local", "--", "true", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    assert refused.returncode == 78
    (wheel,) = rackrun.folder.parent.glob("*.whl")
    python = rackrun.command.with_name("python")
    typed = f"{python} -m pip install 'rackrun[train] @ {wheel.as_uri()}'"
    assert refused.stderr == f"error: torch is not installed; type: {typed}\n"


def test_it_trains(rackrun):
    """A task of the wheel, on images that need no data: a model, and the report of the run."""
    task = ("catdog", "--recipe", "demo", "--synthetic", "--device", "cpu", "--epochs", "1")
    small = ("--image-size", "32", "--width", "4", "--batch-size", "8", "--steps-per-epoch", "2")
    ended = rackrun("local", "--name", "small", *task, *small)
    assert ended.returncode == 0, ended.stderr
    (run,) = rackrun.folder.glob("runs/*-small")
    assert {"final.pt", "report.html"} <= {path.name for path in run.iterdir()}


def test_sync_brings_the_installed_code(rackrun, lab):
    """A host that has none gets the same packages, and an environment that finds them.

    Its own Python has a torch, so that nothing is downloaded.
    """
    remote = lab.folder / "there"
    hosts = lab.ready(1).write_hosts(f"workdir={remote}")
    (lab.hosts[0].folder / ".bashrc").write_text(f"export PYTHON={sys.executable}\n")
    args = ("ssh", "--ssh-config", lab.config, "--sync", hosts, "--", "python", "-c")
    ended = rackrun(*args, "import rackrun.training as training; print(training.__file__)")
    assert ended.returncode == 0, ended.stderr
    assert f"{remote}/.rackrun/rackrun/training/__init__.py" in ended.stdout
    assert (remote / ".rackrun" / ".gitignore").read_text() == "*\n"
    checked = rackrun("check", "--ssh-config", lab.config, hosts, "--", "true")
    assert checked.returncode == 0, checked.stdout
