"""The table of hosts on the dashboard: columns that are empty go first, then the less needed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from rackrun.launcher.output.run_view import BROKEN, WAITED_FOR, HostView
from rackrun.launcher.run.events import Gpu
from rackrun.units import plural, used_of

METER_WIDTH = 6
HEAD_LINE = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
GAP = 3  # between two columns
MARGIN = 4  # left and right of the table
LINE_WIDTH = 16  # of the last line, at least
ODD_PERCENT = 25  # a GPU so far from the median is shown by itself
STYLES = {"stopping": "yellow", "connecting": "yellow", "starting": "yellow", "loading": "yellow"}
STYLES |= {"clean": "dim", "done": "green", "finishing": "green"}


@dataclass(frozen=True)
class HostColumn:
    """A column of the table."""

    name: str
    width: int
    """What it takes on the screen, however long its cells are at the moment."""
    need: int
    """The greater, the sooner it gives way on a narrow terminal; 0: never."""
    show: Callable[[HostView], Text]
    justify: Literal["left", "right"] = "right"


def host_table(hosts: Sequence[HostView], width: int) -> Table:
    """Return the table of these hosts for a terminal of this width."""
    fitting = _fitting_columns(COLUMNS, hosts, width)
    has_line = fitting[-1].name == "last line"  # which takes all the room that is left
    table = Table(
        box=HEAD_LINE,
        expand=has_line,
        header_style="dim",
        border_style="bright_black",
        show_edge=False,
        pad_edge=False,
    )
    for column in fitting:
        ratio = 1 if column.name == "last line" else None
        table.add_column(column.name, no_wrap=True, justify=column.justify, ratio=ratio)
    for host in hosts:
        table.add_row(*(column.show(host) for column in fitting))
    return table


def _fitting_columns(
    columns: Sequence[HostColumn], hosts: Sequence[HostView], width: int
) -> list[HostColumn]:
    fitting = [c for c in columns if not c.need or any(c.show(host).plain for host in hosts)]
    names = max((cell_len(host.name) for host in hosts), default=0)
    while True:
        taken = sum(column.width + GAP for column in fitting) + names
        needless = max(fitting, key=lambda column: column.need)
        if taken - GAP + MARGIN <= width or not needless.need:
            return fitting
        fitting.remove(needless)


def folded(hosts: Sequence[HostView]) -> str:
    """Return how many hosts have no row, and their states, in a line."""
    states = Counter(host.state for host in hosts)
    text = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"and {plural(len(hosts), 'host')} more: {text}"


def _state(host: HostView) -> Text:
    if host.urgency == BROKEN:
        return Text(f"● {host.state}", style="bold red")
    usual = "yellow" if host.urgency == WAITED_FOR else "green"
    return Text(f"● {host.state}", style=STYLES.get(host.state, usual))


def _last_line(host: HostView) -> Text:
    return Text(host.last_line, style="dim", overflow="ellipsis")


def _number(value: float | None, form: str) -> Text:
    return Text("" if value is None else form.format(value))


def _cpu(host: HostView) -> Text:
    if host.usage is None:
        return Text()
    full = round(host.usage.cpu * METER_WIDTH)
    meter = ("━" * full, "cyan"), ("━" * (METER_WIDTH - full), "bright_black")
    return Text.assemble(*meter, f" {host.usage.cpu:4.0%}")


def _memory(host: HostView) -> Text:
    if host.usage is None:
        return Text()
    used, total = host.usage.memory, host.usage.memory_total
    return Text(used_of(used, total), style="red" if used > 0.95 * total else "")


def _network(host: HostView) -> Text:
    usage = host.usage
    if usage is None or not usage.received + usage.sent:
        return Text()
    return Text(f"↓{usage.received / 1e6:,.0f} ↑{usage.sent / 1e6:,.0f} MB/s")


def _gpus(host: HostView) -> Text:
    gpus = host.usage.gpus if host.usage else ()
    if not gpus:
        return Text()
    # 7x 97%: GPUs about as busy as most are, together; those that are not stand out in red
    most = statistics.median_high(gpu.busy for gpu in gpus)
    odd = [gpu for gpu in gpus if abs(gpu.busy - most) > ODD_PERCENT]
    usual = [gpu for gpu in gpus if gpu not in odd]
    full = max(gpu.memory / max(1, gpu.memory_total) for gpu in gpus)
    return Text.assemble(
        _mean_busy(usual),
        (f" {_mean_busy(odd)}" if odd else "", "bold red"),
        (f"  {full:.0%} mem", "dim"),
    )


def _mean_busy(gpus: Sequence[Gpu]) -> str:
    return f"{len(gpus)}x {statistics.fmean(gpu.busy for gpu in gpus):.0f}%"


def _heat(host: HostView) -> Text:
    gpus = host.usage.gpus if host.usage else ()
    hottest = max((gpu.temperature for gpu in gpus), default=0)
    strongest = max((gpu.power for gpu in gpus), default=0)
    texts = (f"{hottest} °C" if hottest else "", f"{strongest:,} W" if strongest else "")
    return Text(
        " ".join(filter(None, texts)), style="bold red" if any(gpu.slowed for gpu in gpus) else ""
    )


COLUMNS = (
    HostColumn("host", 0, 0, lambda host: Text(host.name, style="bold"), "left"),
    HostColumn("state", 12, 0, _state, "left"),
    HostColumn("step", 7, 2, lambda host: _number(host.step or None, "{:,}")),
    HostColumn("gpu", 22, 1, _gpus),
    HostColumn("images/s", 8, 4, lambda host: _number(host.images_per_second or None, "{:,.0f}")),
    HostColumn("share", 6, 6, lambda host: _number(host.share, "{:.1%}")),
    HostColumn("cpu", METER_WIDTH + 5, 3, _cpu),
    HostColumn("memory", 12, 5, _memory),
    HostColumn("heat", 12, 7, _heat),
    HostColumn("loss", 7, 8, lambda host: _number(host.loss, "{:.4f}")),
    HostColumn("network", 17, 9, _network),
    HostColumn("last line", LINE_WIDTH, 6, _last_line, "left"),
)
