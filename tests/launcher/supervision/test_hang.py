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
