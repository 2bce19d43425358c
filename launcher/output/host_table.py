"""The table of hosts on the dashboard; if it is too wide, the least needed columns are left out."""

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

HEAD_LINE = box.Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
GAP = 3  # between two columns
MARGIN = 4  # left and right of the table
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
    columns = [c for c in COLUMNS if not c.need or any(c.show(host).plain for host in hosts)]
    names = max((cell_len(host.name) for host in hosts), default=0)

    def taken() -> int:
        return sum(column.width + GAP for column in columns) - GAP + names + MARGIN

    while taken() > width and (needless := max(columns, key=lambda column: column.need)).need:
        columns.remove(needless)
    has_line = columns[-1].name == LAST_LINE  # which takes all the room that is left
    table = Table(
        box=HEAD_LINE,
        expand=has_line,
        header_style="dim",
        border_style="bright_black",
        show_edge=False,
        pad_edge=False,
    )
    for column in columns:
        ratio = 1 if column.name == LAST_LINE else None
        table.add_column(column.name, no_wrap=True, justify=column.justify, ratio=ratio)
    for host in hosts:
        table.add_row(*(column.show(host) for column in columns))
    return table


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


def _number(value: float | None, form: str) -> Text:
    return Text(form.format(value) if value else "")


def _cpu(host: HostView) -> Text:
    return Text("" if host.usage is None else f"{host.usage.cpu:.0%}")


def _memory(host: HostView) -> Text:
    if host.usage is None:
        return Text()
    used, total = host.usage.memory, host.usage.memory_total
    return Text(used_of(used, total), style="red" if used > 0.95 * total else "")


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
    is_slowed = any(gpu.slowed for gpu in gpus)
    return Text(" ".join(filter(None, texts)), style="bold red" if is_slowed else "")


LAST_LINE = "last line"
COLUMNS = (
    HostColumn("host", 0, 0, lambda host: Text(host.name, style="bold"), "left"),
    HostColumn("state", 12, 0, _state, "left"),
    HostColumn("step", 7, 2, lambda host: _number(host.step, "{:,}")),
    HostColumn("gpu", 22, 1, _gpus),
    HostColumn("share", 6, 6, lambda host: _number(host.share, "{:.1%}")),
    HostColumn("cpu", 4, 3, _cpu),
    HostColumn("memory", 12, 5, _memory),
    HostColumn("heat", 12, 7, _heat),
    HostColumn(LAST_LINE, 16, 6, lambda host: Text(host.last_line, style="dim"), "left"),
)
