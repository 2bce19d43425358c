"""Hangs: a rank without progress is named with its stack; a slow or silent one is not."""

import re
import sys
import time

from tests.lab import warm
from tests.lab.hosts import BUSY
from tests.lab.waiting import until
from tests.launcher.drive import Drive

REPORTING = (
    "import json, os, socket, sys, time\n"
    "rank = int(os.environ['RANK'])\n"
    "ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
    "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
    "def report(**fields): ear.send(json.dumps({'rank': rank, **fields}).encode())\n"
)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", REPORTING + code]


def test_a_rank_that_stops_reporting_is_named_with_its_stack(tmp_path):
    """One rank sleeps in a step: 75, rank and step are named, every rank's stack is in its log."""
    code = (
        "def stuck(): time.sleep(999)\n"
        "for step in range(1, 1000):\n"
        "    report(phase='train', step=step)\n"
        "    if rank == 1 and step == 7: stuck()\n"
        "    time.sleep(0.02)\n"
        "    if step > 20: stuck()\n"
    )
    drive = Drive(tmp_path, python(code), slots=[2])
    assert drive.wait() == 75
    assert drive.result["rank"] == 1
    assert re.search(r"at step 7, at <string>:\d+ in stuck$", drive.result["cause"])
    assert drive.err.count("in stuck") == 2  # in the stack and in the last line
    for rank in range(2):
        assert "in stuck" in drive.log(rank, "err").read_text()
    assert not drive.alive()


def test_ranks_that_wait_for_one_that_left_are_named(tmp_path):
    """Uneven steps without a plan: one rank has left, the one that waits for it ends with 75."""
    code = (
        "for step in range(1, 6 + 4 * rank):\n"
        "    report(phase='train', step=step); time.sleep(0.02)\n"
        "if rank: time.sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code), slots=[1, 1])
    assert drive.wait() == 75
    assert drive.result["rank"] == 1
    assert "no progress" in drive.result["cause"]
    assert drive.result["cause"].endswith("; rank 0 on 127.0.0.2 had ended with 0 at step 5")
    assert drive.result["codes"]["0"] == 0
    assert not drive.alive()


def test_a_report_without_a_phase_counts(tmp_path):
    """The socket requires `rank` alone: a rank that reports and then stands still ends with 75."""
    code = (
        "for step in range(1, 8):\n"
        "    report()\n"
        "    time.sleep(0.3)\n"  # longer in all than the limit: each report without a step counts
        "time.sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code))
    assert drive.wait() == 75
    assert re.search(r"at <string>:\d+ in <module>", drive.result["cause"])
    assert not drive.alive()


def test_a_rank_in_native_code_still_shows_its_stack(tmp_path):
    """A rank that holds the interpreter's lock in a native loop is named, with its Python line."""
    code = (
        "import ctypes\n"
        "report(phase='train', step=1); time.sleep(0.1); report(phase='train', step=2)\n"
        "ctypes.PyDLL(None).sleep(999)\n"
    )
    drive = Drive(tmp_path, python(code))
    assert drive.wait() == 75
    assert 'File "<string>", line 8 in <module>' in drive.log(0, "err").read_text()


RING = (
    "import ctypes, pathlib\n"
    "import torch, torch.distributed as dist\n"
    "dist.init_process_group('gloo')\n"
    "told, one = 0.0, torch.ones(1)\n"
    "for step in range(1, 1_000_000):\n"
    "    if step > 200 and pathlib.Path(f'stuck-{rank}').exists():\n"
    "        ctypes.PyDLL(None).sleep(999)\n"  # holds the interpreter's lock
    "    dist.all_reduce(one); time.sleep(0.002)\n"
    "    if time.monotonic() > told + 0.2:\n"  # as training.run.progress does
    "        told = time.monotonic(); report(phase='train', step=step)\n"
    "    if step == 200: print('ready', os.getpid(), flush=True)\n"
)
HANG_SECONDS, KILL_SECONDS = 3.0, 10.0


def test_of_ranks_that_wait_for_each_other_the_right_one_is_named(tmp_path):
    """Ranks with gloo between them report now and then, and one is stuck in native code: rank,
    host, last step and age are named, and the stack of the one that waits is logged."""
    python = str(warm.interpreter())
    options = {"real": True, "python": python, "limits": {"hang_seconds": HANG_SECONDS}}
    drive = Drive(tmp_path, [python, "-c", REPORTING + RING], slots=[1, 1], **options)
    logs = [drive.log(one, "out", host=one) for one in range(2)]
    until(lambda: all(log.exists() and log.read_text().endswith("\n") for log in logs))
    (drive.folder / "stuck-1").touch()
    since = time.monotonic()
    assert drive.wait() == 75
    assert time.monotonic() - since < BUSY * (HANG_SECONDS + KILL_SECONDS)
    assert (drive.result["rank"], drive.result["host"]) == (1, "127.0.0.3")
    text = r"no progress for [3-9] s at step \d{2,}, at .*:12 in .*"
    assert re.fullmatch(text, drive.result["cause"]), drive.result["cause"]
    assert "rank 1 on 127.0.0.3: " in drive.err.splitlines()[-1]
    assert "rank 0 on" not in drive.err
    assert "in all_reduce" in drive.log(0, "err").read_text()
    assert not drive.alive()


def test_a_stall_is_reported_before_it_ends_the_run(tmp_path):
    """A third of the limit without progress is a line, and so is the next step."""
    code = (
        "for step in range(1, 10): report(step=step); time.sleep(0.1)\n"
        "time.sleep(2.5); report(step=10); time.sleep(0.3)\n"
    )
    drive = Drive(tmp_path, python(code), limits={"hang_seconds": 6.0})
    assert drive.wait() == 0, drive.err
    stall, again = (line for line in drive.err.splitlines() if "progress" in line)
    assert stall == (
        "rackrun: rank 0 on 127.0.0.2: no progress for 2 s at step 9; at 6 s the run ends"
    )
    assert again == "rackrun: all ranks make progress again"
