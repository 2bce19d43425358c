"""Ranks that stand still: which is named, with its step and its stack, and what ends the run."""

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

LAGS = """\
import os, time
from rackrun import report
last = 3 if os.environ["RANK"] == "1" else 5
for step in range(1, last + 1):
    report(step=step)
    time.sleep(0.25)  # so that each step is sent
time.sleep(999)
"""
RING = """\
import ctypes, os, time
import torch, torch.distributed as dist
from rackrun import report
dist.init_process_group("gloo")
one = torch.ones(1)
for step in range(1, 1_000_000):
    if step > 200 and os.environ["RANK"] == "1":
        ctypes.PyDLL(None).sleep(999)  # holds the interpreter's lock
    dist.all_reduce(one)
    report(step=step)
    time.sleep(0.005)  # so that later steps than the first are sent
"""


def launched(tmp_path, script, *options):
    (tmp_path / "train.py").write_text(script)
    return run(["./run-local", "--nproc", "2", *options, "--", "python", "train.py"], tmp_path)


def folder_of(result):
    (folder,) = result.folder.glob("runs/2*")
    return folder


def test_a_script_that_hangs_is_named_with_its_step(tmp_path):
    """Rank 1 stops after 3 steps, rank 0 after 5: rank 1 is the one, with 75; before the run ends,
    a line and an event say that nothing moves."""
    notify = (
        f"python3 -c \"import sys; print(sys.stdin.read(), file=open('{tmp_path}/said', 'a'))\""
    )
    result = launched(tmp_path, LAGS, "--hang-seconds", "3", "--on-event", notify)
    assert result.code == 75, result.said
    ended = json.loads((folder_of(result) / "result.json").read_text())
    assert ended["rank"] == 1
    assert re.match(r"no progress for \d+ s at step 3", ended["cause"])
    stall, end = map(json.loads, (tmp_path / "said").read_text().splitlines())
    assert (stall["event"], stall["result"]) == ("stall", None)
    assert stall["text"].endswith("; at 3 s the run ends") and stall["text"] in result.err
    assert (end["event"], end["result"]) == ("end", ended)


def test_of_ranks_that_wait_for_each_other_the_right_one_is_named(tmp_path):
    """One is stuck in native code, the other in gloo: its stack is logged, and it is not blamed."""
    result = launched(tmp_path, RING, "--hang-seconds", "3")
    assert result.code == 75, result.said
    last = result.err.splitlines()[-1]
    assert re.search(
        r"rank 1 on localhost: no progress for \d+ s at step \d{2,}, at train.py:8", last
    )
    assert "rank 0 on" not in result.err
    (log,) = folder_of(result).glob("logs/*/*/rank-0.err")
    assert "in all_reduce" in log.read_text()


def test_ranks_that_print_nothing_any_more_hang(tmp_path):
    """75, with how long they were silent, how busy the machine was, and the stack of each."""
    result = launched(tmp_path, WAITING, "--silent-minutes", "0.15")
    assert result.code == 75, result.said
    assert re.search(r"no output for 0\.\d+ min, CPUs \d+ % busy", result.said)
    assert "in wait_for_a_message" in result.said
    assert json.loads((folder_of(result) / "result.json").read_text())["exit_code"] == 75
    for log in folder_of(result).glob("logs/**/rank-*.err"):
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
