"""The board: a live view of a run on a terminal. The only file of the launcher that knows rich.

A row per host, a bar for the epoch, and the merged log of all ranks scrolling above them.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterable
from contextlib import AbstractContextManager

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from launcher.events import Event, Output, RankEnded, Usage
from launcher.lines import Line, Merger, Shown, clean
from launcher.patient import STALL_SECONDS, Patient
from launcher.plan import Plan
from launcher.result import Result
from launcher.screen import clock, last_line, prefix, summary
from launcher.state import Host, Rank, Run

DRAW_SECONDS = 0.25
DRAW_SHARE = 20  # drawing takes one part in so many of the launcher's time
SAMPLES = 8
SPARKS = "▁▂▃▄▅▆▇█"
COLOURS = ("cyan", "magenta", "green", "blue", "yellow", "bright_magenta")
BUSY = {"start": "loading", "train": "training", "evaluate": "evaluating", "save": "saving"}
STYLES = {"connecting": "yellow", "starting": "yellow", "loading": "yellow", "stopping": "yellow"}
STYLES |= {"clean": "dim", "done": "green", "finishing": "green"}
STYLES |= {"lost": "bold red", "stopped": "bold red", "not clean": "bold red"}
STYLES |= {"not verified": "bold red"}


class Board(AbstractContextManager["Board"]):
    """Draws a run on a terminal, and leaves the terminal as it was."""

    def __init__(self, plan: Plan, name: str) -> None:
        """`name` is what runs, for the head of the board."""
        self.plan = plan
        self.name = name
        self.out = Patient(1)
        self.console = Console(file=self.out, force_terminal=True, highlight=False)  # type: ignore[arg-type]
        self.live = Live(
            console=self.console,
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self.merger = Merger(fold=plan.world_size > 1)
        self.busy = {host.node: deque[float](maxlen=SAMPLES) for host in plan.hosts}
        self.draw_at = 0.0

    def __enter__(self) -> Board:
        self.live.start()
        return self

    def __exit__(self, *reason: object) -> None:
        self.live.stop()
        self.out.flush_within(STALL_SECONDS)

    @property
    def gone(self) -> bool:
        """Whether the terminal was closed."""
        return self.out.gone

    def show(self, event: Event) -> None:
        """Take output and usage; the traceback of a rank that failed is left for the end."""
        if isinstance(event, Output) and event.rank is not None:
            self.merger.feed(event)
        elif isinstance(event, RankEnded) and event.exit_code:
            self.merger.forget(event.rank)
        elif isinstance(event, Usage):
            self.busy[event.node].append(event.cpu)

    def note(self, text: str) -> None:
        """A line of our own among those of the ranks."""
        self.console.print(Text.assemble(("rackrun: ", "bold cyan"), text), soft_wrap=True)
        self.out.flush()

    def draw(self, run: Run, now: float) -> None:
        """Print new lines above the board and draw it anew, unless the terminal stands still."""
        self.out.flush()
        if now < self.draw_at or self.out.waiting:
            return
        began = time.perf_counter()
        self._print(self.merger.take(now))
        self.live.update(self._board(run, now), refresh=True)
        self.out.flush()
        self.draw_at = now + max(DRAW_SECONDS, DRAW_SHARE * (time.perf_counter() - began))

    def finish(self, result: Result) -> None:
        """The traceback, the results, and one last line."""
        self._print(self.merger.take(time.monotonic(), everything=True))
        if result.traceback:
            trace = "\n".join(clean(line) for line in result.traceback.splitlines())
            self.console.print(Padding(Text(trace, style="red"), (1, 0, 1, 2)), soft_wrap=True)
        table = Table.grid(padding=(0, 3))
        for name, value in summary(result):
            table.add_row(Text(f"  {name}", style="dim"), Text(value, style="bold"))
        self.console.print()
        self.console.print(table, soft_wrap=True)
        self.console.print()
        good = result.verdict == "done"
        head = Text("✔ " if good else "✘ ", style="bold green" if good else "bold red")
        self.console.print(head + Text(last_line(result)), soft_wrap=True)
        self.out.flush_within(STALL_SECONDS)

    def _print(self, shown: Iterable[Shown]) -> None:
        lines = [self._line(item) for item in shown]
        if lines:
            self.console.print(Text("\n").join(lines), soft_wrap=True)

    def _line(self, item: Shown) -> Text:
        start = prefix(self.plan, item.sources)
        source = item.sources[0]
        colour = COLOURS[(source.rank or 0) % len(COLOURS)] if len(item.sources) == 1 else "bold"
        if isinstance(item, Line):
            style = "yellow" if source.stream == "err" else ""
            return Text.assemble((start, colour), (item.text, style))
        return Text.assemble((start, colour), (f"({item.count:,} lines, see the logs)", "dim"))

    # -- the board

    def _board(self, run: Run, now: float) -> RenderableType:
        parts = [Text(), self._head(run, now)]
        first = run.ranks[0]
        if first.phase:
            parts.append(progress_bar(first, now, self.console.width))
        parts.append(self._hosts(run))
        return Group(*parts)

    def _head(self, run: Run, now: float) -> RenderableType:
        ranks, hosts = self.plan.world_size, len(self.plan.hosts)
        where = f"{plural(ranks, 'rank')} on {plural(hosts, 'host')}"
        line = Table.grid(Column(ratio=1), Column(justify="right"), expand=True)
        line.add_row(
            Text.assemble((self.name, "bold cyan"), ("  ·  ", "dim"), where),
            Text(clock(now - run.started_at), style="dim"),
        )
        return line

    def _hosts(self, run: Run) -> RenderableType:
        room = max(3, self.console.height - 8)
        shown, rest = run.hosts[:room], run.hosts[room:]
        gpus = any(host.usage and host.usage.gpus for host in run.hosts)
        wide = self.console.width >= 100
        table = Table(box=box.SIMPLE_HEAD, expand=True, header_style="dim", pad_edge=False)
        for name in ("host", "state"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "loss", "images/s", "cpu", "memory", *(["gpu"] if gpus else [])):
            table.add_column(name, no_wrap=True, justify="right")
        if wide:
            table.add_column("last line", ratio=1, no_wrap=True, overflow="ellipsis")
        for host in shown:
            table.add_row(*self._row(run, host, gpus, wide))
        if not rest:
            return table
        states = Counter(state_of(run, host) for host in rest)
        words = ", ".join(f"{count} {state}" for state, count in states.items())
        return Group(table, Text(f"and {plural(len(rest), 'host')} more: {words}", style="dim"))

    def _row(self, run: Run, host: Host, gpus: bool, wide: bool) -> list[RenderableType]:
        state = state_of(run, host)
        rank = min(run.ranks_of(host.plan.node), key=lambda rank: rank.step)
        cells: list[RenderableType] = [
            Text(host.plan.name, style="bold"),
            Text(f"● {state}", style=STYLES.get(state, "green")),
            Text(f"{rank.step:,}" if rank.step else ""),
            Text(number(rank, "loss", "{:.4f}")),
            Text(number(rank, "images_per_second", "{:,.0f}")),
            self._cpu(host),
            memory(host),
        ]
        if gpus:
            cells.append(gpu(host))
        if wide:
            cells.append(Text(self.merger.last.get(host.plan.node, ""), style="dim"))
        return cells

    def _cpu(self, host: Host) -> Text:
        """The last samples as a line of bars, and the newest in percent."""
        samples = self.busy[host.plan.node]
        if not samples:
            return Text()
        sparks = "".join(SPARKS[min(7, int(sample * 8))] for sample in samples)
        return Text.assemble((sparks, "cyan"), f" {samples[-1]:4.0%}")


def progress_bar(rank: Rank, now: float, width: int) -> RenderableType:
    """The epoch, how far it is, and what the first rank measured in it."""
    fields = rank.fields
    done, total = fields.get("epoch_step"), fields.get("epoch_steps")
    grid = Table.grid(
        Column(), Column(ratio=1), Column(justify="right"), expand=True, padding=(0, 2)
    )
    bar = ProgressBar(
        total=total if isinstance(total, int) else None,
        completed=done if isinstance(done, int) else 0,
        pulse=not isinstance(total, int),
        complete_style="cyan",
        finished_style="green",
    )
    epoch = f"epoch {fields['epoch']}/{fields.get('epochs', '?')}" if "epoch" in fields else "start"
    grid.add_row(Text(epoch, style="bold"), bar, measures(rank, now))
    return grid


def measures(rank: Rank, now: float) -> Text:
    """Step, loss, accuracy, speed and time left, as far as they are known."""
    fields = rank.fields
    words = []
    if isinstance(fields.get("epoch_step"), int) and isinstance(fields.get("epoch_steps"), int):
        words.append(f"{fields['epoch_step']}/{fields['epoch_steps']}")
    words.append(number(rank, "loss", "loss {:.4f}"))
    words.append(number(rank, "accuracy", "accuracy {:.1%}"))
    words.append(number(rank, "images_per_second", "{:,.0f} images/s"))
    left = rank.seconds_left(now)
    words.append("" if left is None else f"{clock(left)} left")
    return Text("   ".join(word for word in words if word))


def state_of(run: Run, host: Host) -> str:
    """What a host is doing, in a word."""
    if host.frozen:
        return "stopped"
    if host.state != "running":
        return host.state
    phases = {rank.phase for rank in run.ranks_of(host.plan.node) if rank.running}
    busy = [word for phase, word in BUSY.items() if phase in phases]
    return busy[0] if busy else "finishing" if "done" in phases else "running"


def number(rank: Rank, name: str, form: str) -> str:
    """A reported number in its form; empty when there is none."""
    value = rank.fields.get(name)
    return form.format(value) if isinstance(value, int | float) else ""


def memory(host: Host) -> Text:
    """Used of all, in GB."""
    if host.usage is None:
        return Text()
    used, total = host.usage.memory / 1e9, host.usage.memory_total / 1e9
    return Text(f"{used:.1f}/{total:.0f} GB", style="red" if used > 0.95 * total else "")


def gpu(host: Host) -> Text:
    """How busy the GPUs of a host are on average, and the memory of the fullest."""
    gpus = host.usage.gpus if host.usage else ()
    if not gpus:
        return Text()
    busy = sum(gpu.busy for gpu in gpus) / len(gpus)
    full = max(gpu.memory / max(1, gpu.memory_total) for gpu in gpus)
    return Text(f"{len(gpus)}x {busy:.0f}%  {full:.0%} mem")


def plural(count: int, noun: str) -> str:
    """1 host, 2 hosts."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
