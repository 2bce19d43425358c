"""Make external text safe to print to a terminal or a log.

Banners, error messages of hosts and servers, names in archives and checkpoints: any of it
may hold escape sequences that move the cursor, rename the window or hide a line. Every
place that prints such text passes it through `clean`.
"""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from typing import TextIO

UNSAFE = re.compile(
    r"[\x00-\x08\x0a-\x1f\x7f-\x9f"  # control characters, of which a tab is harmless
    r"\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]"  # invisible, or no text
)
COLORS = re.compile(r"\x1b\[[0-9;:]*m")


def clean(text: str) -> str:
    """Return one line with its colors removed and every other unsafe character made visible."""
    return UNSAFE.sub(_visible, COLORS.sub("", text.expandtabs(8)))


def clean_lines(text: str) -> str:
    """Return text of several lines, each of them clean; line feeds are kept."""
    return "\n".join(clean(line) for line in text.split("\n"))


def one_line(text: str) -> str:
    """Return text of any number of lines as a single clean one, separated by blanks."""
    return clean(" ".join(text.split()))


def say(line: str) -> None:
    """Print a line, cleaned, to standard error; standard output is for results."""
    sys.stderr.write(f"{clean(line)}\n")
    sys.stderr.flush()


def discard(stream: TextIO) -> None:
    """Send the rest of a stream to /dev/null: its reader has closed it.

    Otherwise the interpreter would fail to flush its buffer at exit, and report that.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def open_streams() -> None:
    """Open /dev/null for each closed standard stream, before another file takes its number."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)
            if null != number:
                os.dup2(null, number)
                os.close(null)
            os.set_inheritable(number, True)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115, PTH123


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # its symbol, as ␛ for escape
    if code == 0x7F:
        return "\u2421"
    name = unicodedata.category(match[0])
    return f"\\x{code:02x}" if name == "Cc" else f"\\u{code:04x}"
