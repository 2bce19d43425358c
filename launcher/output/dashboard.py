"""The dashboard: a live view of a run on a terminal.

A row per host, the broken ones on top, a bar for the epoch, and the merged log of all ranks
scrolling above them.
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rackrun.contract import phases
from rackrun.launcher.output.console import NOTE, measures, short_path, write_all
from rackrun.launcher.output.host_table import folded, host_table
from rackrun.launcher.output.run_view import BUSY, RunView
from rackrun.runs import SHORT_ID
from rackrun.units import duration, share

LINES_SHOWN = 500  # at once: output.log has the rest
BAR_WIDTH = 24  # of the epoch and its bar, at least
COLORS = ("cyan", "magenta", "green", "blue", "yellow", "bright_magenta")
LINES_AROUND = 10  # the head of the board, the table's own, and one for the log
_WHO = re.compile(r"(?:[^ |]+:|[0-9]+ hosts:)?([0-9]+)[0-9,-]*( x[0-9]+)?")
"""What stands before a line of ranks: hosts, ranks, and how many."""


class Terminal:
    """Standard output without a buffer: none is left to be flushed to a terminal that is gone."""

    encoding = "utf-8"

    def write(self, text: str) -> int:
        """Write all of it."""
        write_all(1, text.encode("utf-8", "replace"))
        return len(text)

    def flush(self) -> None:
        """Nothing waits."""

    def isatty(self) -> bool:
        """Return True for a terminal."""
        return os.isatty(1)

    def fileno(self) -> int:
        """Return the descriptor that is written to."""
        return 1


class Dashboard(AbstractContextManager["Dashboard"]):
    """Draws a run on a terminal, and leaves the terminal as it was."""

    def __init__(self, console: Console | None = None) -> None:
        """Draw on standard output, unless another console is given."""
        out: Any = Terminal()
        self.console = console or Console(file=out, force_terminal=True, highlight=False)
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Dashboard:
        self.live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        with suppress(OSError):  # the terminal may have hung up
            self.live.stop()

    def show_lines(self, text: str) -> None:
        """Print lines above the board; of very many, the newest."""
        lines = text.splitlines()
        if skipped := len(lines[:-LINES_SHOWN]):
            self.console.print(Text(f"({skipped:,} lines, see output.log)", style="dim"))
        shown = Text("\n").join(_styled(line) for line in lines[-LINES_SHOWN:])
        self.console.print(shown, soft_wrap=True)

    def draw(self, run: RunView) -> None:
        """Draw the board anew."""
        self.live.update(self.board(run), refresh=True)

    def board(self, run: RunView) -> RenderableType:
        """Return what is drawn of a run."""
        parts = [*self._head(run)]
        if run.phase:
            parts.append(_progress_bar(run, self.console.width))
        return Padding(Group(*parts, Text(), self._hosts(run)), (1, 1, 0, 1))

    def _head(self, run: RunView) -> list[RenderableType]:
        line = Table.grid(Column(ratio=1, no_wrap=True), Column(justify="right"), expand=True)
        line.add_row(
            Text.assemble((run.name, "bold cyan"), ("  ·  ", "dim"), run.machines),
            Text(duration(run.seconds), style="dim"),
        )
        parts = f"run {run.run_id[:SHORT_ID]}", short_path(Path(run.folder)), run.dataset
        about = Text("  ·  ".join(filter(None, parts)), style="dim")
        # Else lines that are printed above, unwrapped, cut it until the next draw.
        about.no_wrap, about.overflow = False, "fold"
        return [line, about]

    def _hosts(self, run: RunView) -> RenderableType:
        room = max(3, self.console.height - LINES_AROUND)
        shown, rest = run.hosts[:room], run.hosts[room:]
        table = host_table(shown, self.console.width)
        return Group(table, Text(folded(rest), style="dim")) if rest else table


def _styled(line: str) -> Text:
    if line.startswith(NOTE):
        return Text.assemble((NOTE, "bold cyan"), line.removeprefix(NOTE))
    who, bar, text = line.partition(" | ")
    origin = _WHO.fullmatch(who)
    if not bar or not origin:
        return Text(line)
    color = "bold" if origin[2] else COLORS[int(origin[1]) % len(COLORS)]
    return Text.assemble((who, color), (" │ ", "bright_black"), text)


def _progress_bar(run: RunView, width: int) -> RenderableType:
    total = run.epoch_steps or run.steps  # of a script that counts no epochs, the whole run
    bar = ProgressBar(
        total=total or None,
        completed=run.epoch_step if run.phase == phases.TRAIN else total,
        pulse=not total,
        complete_style="cyan",
        finished_style="green",
    )
    columns = Column(), Column(ratio=1), Column(justify="right", no_wrap=True)
    grid = Table.grid(*columns, expand=True, padding=(0, 2))
    epoch = BUSY[phases.START]
    if run.epoch:
        epoch = f"epoch {run.epoch}/{run.epochs or '?'}"
    elif run.step:
        epoch = f"step {run.step}/{run.steps or '?'}"
    texts = _measures(run)
    while len(texts) > 1 and sum(map(len, texts)) + 3 * len(texts) > width - BAR_WIDTH:
        # The bar shows the step; loss, speed and the end of the run go last.
        texts.pop(-2 if len(texts) > 4 else 0)
    grid.add_row(Text(epoch, style="bold"), bar, Text("   ".join(texts)))
    milestones = (
        "" if run.best is None else f"best validation accuracy {share(run.best)}",
        f"last checkpoint at step {run.checkpoint:,}" if run.checkpoint else "",
    )
    line = "  ·  ".join(filter(None, milestones))
    return Group(grid, Text(line, style="dim")) if line else grid


def _measures(run: RunView) -> list[str]:
    where = f"{run.epoch_step}/{run.epoch_steps}" if run.epoch_steps else ""
    busy = BUSY.get(run.phase, "finishing") if run.epoch or run.step else ""  # beside the bar
    first = where if run.phase == phases.TRAIN else busy
    return [*filter(None, [first]), *measures(run)]
