"""Saving that takes its time, under a launcher: Ctrl-C waits for it; one that blocks is named."""

import re
import signal
import sys

from rackrun.atomic import partials
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from tests.lab import warm
from tests.lab.waiting import until
from tests.launcher.drive import ROOT, Drive

SLOW = """
import os, signal, sys, time
from pathlib import Path
from tests.training import halves
from tests.lab.waiting import until
from rackrun.training.config import Config
from rackrun.training.world import joined
fsync = os.fsync
def slow(descriptor):
    if "step-00000003" in os.readlink(f"/proc/self/fd/{descriptor}"):
        Path("saving").touch()
        while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            time.sleep(0.01)  # until training.stop_requests has noted a signal
    fsync(descriptor)
os.fsync = slow
config = Config(
    epochs=1, save_steps=3, tensorboard=False, device="cpu",
    run_folder=os.environ["RACKRUN_RUN_FOLDER"],
)
with joined(config) as ranks:
    code = halves.ran(config, ranks, halves.Halves(ranks))
sys.stdout.flush()
os._exit(code)
"""
BLOCKED = """
import json, os, socket, time
from pathlib import Path
from rackrun.training import checkpoint
from rackrun import report
os.fsync = lambda descriptor: time.sleep(999)
report(phase="save", step=3)
checkpoint.write(Path("step.pt"), {"step": 3})
"""
OURS = [("PYTHONPATH", str(ROOT)), ("OMP_NUM_THREADS", "1")]


def test_ctrl_c_waits_for_a_save_that_takes_its_time(tmp_path):
    """Rank 0 of two saves while both train; the signal arrives meanwhile: 130, that save and the
    one of the last step are whole, and both ranks have ended by themselves."""
    command = [str(warm.interpreter()), "-c", SLOW]
    limits = {"hang_seconds": 60.0, "checkpoint_seconds": 30.0}
    drive = Drive(tmp_path, command, slots=[2], environment=OURS, limits=limits)
    until((drive.folder / "saving").exists)
    drive.process.send_signal(signal.SIGINT)
    assert drive.wait() == 130, drive.err
    assert drive.result["codes"] == {"0": 143, "1": 143}
    assert "stopped by Ctrl-C" in drive.err.splitlines()[-1]
    saved = RunFolder(drive.folder).checkpoints
    first, *_, newest = [checkpoint.read(path) for path in checkpoint.steps_in(saved)]
    assert first["state"]["step"] == 3 < newest["state"]["step"]
    assert not partials(saved)
    assert not drive.alive()


def test_a_save_that_blocks_is_named(tmp_path):
    """The disk does not answer any more: 75 after 15 times the limit, "while saving", and where."""
    command = [sys.executable, "-c", BLOCKED]
    drive = Drive(tmp_path, command, environment=OURS, limits={"hang_seconds": 0.1})
    assert drive.wait() == 75
    assert re.search(r"no progress for \d s while saving, at ", drive.result["cause"])
    assert "/rackrun/atomic.py" in drive.result["traceback"]
    assert not drive.alive()
