"""Scripts of these tests on real ranks, under torchrun and gloo: how they start, what they say."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from training.config import Config
from training.ranks import Ranks, joined

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


def prove(config: Config, *cases: Callable[[Config, Ranks, Path], None]) -> NoReturn:
    """What such a script does: its cases in the folder it was given, a line for each that holds."""
    with joined(config) as ranks:
        for case in cases:
            case(config, ranks, Path(sys.argv[1]))
            if ranks.first:
                sys.stdout.write(f"holds: {case.__name__}\n")
    sys.stdout.flush()
    os._exit(0)
