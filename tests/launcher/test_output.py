"""Much output: every byte in its log, memory flat, time linear."""

import hashlib
import random
import sys
from pathlib import Path

import pytest

from tests.launcher.drive import PATIENCE_SECONDS, Drive

MEMORY_MIB = 120  # the interpreter with all of the launcher takes 40


def flood(tmp_path: Path, megabytes: int, name: str) -> Drive:
    """A rank that writes so much in lines, into a log instead of a pipe."""
    script = tmp_path / "flood.py"
    script.write_text(
        "import sys\n"
        "line = b'a line of some length, as a chatty rank would write it over and over\\n'\n"
        f"block = line * ({1_000_000} // len(line))\n"
        f"for _ in range({megabytes}): sys.stdout.buffer.write(block)\n"
    )
    return Drive(tmp_path, [sys.executable, str(script)], output=tmp_path / name)


@pytest.mark.parametrize("megabytes", [100, pytest.param(1000, marks=pytest.mark.long)])
def test_a_flood_of_output_stays_flat_in_memory(tmp_path: Path, megabytes: int) -> None:
    """100 MB (and 1 GB in the long tests) reach log and screen with the memory of a small run."""
    drive = flood(tmp_path, megabytes, "screen")
    assert drive.process.wait(PATIENCE_SECONDS) == 0
    assert drive.peak_mib < MEMORY_MIB
    log = drive.log(0, "out")
    assert log.stat().st_size > 0.99e6 * megabytes
    assert (tmp_path / "screen").stat().st_size == log.stat().st_size


def test_every_byte_of_every_rank_is_in_its_log(tmp_path: Path) -> None:
    """Random bytes on both streams of three ranks on two hosts: the logs have the same digests."""
    seed = random.Random(7).randbytes(1 << 20)
    (tmp_path / "bytes").write_bytes(seed)
    code = (
        "import os, sys\n"
        f"data = open({str(tmp_path / 'bytes')!r}, 'rb').read() + os.environ['RANK'].encode()\n"
        "for start in range(0, len(data), 7777):\n"
        "    sys.stdout.buffer.write(data[start:start + 7777]); sys.stdout.flush()\n"
        "    sys.stderr.buffer.write(data[start:start + 7777][::-1]); sys.stderr.flush()\n"
    )
    drive = Drive(tmp_path, [sys.executable, "-c", code], slots=[2, 1], output=tmp_path / "screen")
    assert drive.wait() == 0, drive.err
    for rank, host in ((0, 0), (1, 0), (2, 1)):
        data = seed + str(rank).encode()
        pieces = [data[start : start + 7777] for start in range(0, len(data), 7777)]
        backwards = b"".join(piece[::-1] for piece in pieces)
        for stream, wanted in (("out", data), ("err", backwards)):
            found = drive.log(rank, stream, host=host).read_bytes()
            assert hashlib.sha256(found).digest() == hashlib.sha256(wanted).digest()


def test_a_full_disk_under_the_logs_does_not_end_the_run(tmp_path: Path) -> None:
    """What cannot be logged is said once; the ranks go on and the run ends well."""
    code = "import os, time; print('x' * 100000); time.sleep(0.3); print('the end')"
    drive = Drive(tmp_path, [sys.executable, "-c", code], log_bytes=50_000)
    assert drive.wait() == 0, drive.err
    assert drive.err.count("output is not logged any more") == 1
    assert "the end" in drive.out
