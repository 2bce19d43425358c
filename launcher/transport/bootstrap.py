"""Starts one of our programs on a host, encodes its orders, and reads why it failed."""

from __future__ import annotations

import json
import re
from typing import Any

from rackrun.terminal import one_line

LONGEST_COMPLAINT = 300
FRAME = re.compile(r'^  File "(launcher/[\w/]+\.py)", line (\d+)', re.MULTILINE | re.ASCII)

BOOTSTRAP = (
    "import sys,_signal as a;a.alarm(60);i=sys.stdin.buffer;s=i.read(int(i.readline()));a.alarm(0);"
    'g={"__name__":"rackrun_agent"};exec(s,g);g["serve"](s)'
)
"""Reads a program from standard input, its length on a line before it, and starts it.

What has not arrived after a minute never will: where a link broke, sshd may wait for hours.
"""


def bootstrap(python: str = "python3") -> tuple[str, ...]:
    """Return the command that starts any agent: always the same, without anything of the user's.

    Isolated, so that neither variables nor files of the host change what the program imports.
    """
    return (python, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP)


def order(**fields: Any) -> bytes:
    """Return an order as JSON, with its length on a line before it."""
    text = json.dumps(fields).encode()
    return b"%d\n%s" % (len(text), text)


def last_words(printed: str) -> str:
    """Return the last line of standard error; of a traceback, also where it was raised."""
    lines = printed.splitlines()
    if not lines:
        return ""
    last, frames = one_line(lines[-1][:LONGEST_COMPLAINT]), FRAME.findall(printed)
    return f"{last} ({frames[-1][0]}, line {frames[-1][1]})" if frames else last
