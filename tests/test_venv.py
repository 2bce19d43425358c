"""The environment that the doors make on first use."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of what a door needs, with no environment made yet."""
    folder = tmp_path / "a clone"
    (folder / "launcher").mkdir(parents=True)
    shutil.copy(ROOT / "launcher" / "venv.sh", folder / "launcher")
    shutil.copy(ROOT / "run-local", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def interpreter(path: Path, body: str) -> Path:
    """An executable that answers to `python3` with the shell script `body`."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def door(clone: Path, python: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [clone / "run-local", "--help"],
        env=os.environ | {"PYTHON": str(python)},
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


def test_a_failed_installation_is_tried_again_next_time(clone: Path) -> None:
    """Only a whole installation is remembered: after a failure the next use starts it anew."""
    (clone / "pyproject.toml").write_text("this is not TOML\n")
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
    sums = subprocess.run(["cksum"], input=text, capture_output=True, check=True)
    (clone / ".venv" / "installed").write_bytes(f"{clone} ".encode() + sums.stdout.strip())
    result = door(clone, interpreter(tmp_path / "python3", script))
    assert result.returncode == 78
    assert "anew" in result.stderr
