"""What the launcher says in its own name where no screen shows it."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from launcher.output.console import PlainOutput, say
from launcher.output.dashboard import Dashboard
from launcher.run.plan import Plan
from tests.launcher.drive import ROOT

SAY = """
import sys
from launcher.output.console import say
say("first")
sys.stdin.readline()
for number in range(3):
    say(f"word {number}")
print("went on")
"""


def test_words_that_nobody_reads_end_nothing() -> None:
    """`./run-ssh ... 2>&1 | head -1`: the reader leaves, and what was under way goes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAY],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stderr.readline() == "rackrun: first\n"
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stdout.read() == "went on\n"
    assert process.wait() == 0
    process.stdout.close()


def test_what_is_said_is_text(capfd: pytest.CaptureFixture[str]) -> None:
    """SSH-7: words of a host among ours, in `say` and in a note, move no cursor."""
    words = "node1: \x1b]0;PWNED\x07\u202e\nnode2: \x1b[2J"
    plan = Plan("id", 0, ())
    drawn = io.StringIO()
    board = Dashboard(plan, "x", Path("/x"))
    board.console = Console(file=drawn, force_terminal=True, width=200)
    board.note(words)
    shown = [drawn.getvalue()]
    for tell in (say, PlainOutput(plan).note):
        tell(words)
        shown.append(capfd.readouterr().err)
    for text in shown:
        assert "node1: ␛]0;PWNED␇\\u202e\nnode2: ␛[2J" in text
