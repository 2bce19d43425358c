"""Compromised hosts speak our protocol, and nothing they claim is trusted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.remote import service
from rackrun.launcher.remote.agent import frames
from tests.lab.oracles import text_only
from tests.launcher.drive import Drive

WAIT = [sys.executable, "-c", "import time; time.sleep(999)"]


def event(name: str, local: int = frames.NO_RANK, **fields: Any) -> bytes:
    payload = json.dumps({"event": name, **fields}).encode()
    return frames.HEADER.pack(frames.EVENT, local, len(payload)) + payload


ENDED = {"code": 0, "signal": 0, "oom": False, "ordered": False}
USAGE = {"cpu": 0.5, "memory": 1, "memory_total": 2, "gpus": []}
NONSENSE = "sent data that is not the agent protocol"
SAID = {  # what the second host says: why it is lost
    "its last word first": (event("closed", survivors=[]), "its agent ended before its ranks did"),
    "the end of another's rank": (event("opened", port=1) + event("ended", 1, **ENDED), NONSENSE),
    "no object": (frames.HEADER.pack(frames.EVENT, 0, 1) + b"5", NONSENSE),
    "deep": (frames.HEADER.pack(frames.EVENT, 0, 99_999) + b"[" * 99_999, NONSENSE),
    "endless": (event("usage", **{**USAGE, "cpu": 2147483648}), NONSENSE),
    "a sequence": (
        event("stopping", reason="\x1b]0;PWNED\x07\nrackrun: done") + event("closed"),
        "]0;PWNED",
    ),
}


def hostile(folder: Path, data: bytes) -> str:
    """Return an interpreter that prints this in place of the agent until the launcher closes."""
    path = folder / f"hostile-{hash(data)}"
    path.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"sys.stdout.buffer.write({service.MARKER + data!r})\n"
        "sys.stdout.flush()\nsys.stdin.buffer.read()\n"
    )
    path.chmod(0o755)
    return str(path)


@pytest.mark.security("HOST-2")
def test_what_a_hostile_host_says_is_its_own_end(tmp_path):
    """SSH-7: one line that names it, 75, no traceback; the other host is clean."""
    drives = {
        name: Drive(
            *(tmp_path, WAIT),
            slots=[1, 1],
            agents=["python3", hostile(tmp_path, message)],
            limits={"lease_seconds": 15.0},
        )
        for name, (message, _) in SAID.items()
    }
    for name, drive in drives.items():
        assert drive.wait() == 75, (name, drive.err)
        assert "Traceback" not in drive.err, name
        text_only(drive.err)
        assert drive.err.splitlines()[-1].startswith("rackrun: failed: 127.0.0.3: "), drive.err
        assert SAID[name][1] in drive.err.splitlines()[-1]
        assert drive.result["hosts"]["127.0.0.2"] == "clean"


@pytest.mark.security("HOST-2")
def test_a_host_cannot_make_a_run_succeed(tmp_path):
    """The only host says that all is over, and no rank ever ran: 75, not done."""
    message = event("closed", survivors=[])
    drive = Drive(tmp_path, WAIT, agents=[hostile(tmp_path, message)]).end()
    assert drive.process.returncode == 75
    assert drive.result["verdict"] == "failed"
