"""What the launcher says in its own name where no screen shows it."""

import subprocess
import sys

from tests.launcher.drive import ROOT

SAY = """
import sys
from launcher.screen import say
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
