"""Scripts that never report: --silent-minutes ends a run whose ranks print nothing any more."""

import json
import re

from tests.lab.run import run

WAITING = """\
import os, time
def wait_for_a_message():
    time.sleep(999)
print("step 1", flush=True)
wait_for_a_message()
"""
PRINTING = """\
import time
for step in range(40):
    print("step", step, flush=True)
    time.sleep(0.1)
"""


def launched(tmp_path, script, *options):
    (tmp_path / "train.py").write_text(script)
    return run(["./run-local", "--nproc", "2", *options, "--", "python", "train.py"], tmp_path)


def test_ranks_that_print_nothing_any_more_hang(tmp_path):
    """75, with how long they were silent, how busy the machine was, and the stack of each."""
    result = launched(tmp_path, WAITING, "--silent-minutes", "0.15")
    assert result.code == 75, result.said
    assert re.search(r"no output for 0\.\d+ min, CPUs \d+ % busy", result.said)
    assert "in wait_for_a_message" in result.said
    (folder,) = (path for path in (tmp_path / "runs").iterdir() if not path.is_symlink())
    assert json.loads((folder / "result.json").read_text())["exit_code"] == 75
    for log in folder.glob("logs/**/rank-*.err"):
        assert "in wait_for_a_message" in log.read_text()


def test_ranks_that_print_go_on(tmp_path):
    """Silence counts from the last line of any rank."""
    result = launched(tmp_path, PRINTING, "--silent-minutes", "0.03")
    assert result.code == 0, result.said


def test_without_the_option_a_line_names_it(tmp_path):
    """A run without hang detection says what to type."""
    result = launched(tmp_path, PRINTING, "--hang-seconds", "1")
    assert result.code == 0, result.said
    assert "no hang detection: no report in 1 s" in result.said
    assert "--silent-minutes 30" in result.said
