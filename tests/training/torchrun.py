"""Starts scripts of these tests on real ranks, under torchrun and gloo."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said(script: str, *words: object) -> str:
    """What two ranks of a script beside this file say; they must end well."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [sys.executable, *torchrun, str(path), *map(str, words)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
