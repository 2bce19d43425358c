"""Every package is imported below `rackrun`: a user's own `training/` or `convert.py` is theirs."""

import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.contract.tasks import PACKAGES, PLATFORM, TASKS
from tests.lab import warm
from tests.lab.data import drawn
from tests.lab.hosts import ROOT

NAMES = (*PLATFORM, *sorted(TASKS.keys() - PACKAGES.keys()))
OWN = ("convert", "launcher", "nginx", "shards", "training")
USE = f"""\
import {", ".join(OWN)}
def owners():
    return [{", ".join(f"{name}.OWNER" for name in OWN)}]
if __name__ == "__main__":
    print(owners())
"""
CALL = "from rackrun import launch; print(launch('use:owners', nproc=1).returned[0])"
TRAIN = (
    *("--epochs", "1", "--image-size", "32", "--width", "4", "--batch-size", "8"),
    *("--device", "cpu", "--workers", "0", "--no-tensorboard"),
)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project under git whose own modules are called as packages of rackrun are."""
    for name in OWN:
        module = tmp_path / name / "__init__.py" if name in ("nginx", "training") else None
        module = module or tmp_path / f"{name}.py"
        module.parent.mkdir(exist_ok=True)
        module.write_text("OWNER = 'user'\n")
    (tmp_path / "use.py").write_text(USE)
    for name in ("cat", "dog"):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        for number in range(10):
            (tmp_path / "pictures" / name / f"{number}.jpg").write_bytes(drawn(f"{name}{number}"))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    return tmp_path


def typed(project: Path, *words: str) -> str:
    """Return what a command prints in the folder of the project; it must exit with 0."""
    done = subprocess.run(words, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_a_package_refuses_its_bare_name(name):
    """In a clone Python finds the folder; its classes would not be those of rackrun."""
    done = subprocess.run([sys.executable, "-c", f"import {name}"], cwd=ROOT, capture_output=True)
    assert done.returncode == 1
    assert f"ImportError: import rackrun.{name}, not {name}" in done.stderr.decode()


def test_a_project_keeps_its_modules_of_these_names(project, start_lab):
    """Conversions, tasks and functions run from its folder, and --sync brings it to a host."""
    run_local, python = str(ROOT / "run-local"), str(warm.interpreter())
    typed(project, run_local, "convert", "folder", "pictures", "out", "--test-percent", "20")
    typed(project, run_local, "--python", python, "catdog", "--data", "out", *TRAIN)
    assert typed(project, sys.executable, "-c", CALL).splitlines()[-1] == str(["user"] * len(OWN))
    lab = start_lab(1)
    hosts = lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder / 'there'}")
    code, out, err = lab.result_of("--sync", hosts, "--", "python", "use.py", cwd=project)
    assert (code, str(["user"] * len(OWN)) in out) == (0, True), err
