"""Slurm for a whole session: it takes two seconds to start, and its jobs clean up themselves."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.clusters import SlurmLab


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmLab]:
    """Yield three nodes, idle."""
    lab = SlurmLab(tmp_path_factory.mktemp("slurm"))
    try:
        lab.start()
        yield lab
    finally:
        lab.stop()


@pytest.fixture(autouse=True)
def no_job_is_left(slurm: SlurmLab) -> Iterator[None]:
    """Yield; then cancel the jobs that a failed test has left."""
    yield
    slurm.cancel_all()


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with `train.zip`, 240 drawn cats and dogs, and their shards."""
    folder = tmp_path_factory.mktemp("drawn")
    subprocess.run(
        [sys.executable, "-m", "rackrun.catdog", "demo", str(folder), "--images", "240"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder
