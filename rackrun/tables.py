"""Tables: for people, as wide as the terminal; for programs, as CSV files, whole or not at all."""

import csv
import io
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from rackrun.atomic import write_whole
from rackrun.errors import UsageError
from rackrun.terminal import clean_lines

State = TypeVar("State")

PIPE_COLUMNS = 200  # of what reads a pipe
STYLES = {"X": "bold red", "!": "yellow"}
"""Mark in the first cell of a row -> style of the row."""


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    wrapped: Sequence[str] = (),
    numbers: Sequence[str] = (),
) -> str:
    """Return a table as text, in color on a terminal; columns in `numbers` are right-aligned.

    The columns in `wrapped` become narrower on a narrow terminal. A first column without a name has
    marks, which color their rows.
    """
    from rich.console import Console  # a twentieth of a second, which --help does without
    from rich.table import Table
    from rich.text import Text

    on_terminal = sys.stdout.isatty()
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in head:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        drawn.add_column(name, justify=justify, no_wrap=name not in wrapped, overflow="fold")
    for row in rows:
        cells = (Text(clean_lines(cell)) for cell in row)
        drawn.add_row(*cells, style="" if head[0] else STYLES.get(row[0], ""))
    file = io.StringIO()
    width = shutil.get_terminal_size().columns if on_terminal else PIPE_COLUMNS
    console = Console(file=file, width=width, force_terminal=on_terminal, highlight=False)
    console.print(drawn)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def show_again_and_again(
    read: Callable[[], State],
    draw: Callable[[State, bool], str],
    seconds: float,
    once: bool = False,
) -> None:
    """Print what was read; on a terminal fill the screen with it every few seconds, unless `once`.

    `draw` is given whether the text is for a screen, which shows its beginning. Ctrl-C ends it; the
    last table then stays in the terminal, whole.
    """
    state = read()
    if once or not sys.stdout.isatty():
        sys.stdout.write(draw(state, False))
        sys.stdout.flush()
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    try:
        with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
            while True:
                live.update(Text.from_ansi(draw(state, True).rstrip()), refresh=True)
                time.sleep(seconds)
                state = read()
    finally:
        sys.stdout.write(draw(state, False))
        sys.stdout.flush()


def as_csv(rows: Iterable[Sequence[object]]) -> bytes:
    """Return rows as CSV in UTF-8; a name that is not valid text keeps its bytes."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogateescape")


def write_table(path: Path, rows: Iterable[Sequence[object]]) -> None:
    """Write rows as a CSV file."""
    write_whole(path, as_csv(rows))


def as_cell(text: str) -> str:
    """Return text that a spreadsheet does not take for a formula: behind an apostrophe, if need be.

    Names of classes and samples come from the authors of data.
    """
    return f"'{text}" if _is_formula(text.lstrip("'")) else text


def in_cell(cell: str) -> str:
    """Return the text that `as_cell` has made a cell of."""
    return cell[1:] if cell.startswith("'") and _is_formula(cell.lstrip("'")) else cell


def _is_formula(text: str) -> bool:
    return text.startswith(("=", "+", "-", "@", "\t", "\r"))


def require_folder(path: str) -> None:
    """Raise UsageError if the folder of a file is missing."""
    folder = Path(path).parent
    if path and not folder.is_dir():
        raise UsageError(f"{path}: no folder {folder}; type: mkdir -p {shlex.quote(str(folder))}")


def require_replaceable(path: str, columns: Sequence[str]) -> None:
    """Raise UsageError if another file has the name of a table than an earlier one like it."""
    if path and Path(path).is_file():
        with Path(path).open("rb") as file:
            first = file.readline()
        if first and first.rstrip() != as_csv([columns]).rstrip():
            raise UsageError(f"{path}: another file has this name; type a new one, or remove it")
