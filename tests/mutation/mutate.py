"""Mutation testing: the code is changed in thousands of small ways, and each must fail a test.

    python -m tests.mutation.mutate                        # all modules of the table
    python -m tests.mutation.mutate training/schedule.py   # one of them, with diffs

mutmut makes the changes and runs the tests that reach the changed function, in forks of a process
that has imported torch: about 1.5 mutants a second. It works in a copy of the tracked files.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Target(NamedTuple):
    """Test files of a module, and how many mutants survive them."""

    tests: tuple[str, ...]
    survivors: int


TARGETS = {
    "training/schedule.py": Target(("training/test_schedule.py",), 7),
    "training/phases/loss.py": Target(
        ("training/test_loss.py", "training/test_class_weights.py"), 1
    ),
    "training/optim/loss_scale.py": Target(("training/test_loss_scale.py",), 5),
    "convert/packing/copies.py": Target(("convert/test_copies.py",), 21),
    "convert/readers/names.py": Target(("convert/test_names.py",), 8),
}
"""A line here adds a module, or a pattern, that is walked by `./run-tests --long`."""

SURVIVED = ("survived", "no tests")


def survivors(pattern: str, folder: Path) -> dict[str, str]:
    """Return the mutants of these modules that no test has failed, by name, as unified diffs.

    `folder` must be empty; it is filled with a copy of the tracked files.
    """
    tracked = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", folder], input=tracked.stdout, check=True)
    tests = [f"tests/{name}" for name in TARGETS[pattern].tests]
    with (folder / "pyproject.toml").open("a") as file:
        file.write(
            "\n[tool.mutmut]\n"
            f'source_paths = ["."]\nonly_mutate = ["{pattern}"]\n'
            f"pytest_add_cli_args_test_selection = {tests}\n"
            'pytest_add_cli_args = ["-p", "no:cacheprovider", "-m", "not long"]\n'
            "use_git_change_detection = false\ntrack_dependencies = false\n"
        )
    _mutmut(folder, "run")
    outcomes = re.findall(r"^ *(\S+__mutmut_\d+): (.+)$", _mutmut(folder, "results"), re.MULTILINE)
    sys.stderr.write(f"{pattern}: {dict(Counter(outcome for _, outcome in outcomes))}\n")
    return {
        name: _mutmut(folder, "show", name) for name, outcome in outcomes if outcome in SURVIVED
    }


def _mutmut(folder: Path, *words: str) -> str:
    """Return what mutmut prints; RuntimeError with the end of it if it fails."""
    mutmut = Path(sys.executable).with_name("mutmut")
    done = subprocess.run([mutmut, *words], cwd=folder, capture_output=True, text=True)
    if done.returncode:
        output = re.sub("[\u2800-\u28ff] .*\\s", "", done.stdout + done.stderr)  # its spinner
        raise RuntimeError(f"mutmut {words[0]}, exit code {done.returncode}: {output[-3000:]}")
    return done.stdout


def main() -> None:
    """Walk the modules named on the command line, or all of the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", choices=[[], *TARGETS], metavar="MODULE")
    for pattern in parser.parse_args().patterns or TARGETS:
        with tempfile.TemporaryDirectory() as folder:
            for name, diff in survivors(pattern, Path(folder)).items():
                sys.stdout.write(f"{name}\n{diff}\n")


if __name__ == "__main__":
    main()
