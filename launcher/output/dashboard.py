"""The board: a live view of a run on a terminal. The only file of the launcher that knows rich.

A row per host, a bar for the epoch, and the merged log of all ranks scrolling above them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from launcher.output.console import last_line, line_prefix, summary
from launcher.output.merge import Line, LogMerger, LogSource
from launcher.output.nonblocking import STALL_SECONDS, NonBlockingWriter
from launcher.run.events import Event, Output, RankEnded
from launcher.run.plan import Plan
from launcher.run.result import Result
from launcher.run.state import HostState, RankState, RunState
from rackrun.terminal import clean, clean_lines
from rackrun.units import duration, plural

DRAW_SECONDS = 0.25
LINES_KEPT = 500  # between two drawings: the logs have the rest
RAW_BYTES = 1 << 20
DRAW_SHARE = 20  # drawing takes one part in so many of the launcher's time
METER_WIDTH = 6
BAR_WIDTH = 30  # of the epoch and its bar, at least
NEVER = 1 << 16
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_magenta")
HEAD_LINE = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
BUSY = {"start": "loading", "train": "training", "evaluate": "evaluating", "save": "saving"}
STYLES = {"connecting": "yellow", "starting": "yellow", "loading": "yellow", "stopping": "yellow"}
STYLES |= {"clean": "dim", "done": "green", "finishing": "green"}
STYLES |= {"lost": "bold red", "stopped": "bold red", "not clean": "bold red"}
STYLES |= {"not verified": "bold red"}


class Dashboard(AbstractContextManager["Dashboard"]):
    """Draws a run on a terminal, and leaves the terminal as it was."""

    def __init__(self, plan: Plan, name: str) -> None:
        """`name` is what runs, for the head of the board."""
        self.plan = plan
        self.name = name
        self.out = NonBlockingWriter(1)
        self.console = Console(file=self.out, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.merger = LogMerger(fold=plan.world_size > 1)
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

    @property
    def gone(self) -> bool:
        """Return True once the terminal is closed."""
        return self.out.gone

    def show(self, event: Event) -> None:
        """Take output; the traceback of a rank that failed is left for the end."""
        if isinstance(event, Output) and event.rank is not None:
            self.merger.feed(event)
            if self.merger.raw_bytes > RAW_BYTES:
                self._collect()
        elif isinstance(event, RankEnded) and event.exit_code:
            self.merger.forget(event.rank)

    def note(self, text: str) -> None:
        """A line of our own among those of the ranks."""
        line = Text.assemble(("rackrun: ", "bold cyan"), clean_lines(text))
        self.console.print(line, soft_wrap=True)
        self.out.flush()

    def draw(self, run: RunState, now: float) -> None:
        """Print new lines above the board and draw it anew, unless the terminal stands still."""
        self.out.flush()
        if now < self.draw_at or self.out.waiting:
            return
        began = time.perf_counter()
        self._collect()
        self._print()
        self.live.update(self._board(run, now), refresh=True)
        self.out.flush()
        self.draw_at = now + max(DRAW_SECONDS, DRAW_SHARE * (time.perf_counter() - began))

    def finish(self, result: Result) -> None:
        """The traceback, the results, and one last line."""
        self._collect(everything=True)
        self._print()
        if result.traceback:
            trace = "\n".join(clean(line) for line in result.traceback.splitlines())
            self.console.print(Padding(Text(trace, style="red"), (1, 0, 0, 2)), soft_wrap=True)
        table = Table.grid(padding=(0, 3))
        for name, value in summary(result):
            table.add_row(Text(f"  {name}", style="dim"), Text(value, style="bold"))
        self.console.print()
        self.console.print(table, soft_wrap=True)
        self.console.print()
        good = result.verdict == "done"
        head = ("✔ ", "bold green") if good else ("✘ ", "bold red")
        self.console.print(Text.assemble(head, (last_line(result), "bold")), soft_wrap=True)
        self.out.flush_within(STALL_SECONDS)

    def _collect(self, everything: bool = False) -> None:
        """Keep the newest lines for the next drawing, and count the others."""
        for item in self.merger.take(time.monotonic(), everything):
            if isinstance(item, Line):
                self.lines.append(item)
            else:
                self.skipped[item.sources] += item.count
            if len(self.lines) > LINES_KEPT:
                self.skipped[self.lines.popleft().sources] += 1

    def _print(self) -> None:
        lines = [
            self._start(line.sources)
            + Text(line.text, style="yellow" if line.sources[0].stream == "err" else "")
            for line in self.lines
        ] + [
            self._start(sources) + Text(f"({count:,} lines, see the logs)", style="dim")
            for sources, count in self.skipped.items()
        ]
        self.lines.clear()
        self.skipped.clear()
        if lines:
            self.console.print(Text("\n").join(lines), soft_wrap=True)

    def _start(self, sources: tuple[LogSource, ...]) -> Text:
        """Return the prefix of a line in its host's colour."""
        who = line_prefix(self.plan, sources)
        colour = COLOURS[(sources[0].rank or 0) % len(COLOURS)] if len(sources) == 1 else "bold"
        return Text.assemble((who, colour), (" │ " if who else "", "bright_black"))

    # -- the board

    def _board(self, run: RunState, now: float) -> RenderableType:
        parts = [self._head(run, now)]
        if run.ranks[0].phase:
            parts.append(progress_bar(run.ranks[0], now, self.console.width))
        return Padding(Group(*parts, Text(), self._hosts(run)), (1, 1, 0, 1))

    def _head(self, run: RunState, now: float) -> RenderableType:
        ranks, hosts = self.plan.world_size, len(self.plan.hosts)
        where = f"{plural(ranks, 'rank')} on {plural(hosts, 'host')}"
        line = Table.grid(Column(ratio=1), Column(justify="right"), expand=True)
        line.add_row(
            Text.assemble((self.name, "bold cyan"), ("  ·  ", "dim"), where),
            Text(duration(now - run.started_at), style="dim"),
        )
        return line

    def _hosts(self, run: RunState) -> RenderableType:
        room = max(3, self.console.height - 8)
        rest = run.hosts[room:]
        cells = self._cells(run)
        has_words = cells[-1].name == "last line"  # which take all the room that is left
        table = Table(
            box=HEAD_LINE,
            expand=has_words,
            header_style="dim",
            border_style="bright_black",
            show_edge=False,
            pad_edge=False,
        )
        for cell in cells:
            table.add_column(cell.name, no_wrap=True, justify=cell.justify)
        table.columns[-1].ratio = 1 if has_words else None
        for host in run.hosts[:room]:
            table.add_row(*(cell.show(run, host) for cell in cells))
        if not rest:
            return table
        states = Counter(state_of(run, host) for host in rest)
        words = ", ".join(f"{count} {state}" for state, count in states.items())
        return Group(table, Text(f"and {plural(len(rest), 'host')} more: {words}", style="dim"))

    def _cells(self, run: RunState) -> list[Cell]:
        """The columns for which the terminal is wide enough."""
        gpus = any(host.usage and host.usage.gpus for host in run.hosts)
        cells = (
            Cell("host", 0, lambda run, host: Text(host.plan.name, style="bold"), "left"),
            Cell("state", 0, state, "left"),
            Cell("step", 45, step),
            Cell("loss", 55, loss),
            Cell("images/s", 65, speed),
            Cell("cpu", 76, cpu),
            Cell("memory", 88, memory),
            Cell("gpu", 104 if gpus else NEVER, gpu),
            Cell("last line", 118 if gpus else 100, self._last_line, "left"),
        )
        return [cell for cell in cells if cell.width <= self.console.width]

    def _last_line(self, run: RunState, host: HostState) -> Text:
        return Text(self.merger.last.get(host.plan.node, ""), style="dim", overflow="ellipsis")


@dataclass(frozen=True)
class Cell:
    """A column of the board, for terminals of so many characters and more."""

    name: str
    width: int
    show: Callable[[RunState, HostState], Text]
    justify: Literal["left", "right"] = "right"


def progress_bar(rank: RankState, now: float, width: int) -> RenderableType:
    """The epoch, how far it is, and what the first rank measured in it."""
    done, total = within_epoch(rank)
    bar = ProgressBar(
        total=total or None,
        completed=done if rank.phase == "train" else total,
        pulse=not total,
        complete_style="cyan",
        finished_style="green",
    )
    columns = Column(), Column(ratio=1), Column(justify="right", no_wrap=True)
    grid = Table.grid(*columns, expand=True, padding=(0, 2))
    words = measures(rank, now)
    while words and sum(map(len, words)) + 3 * len(words) > width - BAR_WIDTH:
        words.pop(-2 if len(words) > 1 else -1)  # the time left goes last
    grid.add_row(Text(epoch(rank), style="bold"), bar, Text("   ".join(words)))
    return grid


def within_epoch(rank: RankState) -> tuple[int, int]:
    """Steps done and steps in all of this epoch; an evaluation counts its own in between."""
    total = whole(rank, "epoch_steps")
    return rank.step - max(0, whole(rank, "epoch") - 1) * total, total


def whole(rank: RankState, name: str) -> int:
    """A reported whole number; 0 when there is none."""
    value = rank.fields.get(name)
    return value if isinstance(value, int) else 0


def epoch(rank: RankState) -> str:
    """Return the epoch and the number of epochs."""
    if "epoch" not in rank.fields:
        return BUSY["start"]
    return f"epoch {rank.fields['epoch']}/{rank.fields.get('epochs', '?')}"


def measures(rank: RankState, now: float) -> list[str]:
    """Step, loss, accuracy, speed and time left, as far as they are known."""
    done, total = within_epoch(rank)
    where = f"{done}/{total}" if total else ""
    left = rank.seconds_left(now)
    words = (
        where if rank.phase == "train" else BUSY.get(rank.phase, "finishing"),
        number(rank, "loss", "loss {:.4f}"),
        number(rank, "accuracy", "accuracy {:.1%}"),
        number(rank, "images_per_second", "{:,.0f} images/s"),
        "" if left is None else f"{duration(left)} left",
    )
    return [word for word in words if word]


def state(run: RunState, host: HostState) -> Text:
    """The state of a host, in its colour."""
    word = state_of(run, host)
    usual = "yellow" if word.startswith("slow") else "green"
    return Text(f"● {word}", style=STYLES.get(word, usual))


def state_of(run: RunState, host: HostState) -> str:
    """Return the state of a host in a word."""
    if host.frozen:
        return "stopped"
    if host.state != "running":
        return host.state
    phases = {rank.phase for rank in run.ranks_of(host.plan.node) if rank.running}
    busy = [word for phase, word in BUSY.items() if phase in phases]
    word = busy[0] if busy else "finishing" if "done" in phases else "running"
    if word == BUSY["train"] and run.slow and run.slow_host is host:
        return f"slow {run.slow.why}"
    return word


def step(run: RunState, host: HostState) -> Text:
    """Return the step of the slowest rank of a host."""
    steps = slowest(run, host).step
    return Text(f"{steps:,}" if steps else "")


def loss(run: RunState, host: HostState) -> Text:
    """The loss of that rank."""
    return Text(number(slowest(run, host), "loss", "{:.4f}"))


def slowest(run: RunState, host: HostState) -> RankState:
    """The rank of a host with the fewest steps."""
    return min(run.ranks_of(host.plan.node), key=lambda rank: rank.step)


def speed(run: RunState, host: HostState) -> Text:
    """The share of a host in the images per second that its ranks report for all."""
    speeds = [rank.fields.get("images_per_second") for rank in run.ranks_of(host.plan.node)]
    total = sum(speed for speed in speeds if isinstance(speed, int | float))
    return Text(f"{total / run.plan.world_size:,.0f}" if total else "")


def number(rank: RankState, name: str, form: str) -> str:
    """A reported number in its form; empty when there is none."""
    value = rank.fields.get(name)
    return form.format(value) if isinstance(value, int | float) else ""


def cpu(run: RunState, host: HostState) -> Text:
    """Return CPU utilization as a meter and percent."""
    if host.usage is None:
        return Text()
    full = round(host.usage.cpu * METER_WIDTH)
    meter = ("━" * full, "cyan"), ("━" * (METER_WIDTH - full), "bright_black")
    return Text.assemble(*meter, f" {host.usage.cpu:4.0%}")


def memory(run: RunState, host: HostState) -> Text:
    """Used of all, in GB."""
    if host.usage is None:
        return Text()
    used, total = host.usage.memory / 1e9, host.usage.memory_total / 1e9
    return Text(f"{used:.1f}/{total:.0f} GB", style="red" if used > 0.95 * total else "")


def gpu(run: RunState, host: HostState) -> Text:
    """Return the mean GPU utilization of a host, and the memory of its fullest GPU."""
    gpus = host.usage.gpus if host.usage else ()
    if not gpus:
        return Text()
    busy = sum(gpu.busy for gpu in gpus) / len(gpus)
    full = max(gpu.memory / max(1, gpu.memory_total) for gpu in gpus)
    return Text(f"{len(gpus)}x {busy:.0f}%  {full:.0%} mem")
