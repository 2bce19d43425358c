"""Starts one of our programs on a host, and encodes the orders that it reads."""

from __future__ import annotations

import json
from typing import Any

BOOTSTRAP = (
    "import sys,_signal as a;a.alarm(60);i=sys.stdin.buffer;s=i.read(int(i.readline()));a.alarm(0);"
    'g={"__name__":"rackrun_agent"};exec(s,g);g["serve"](s)'
)
"""Reads a program from standard input, its length on a line before it, and starts it.

What has not arrived after a minute never will: where a link broke, sshd may wait for hours.
"""


def bootstrap(python: str = "python3") -> tuple[str, ...]:
    """The command that starts any agent: always the same, and nothing of the user's is in it.

    Isolated, so that neither variables nor files of the host change what the program imports.
    """
    return (python, "-I", "-S", "-X", "utf8", "-c", BOOTSTRAP)


def order(**fields: Any) -> bytes:
    """JSON, with its length on a line before it."""
    text = json.dumps(fields).encode()
    return b"%d\n%s" % (len(text), text)
