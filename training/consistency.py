"""Check that all ranks have the same world size, run and code.

A host that finds no others trains alone and succeeds, a rank that calls a port which two launches
share joins the wrong ones, and a host with yesterday's code computes other gradients. None of them
fails by itself, so every rank looks before its first step.
"""

import hashlib
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rackrun.contract import variables
from rackrun.errors import Problem

Mark = npt.NDArray[np.integer[Any]]
"""A rank's run and code: 32 bytes of SHA-256 each."""

ROOT = Path(__file__).parents[1]


class WorldError(Problem):
    """The ranks that came together are not those that were promised."""

    exit_code = 75


class CodeError(Problem):
    """The ranks do not run the same code."""

    exit_code = 78


def check_world(world: int) -> None:
    """Refuse to train in a world that is not as large as the launcher planned."""
    promised = int(os.environ.get(variables.WORLD_SIZE, world))
    if promised != world:
        raise WorldError(
            f"{socket.gethostname()}: {promised} ranks were planned, but this rank's world has"
            f" {world}: the hosts did not find each other"
        )


def fingerprint() -> Mark:
    """Return what this rank compares with the others."""
    run = hashlib.sha256(os.environ.get(variables.RUN_ID, "").encode()).digest()
    return np.frombuffer(run + _code_digest(), dtype=np.uint8)


def check_marks(marks: Sequence[Mark]) -> None:
    """Refuse to train with ranks of another run, or of other code; `marks` is in rank order."""
    for rank, its in enumerate(marks):
        if not np.array_equal(its[:32], marks[0][:32]):
            raise WorldError(
                f"rank {rank} belongs to another run than rank 0: two launches share a port;"
                " type the same command again"
            )
        if not np.array_equal(its[32:], marks[0][32:]):
            raise CodeError(
                f"the code of rank {rank} is not that of rank 0: bring the same to every host,"
                " as --sync does"
            )


def _code_digest() -> bytes:
    """Return the SHA-256 of the program: training, shards, and the package that was started."""
    started = sys.modules["__main__"].__spec__
    names = {"training", "shards", started.name.partition(".")[0] if started else "training"}
    digest = hashlib.sha256()
    for path in sorted(path for name in names for path in (ROOT / name).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.digest()
