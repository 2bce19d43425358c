"""Progress: a bar on a terminal, readable lines in a log."""

import os
import pty
import re
import subprocess
import sys

from rackrun.convert.progress import meter


def test_a_terminal_shows_a_bar_with_rate_and_time_left(train_zip, tmp_path):
    """On a terminal the bar goes to the end and leaves the line as it was."""
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "rackrun.convert",
        "catdog",
        str(train_zip),
        str(tmp_path / "out"),
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=theirs, env=os.environ | {"TERM": "xterm"}
    ) as running:
        os.close(theirs)
        screen = b""
        while block := _read(ours):
            screen += block
    os.close(ours)
    assert running.returncode == 0
    assert b"300/300" in screen and re.search(rb"[\d,]+/s", screen)
    assert b"\x1b[?25h" in screen  # the cursor is back


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other side has closed
        return b""


def test_a_log_gets_plain_lines(capsys, monkeypatch):
    """Without a terminal: a line now and then with rate and time left, and one at the end."""
    monkeypatch.setattr("rackrun.convert.progress.LINE_SECONDS", 0.0)
    with meter("converted", 1000) as show:
        show(400)
        show(1000)
    lines = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"converted 400 of 1,000 images, [\d,]+/s, 0 s left", lines[0])
    assert re.fullmatch(r"converted 1,000 images, [\d,]+/s in 0.\d s", lines[2])
