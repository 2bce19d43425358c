"""Tables for people: as wide as the terminal, wrapped at words, with a header."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from io import StringIO
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

PIPE_COLUMNS = 200  # of what reads a pipe
STYLES = {"X": "bold red", "!": "yellow"}
"""Of a row, by the mark in its first cell."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    wrapped: Sequence[str] = (),
    numbers: bool = False,
) -> str:
    """Return a table as text, in colour on a terminal; `numbers` stand to the right.

    The columns named in `wrapped` give way on a narrow terminal. A first column without a name has
    marks, which colour their rows.
    """
    on_terminal = sys.stdout.isatty()
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in head:
        justify: Literal["left", "right"] = "right" if numbers else "left"
        drawn.add_column(name, justify=justify, no_wrap=name not in wrapped, overflow="fold")
    for row in rows:
        drawn.add_row(*map(Text, row), style="" if head[0] else STYLES.get(row[0], ""))
    file = StringIO()
    width = shutil.get_terminal_size().columns if on_terminal else PIPE_COLUMNS
    console = Console(file=file, width=width, force_terminal=on_terminal, highlight=False)
    console.print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
