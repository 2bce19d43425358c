"""What `./run-tests` says of tests that are left out, and of those that fail beside others."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.lab.hosts import ROOT

PLUGINS = ("flakes", "summary", "names", "lab/needs")
FLAKY = """\
import pytest

pytestmark = pytest.mark.xdist_group("convert/test_all.py")
ran: list[int] = []


def test_that_leaves_something_behind() -> None:
    ran.append(1)
"""
"""A test after which others of its process fail; alone they pass."""

SETTINGS = """\
[tool.mypy]
files = ["tests/test_all.py"]
[tool.pytest.ini_options]
markers = ["long"]
[tool.ruff]
line-length = 100
lint.select = ["F"]
[tool.importlinter]
root_package = "tests"
[[tool.importlinter.contracts]]
name = "tests"
type = "independence"
modules = ["tests.lab"]
"""

VENV = """\
# shellcheck shell=bash
venv_python() {{
    export python={}
}}
"""


def project(folder: Path, *tests: str) -> Path:
    """Write what `./run-tests` checks, with these tests in one file and no environment to make."""
    for name in ("launcher", "bench", "tests", "examples", ".ci"):
        (folder / name).mkdir(parents=True)
    for name in ("run-tests", *(f"tests/{name}.py" for name in PLUGINS)):
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "launcher" / "venv.sh").write_text(VENV.format(sys.executable))
    for name in ("tests/machine.sh", "bench/a.sh", ".ci/run", "examples/a.sh", "examples/a.sbatch"):
        (folder / name).write_text("# shellcheck shell=bash\n")
    (folder / "pyproject.toml").write_text(SETTINGS)
    (folder / "tests" / "test_all.py").write_text("\n\n".join([FLAKY, *tests]))
    return folder


def flaky(name: str) -> str:
    return f"def test_{name}() -> None:\n    assert not ran\n"


def after(program: list[str], folder: Path) -> tuple[int, str]:
    """Run a program in the folder, as if by hand; return its exit code and all that it printed."""
    ours = ("RUN_TESTS_COMPLETE", "RUN_TESTS_LEFT_OUT", "CI")
    done = subprocess.run(
        program,
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def pytest_of(folder: Path) -> tuple[int, str]:
    """Run the tests of a project as `./run-tests` does, on one worker, so that all meet."""
    options = ("-p", "tests.flakes", "-n", "1", "--dist", "loadgroup")
    return after([sys.executable, "-m", "pytest", *options], folder)


def test_what_fails_alone_as_well_is_a_failure(tmp_path):
    """A test that fails again without the others fails the run, flakes beside it or not."""
    real = "def test_real() -> None:\n    assert 1 + 1 == 3\n"
    code, output = pytest_of(project(tmp_path, flaky("one"), real))
    assert code == 1, output
    assert "FAILED tests/test_all.py::test_real" in output
    assert "passed alone" not in output


def test_what_fails_every_other_time_is_a_failure(tmp_path):
    """To pass alone once is not enough."""
    count = (
        "with open('count', 'a+') as file:\n        file.write('.')\n        times = file.tell()"
    )
    rare = f"def test_rare() -> None:\n    {count}\n    assert times == 2\n"
    code, output = pytest_of(project(tmp_path, rare))
    assert code == 1, output
    assert (tmp_path / "count").read_text() == "..."


def test_more_than_ten_flakes_are_a_failure(tmp_path):
    """Eleven flakes are named, and the run fails; ten would not."""
    code, output = pytest_of(project(tmp_path / "many", *map(flaky, "abcdefghijk")))
    assert code == 1, output
    assert output.endswith("12 passed, 0 failed, 11 flaky (at most 10)\n")
    code, output = pytest_of(project(tmp_path / "some", *map(flaky, "abcdefghij")))
    assert code == 0, output
    assert output.endswith("11 passed, 0 failed, 10 flaky (at most 10)\n")


NEEDY = """\
def test_that_has_all_it_needs() -> None:
    needs.need("sh")


def test_of_root() -> None:
    needs.need("root")


def test_of_a_cluster() -> None:
    needs.need("slurm")


def test_of_another_cluster() -> None:
    needs.need("slurm")


def test_of_a_gpu() -> None:
    needs.need_gpus(64)
"""
ORDINARY = ("unshare", "--user")  # whoever runs it is an ordinary user there


def test_the_last_lines_say_what_was_left_out_and_how_to_have_it(tmp_path):
    folder = project(tmp_path)
    (folder / "tests" / "test_all.py").write_text(f"from tests.lab import needs\n\n\n{NEEDY}")
    code, output = after([*ORDINARY, "./run-tests"], folder)
    assert code == 0, output
    mypy, names, gpus, left_out = output.splitlines()[-4:]
    assert mypy == "mypy: Success: no issues found in 1 source file"
    assert names.startswith("names of rackrun: contract 0, field 0, lab 0, together 0 ")
    assert gpus.startswith("run-tests: unrun: 1 test of a GPU (")
    needed = "run-tests: left out: tests that need slurm (2), root (1); type: sudo ./run-tests"
    assert left_out == needed


def test_a_fast_run_has_unit_tests_and_refusals_alone(tmp_path):
    folder = project(tmp_path)
    for name in ("unit/test_one.py", "contract/refusals/test_two.py"):
        (folder / "tests" / name).parent.mkdir(parents=True)
        (folder / "tests" / name).write_text("def test_it() -> None:\n    pass\n")
    code, output = after([*ORDINARY, "./run-tests", "--fast"], folder)
    assert code == 0, output
    assert "2 passed" in output
    assert output.splitlines()[-1].startswith("names of rackrun: ")
