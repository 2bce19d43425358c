"""The dashboard: a live view of a run on a terminal.

A row per host, the broken ones on top, a bar for the epoch, and the merged log of all ranks
scrolling above them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from contextlib import AbstractContextManager
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from rackrun.contract import phases
from rackrun.launcher.output.console import (
    MergedOutput,
    last_line,
    line_prefix,
    next_commands,
    short_path,
    summary,
)
from rackrun.launcher.output.host_table import folded, host_table
from rackrun.launcher.output.merge import Line, LogSource
from rackrun.launcher.output.nonblocking import STALL_SECONDS
from rackrun.launcher.output.run_view import BUSY, RunView, view
from rackrun.launcher.run.events import Event
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.runs import SHORT_ID
from rackrun.terminal import clean, clean_lines
from rackrun.units import duration

DRAW_SECONDS = 0.25
LINES_KEPT = 500  # between two drawings: the logs have the rest
RAW_BYTES = 1 << 20
DRAW_SHARE = 20  # drawing takes this fraction of the launcher's time, inverted
BAR_WIDTH = 30  # of the epoch and its bar, at least
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_magenta")
LINES_AROUND = 10  # the head of the board, the table's own, and one for the log


class Dashboard(MergedOutput, AbstractContextManager["Dashboard"]):
    """Draws a run on a terminal, and leaves the terminal as it was."""

    def __init__(self, plan: Plan, name: str, folder: Path) -> None:
        """Take what runs as `name`, and the run folder, for the head of the dashboard."""
        super().__init__(plan)
        self.name = name
        self.folder = folder
        self.console = Console(file=self.out, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.lines: deque[Line] = deque()
        """What waits for the next drawing."""
        self.skipped: Counter[tuple[LogSource, ...]] = Counter()
        """Lines that are too many for it."""
        self.draw_at = 0.0

    def __enter__(self) -> Dashboard:
        self.live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.live.stop()
        self.out.flush_within(STALL_SECONDS)

    def show(self, event: Event) -> None:
        """Take output; of much of it, only the newest lines are kept."""
        super().show(event)
        if self.merger.raw_bytes > RAW_BYTES:
            self._collect()

    def note(self, text: str) -> None:
        """Add a line of the launcher's own to those of the ranks."""
        line = Text.assemble(("rackrun: ", "bold cyan"), clean_lines(text))
        self.console.print(line, soft_wrap=True)
        self.out.flush()

    def draw(self, run: RunState, now: float) -> None:
        """Print new lines above the board and redraw it, unless the terminal is stalled."""
        self.out.flush()
        if now < self.draw_at or self.out.waiting:
            return
        began = time.perf_counter()
        self._collect()
        self._print()
        self.live.update(self._board(view(run, self.name, self.folder, now)), refresh=True)
        self.out.flush()
        self.draw_at = now + max(DRAW_SECONDS, DRAW_SHARE * (time.perf_counter() - began))

    def finish(self, result: Result) -> None:
        """Print the traceback, the results, and one last line."""
        self._collect(everything=True)
        self._print()
        if result.traceback:
            trace = "\n".join(clean(line) for line in result.traceback.splitlines())
            self.console.print(Padding(Text(trace, style="red"), (1, 0, 0, 2)), soft_wrap=True)
        self.console.print()
        rows = [(clean(name), clean_lines(value)) for name, value in summary(result)]
        width = max(len(name) for name, _ in rows)
        for name, value in rows:  # no table: it would break or cut the paths to be copied
            line = Text.assemble((f"  {name:{width}}   ", "dim"), (value, "bold"))
            self.console.print(line, soft_wrap=True)
        self.console.print()
        for name, command in next_commands(result, self.plan):
            text = f"  {name}:\n{clean(command)}\n"  # a line of its own, to be selected as a whole
            self.console.print(text, soft_wrap=True, markup=False)
        good = result.verdict == "done"
        head = ("✔ ", "bold green") if good else ("✘ ", "bold red")
        self.console.print(Text.assemble(head, (clean(last_line(result)), "bold")), soft_wrap=True)
        self.out.flush_within(STALL_SECONDS)

    def _collect(self, everything: bool = False) -> None:
        # Between two drawings only the newest lines are kept; of the others, their number is shown.
        for item in self.merger.take(time.monotonic(), everything):
            if isinstance(item, Line):
                self.lines.append(item)
            else:
                self.skipped[item.sources] += item.count
            if len(self.lines) > LINES_KEPT:
                self.skipped[self.lines.popleft().sources] += 1

    def _print(self) -> None:
        lines = [
            self._prefix(line.sources)
            + Text(line.text, style="yellow" if line.sources[0].stream == "err" else "")
            for line in self.lines
        ] + [
            self._prefix(sources) + Text(f"({count:,} lines, see the logs)", style="dim")
            for sources, count in self.skipped.items()
        ]
        self.lines.clear()
        self.skipped.clear()
        if lines:
            self.console.print(Text("\n").join(lines), soft_wrap=True)

    def _prefix(self, sources: tuple[LogSource, ...]) -> Text:
        who = line_prefix(self.plan, sources)
        colour = COLOURS[(sources[0].rank or 0) % len(COLOURS)] if len(sources) == 1 else "bold"
        return Text.assemble((who, colour), (" │ " if who else "", "bright_black"))

    # -- the dashboard

    def _board(self, run: RunView) -> RenderableType:
        parts = [*self._head(run)]
        if run.phase:
            parts.append(_progress_bar(run, self.console.width))
        return Padding(Group(*parts, Text(), self._hosts(run)), (1, 1, 0, 1))

    def _head(self, run: RunView) -> list[RenderableType]:
        line = Table.grid(Column(ratio=1, no_wrap=True), Column(justify="right"), expand=True)
        line.add_row(
            Text.assemble((self.name, "bold cyan"), ("  ·  ", "dim"), run.machines),
            Text(duration(run.seconds), style="dim"),
        )
        parts = f"run {run.run_id[:SHORT_ID]}", short_path(self.folder), run.dataset
        return [line, Text("  ·  ".join(filter(None, parts)), style="dim", overflow="fold")]

    def _hosts(self, run: RunView) -> RenderableType:
        room = max(3, self.console.height - LINES_AROUND)
        shown, rest = run.hosts[:room], run.hosts[room:]
        table = host_table(shown, self.console.width, self.merger.last)
        return Group(table, Text(folded(rest), style="dim")) if rest else table


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
        texts.pop(-2)  # the end of the run goes last
    grid.add_row(Text(epoch, style="bold"), bar, Text("   ".join(texts)))
    milestones = (
        _shown(run.best, "best validation accuracy {:.1%}"),
        f"last checkpoint at step {run.checkpoint:,}" if run.checkpoint else "",
    )
    line = "  ·  ".join(filter(None, milestones))
    return Group(grid, Text(line, style="dim")) if line else grid


def _measures(run: RunView) -> list[str]:
    # what is known; where there is too little room, those before the last one are dropped first
    where = f"{run.epoch_step}/{run.epoch_steps}" if run.epoch_steps else ""
    busy = BUSY.get(run.phase, "finishing") if run.epoch or run.step else ""  # beside the bar
    texts = (
        where if run.phase == phases.TRAIN else busy,
        _shown(run.loss, "loss {:.4f}"),
        _shown(run.accuracy, "accuracy {:.1%}"),
        _shown(run.images_per_second, "{:,.0f} images/s"),
        "" if run.seconds_left is None else f"run ends in {duration(run.seconds_left)}",
    )
    return [text for text in texts if text]


def _shown(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
