"""Scripts of these tests on real ranks with gloo: how they are started and what they print."""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

from rackrun.training.config import Config
from rackrun.training.ranks import Ranks
from rackrun.training.world import joined
from tests.lab import warm

ROOT = Path(__file__).parents[2]


def output_of(script: str, *args: object, ranks: int = 2) -> str:
    """Return what the ranks of a script beside this file print; they must end well."""
    job = warm.ranks(
        ranks,
        *(Path(__file__).with_name(script), *args),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(lambda rank: rank.communicate()[0], job))
    assert [rank.returncode for rank in job] == [0] * ranks, outputs
    return "".join(map(without_gloo, outputs))


def without_gloo(printed: str) -> str:
    """Return what a rank prints without the line that gloo of torch 2.10 adds."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def prove(config: Config, *cases: Callable[[Config, Ranks, Path], None]) -> NoReturn:
    """Run the cases of a script in its folder, and print a line for each that holds."""
    with joined(config) as ranks:
        for case in cases:
            case(config, ranks, Path(sys.argv[1]))
            if ranks.first:
                sys.stdout.write(f"holds: {case.__name__}\n")
    sys.stdout.flush()
    os._exit(0)
