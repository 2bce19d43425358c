"""A server that goes away and comes back in the middle of an epoch of two real ranks."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from rackrun.nginx.serve import start
from tests.lab import warm
from tests.lab.oracles import NOTED, exact_epochs
from tests.lab.servers import AccessLog, access_log
from tests.training.conftest import MakeShards, draw

ROOT = Path(__file__).parents[2]
PICTURES, PICTURE_BYTES = 480, 200_000
READ_AHEAD = 50  # pictures of the next epoch that two ranks fetch, also without restarts
RUN = (
    "--epochs", "1", "--batch-size", "8", "--image-size", "16", "--width", "4", "--workers", "1",
    "--device", "cpu", "--no-tensorboard", "--exact-epochs",
)  # fmt: skip


@pytest.fixture
def heavy(make_shards: MakeShards) -> Path:
    """Return more bytes than two ranks read ahead: small images with data after their end."""
    random = np.random.default_rng(0)
    pictures = {
        f"train_{number:05d}": draw(number % 2, number) + random.bytes(PICTURE_BYTES)
        for number in range(PICTURES)
    }
    folder = make_shards(train=(60,) * 8, broken=pictures)
    folder.chmod(0o755)  # for the user that a root's nginx runs as
    return folder


def two_ranks(url: str, folder: Path) -> list[warm.Python]:
    task = ("-m", "rackrun.catdog", "--data", url, "--run-folder", folder, *RUN)
    return warm.ranks(2, *task, cwd=ROOT, env={**os.environ, **NOTED, "OMP_NUM_THREADS": "1"})


def sent(log: AccessLog) -> int:
    """Return the bytes of all answers so far, by nginx's log."""
    return sum(size for _, _, size in log.requests)


def test_three_restarts_in_an_epoch_lose_no_sample_and_hardly_a_byte(heavy, tmp_path):
    """The epoch of two ranks is exact, and nginx sent hardly an image twice."""
    with access_log() as log:
        server = start(log.site(heavy))
        training = two_ranks(server.url, tmp_path / "run")
        data_bytes = sum(path.stat().st_size for path in heavy.iterdir())
        for share in (0.5, 0.65, 0.8):
            while sent(log) < share * data_bytes:
                assert [rank.poll() for rank in training] == [None, None]
                time.sleep(0.01)
            server.stop()
            server = start(server.site)
        assert [rank.wait(timeout=300) for rank in training] == [0, 0]
        total = sent(log)
        server.stop()
    assert exact_epochs(tmp_path / "run") == [[2]]
    assert data_bytes < total < data_bytes + (READ_AHEAD + 20) * PICTURE_BYTES
