"""The environment that the doors make on first use."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.wheels import only_here

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what a door needs, with no environment made yet."""
    folder = tmp_path / "a clone"
    (folder / "launcher").mkdir(parents=True)
    shutil.copy(ROOT / "launcher" / "venv.sh", folder / "launcher")
    shutil.copy(ROOT / "run-local", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with pip alone, as `python3 -m venv` makes one in 5 s."""
    folder = tmp_path_factory.mktemp("environment") / ".venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def small(clone: Path, digest: str = "") -> None:
    """Make the project of a clone one that needs next to nothing, with a lock of its own.

    Its one package is installed from a file of the real lock, or has another hash.
    """
    lock = (ROOT / "requirements" / "base.txt").read_text()
    kept = re.findall(r"^(?:setuptools|braceexpand)==.*(?:\n    --hash.*)+", lock, re.MULTILINE)
    text = "\n".join(kept)
    (clone / "requirements" / "base.txt").write_text(HASH.sub(digest or r"\g<0>", text) + "\n")
    (clone / "launcher" / "__init__.py").touch()
    (clone / "rackrun").mkdir(exist_ok=True)
    (clone / "rackrun" / "__main__.py").write_text(
        "import site; site.main(); import braceexpand; print('runs')\n"
    )
    (clone / "pyproject.toml").write_text(SMALL)


HASH = re.compile(r"(?<=sha256:)[0-9a-f]{64}")
SMALL = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "small"
version = "1"
dependencies = ["a-package-that-is-nowhere"]

[tool.setuptools.packages.find]
include = ["launcher*"]
"""


def interpreter(path: Path, body: str) -> Path:
    """An executable that answers to `python3` with the shell script `body`."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


WITH_UV = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def door(
    clone: Path, python: Path, environment: Mapping[str, str] = WITH_UV
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "run-local", "--help"],
        cwd=clone,
        env={**environment, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_python_the_package_to_install_is_named(clone: Path, tmp_path: Path) -> None:
    """A machine without Python gets one line with what to type, and exit code 78."""
    result = door(clone, tmp_path / "absent")
    assert result.returncode == 78
    assert "sudo apt-get install python3 python3-venv" in result.stderr
    assert not (clone / ".venv").exists() or not any((clone / ".venv").iterdir())


def test_without_the_venv_package_the_line_to_type_is_shown(clone: Path, tmp_path: Path) -> None:
    """Debian's python3 without python3-venv is met with the command that installs it."""
    script = f'case "$*" in *ensurepip*) exit 1;; esac\nexec "{sys.executable}" "$@"'
    result = door(clone, interpreter(tmp_path / "python3", script))
    assert result.returncode == 78
    assert result.stderr.splitlines()[-1].endswith("type: sudo apt-get install python3-venv")


def test_an_old_python_is_refused(clone: Path, tmp_path: Path) -> None:
    """An interpreter that the project does not support is refused before anything is made."""
    script = 'case "$*" in *version_info*) exit 1;; esac'
    result = door(clone, interpreter(tmp_path / "python3", script))
    assert result.returncode == 78
    assert "older than 3.11" in result.stderr


@pytest.mark.long  # test_uv_installs... installs as well
def test_a_failed_installation_is_tried_again_next_time(clone: Path, bare: Path) -> None:
    """Only a whole installation is remembered: after a failure the next use starts it anew."""
    shutil.copytree(bare, clone / ".venv", symlinks=True)
    (clone / "requirements" / "base.txt").write_text("this is no lock\n")
    for _ in range(2):
        result = door(clone, Path(sys.executable))
        assert result.returncode == 78
        assert "first use" in result.stderr
        assert "the installation failed" in result.stderr
    assert not (clone / ".venv" / "installed").exists()


def test_an_environment_whose_interpreter_is_gone_is_made_anew(clone: Path, tmp_path: Path) -> None:
    """After an upgrade of Python the stamp is still right, but .venv/bin/python leads nowhere."""
    script = f'case "$*" in *"-m venv"*) echo anew >&2; exit 1;; esac\nexec {sys.executable} "$@"'
    (clone / ".venv" / "bin").mkdir(parents=True)
    (clone / ".venv" / "bin" / "python").symlink_to(tmp_path / "gone")
    text = (clone / "pyproject.toml").read_bytes()
    text += (clone / "requirements" / "base.txt").read_bytes()
    sums = subprocess.run(["cksum"], input=text, capture_output=True, check=True)
    (clone / ".venv" / "installed").write_bytes(f"{clone} ".encode() + sums.stdout.strip())
    result = door(clone, interpreter(tmp_path / "python3", script))
    assert result.returncode == 78
    assert "anew" in result.stderr


def test_only_what_the_lock_names_is_installed(clone: Path) -> None:
    """Whatever an index serves: other bytes under the same version are refused, and so is a package
    without a hash; else the files of the lock are installed, the project is built with them, and no
    dependency is looked for. A change of the lock is followed at the next use."""
    small(clone, digest="0" * 64)
    other = door(clone, Path(sys.executable))
    assert (other.returncode, other.stdout) == (78, "")
    assert "hash" in other.stderr.lower()
    assert not list((clone / ".venv").glob("lib/*/site-packages/braceexpand*"))
    small(clone)
    whole = door(clone, Path(sys.executable))
    assert (whole.returncode, whole.stdout) == (0, "runs\n"), whole.stderr
    assert "installing" in whole.stderr
    assert door(clone, Path(sys.executable)).stderr == ""
    with (clone / "requirements" / "base.txt").open("a") as lock:
        lock.write("decorator==5.3.1\n")
    added = door(clone, Path(sys.executable))
    assert (added.returncode, added.stdout) == (78, "")
    assert "installing" in added.stderr
    assert "hash" in added.stderr.lower() and "decorator" in added.stderr


@pytest.mark.parametrize("settings, installer", [(os.devnull, "uv"), ("pip.conf", "pip")])
def test_uv_installs_where_it_is_there_and_pip_has_no_settings(
    clone: Path, bare: Path, tmp_path: Path, settings: str, installer: str
) -> None:
    """A site that told pip of its own index gets no package from elsewhere."""
    shutil.copytree(bare, clone / ".venv", symlinks=True)
    lock = only_here(clone / "wheels")
    (clone / "requirements" / "base.txt").write_text(lock)
    (clone / "pyproject.toml").unlink()  # as --sync brings it, with wheels
    (clone / "rackrun").mkdir()
    (clone / "rackrun" / "__main__.py").write_text("print('runs')\n")
    (tmp_path / "pip.conf").write_text("[global]\nindex-url = http://127.0.0.1:9/\n")
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / settings),
    }
    done = door(clone, Path(sys.executable), environment)
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    (by,) = clone.glob(".venv/lib/*/site-packages/only_here-1.dist-info/INSTALLER")
    assert by.read_text().strip() == installer


@pytest.mark.long  # 22 MB from the index
def test_where_there_is_no_uv_the_one_of_the_lock_is_brought_first(
    clone: Path, tmp_path: Path
) -> None:
    """A first use takes a third of pip's time on any machine."""
    small(clone)
    (tmp_path / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    own = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    rest = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    done = door(clone, tmp_path / "python3", {**rest, **own})
    assert (done.returncode, done.stdout) == (0, "runs\n"), done.stderr
    (by,) = clone.glob(".venv/lib/*/site-packages/braceexpand-*.dist-info/INSTALLER")
    assert by.read_text().strip() == "uv"
