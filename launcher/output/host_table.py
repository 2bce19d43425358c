"""The table of hosts on the dashboard: columns that are empty go first, then the less needed."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from launcher.output.run_view import BROKEN, WAITED_FOR, HostView
from launcher.run.events import Gpu
from rackrun.light_dataclass import dataclass
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


def host_table(hosts: Sequence[HostView], width: int, last_lines: Mapping[int, str]) -> Table:
    """Return the table of these hosts for a terminal of this width."""

    def last_line(host: HostView) -> Text:
        return Text(last_lines.get(host.node, ""), style="dim", overflow="ellipsis")

    columns = (*COLUMNS, HostColumn("last line", LINE_WIDTH, 6, last_line, "left"))
    fitting = _fitting_columns(columns, hosts, width)
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
    """Return the columns that have something in them and for which there is room."""
    fitting = [c for c in columns if not c.need or any(c.show(host).plain for host in hosts)]
    names = max((cell_len(host.name) for host in hosts), default=0)
    while True:
        taken = sum(column.width + GAP for column in fitting) + names
        needless = max(fitting, key=lambda column: column.need)
        if taken - GAP + MARGIN <= width or not needless.need:
            return fitting
        fitting.remove(needless)


def folded(hosts: Sequence[HostView]) -> str:
    """Return the hosts for which there is no row, in a line."""
    states = Counter(host.state for host in hosts)
    text = ", ".join(f"{count} {state}" for state, count in states.items())
    return f"and {plural(len(hosts), 'host')} more: {text}"


def state(host: HostView) -> Text:
    """Return the state of a host in its colour."""
    if host.urgency == BROKEN:
        return Text(f"● {host.state}", style="bold red")
    usual = "yellow" if host.urgency == WAITED_FOR else "green"
    return Text(f"● {host.state}", style=STYLES.get(host.state, usual))


def step(host: HostView) -> Text:
    """Return the step of the slowest rank."""
    return Text(f"{host.step:,}" if host.step else "")


def loss(host: HostView) -> Text:
    """Return the loss of that rank."""
    return Text("" if host.loss is None else f"{host.loss:.4f}")


def speed(host: HostView) -> Text:
    """Return the images per second."""
    return Text(f"{host.images_per_second:,.0f}" if host.images_per_second else "")


def share(host: HostView) -> Text:
    """Return its share of the images of a step, where ranks get them by speed."""
    return Text("" if host.share is None else f"{host.share:.1%}")


def cpu(host: HostView) -> Text:
    """Return CPU utilization as a meter and percent."""
    if host.usage is None:
        return Text()
    full = round(host.usage.cpu * METER_WIDTH)
    meter = ("━" * full, "cyan"), ("━" * (METER_WIDTH - full), "bright_black")
    return Text.assemble(*meter, f" {host.usage.cpu:4.0%}")


def memory(host: HostView) -> Text:
    """Return used and total memory."""
    if host.usage is None:
        return Text()
    used, total = host.usage.memory, host.usage.memory_total
    return Text(used_of(used, total), style="red" if used > 0.95 * total else "")


def network(host: HostView) -> Text:
    """Return what a host receives and sends."""
    usage = host.usage
    if usage is None or not usage.received + usage.sent:
        return Text()
    return Text(f"↓{usage.received / 1e6:,.0f} ↑{usage.sent / 1e6:,.0f} MB/s")


def data(host: HostView) -> Text:
    """Return how much of the data came from the own cache, from peers, and from the origin."""
    total = sum(host.read.values())
    return Text("/".join(f"{count / total:.0%}" for count in host.read.values()) if total else "")


def gpu(host: HostView) -> Text:
    """Return GPU utilization, odd GPUs by themselves, and the memory of the fullest one."""
    gpus = host.usage.gpus if host.usage else ()
    if not gpus:
        return Text()
    usual, odd = _split_odd(gpus)
    full = max(gpu.memory / max(1, gpu.memory_total) for gpu in gpus)
    return Text.assemble(
        _busy_words(usual),
        *((f" {_busy_words(odd)}", "bold red") for _ in odd[:1]),
        (f"  {full:.0%} mem", "dim"),
    )


def heat(host: HostView) -> Text:
    """Return the highest temperature and power of its GPUs, red where one is slowed down."""
    gpus = host.usage.gpus if host.usage else ()
    hottest = max((gpu.temperature for gpu in gpus), default=0)
    strongest = max((gpu.power for gpu in gpus), default=0)
    texts = (f"{hottest} °C" if hottest else "", f"{strongest:,} W" if strongest else "")
    return Text(
        " ".join(filter(None, texts)), style="bold red" if any(gpu.slowed for gpu in gpus) else ""
    )


def _split_odd(gpus: Sequence[Gpu]) -> tuple[list[Gpu], list[Gpu]]:
    """Return the GPUs that are about as busy as most are, and the others."""
    most = statistics.median_high(gpu.busy for gpu in gpus)
    odd = [gpu for gpu in gpus if abs(gpu.busy - most) > ODD_PERCENT]
    return [gpu for gpu in gpus if gpu not in odd], odd


def _busy_words(gpus: Sequence[Gpu]) -> str:
    """Return how many GPUs there are and how busy they are in the mean: 7x 97%."""
    return f"{len(gpus)}x {statistics.fmean(gpu.busy for gpu in gpus):.0f}%"


COLUMNS = (
    HostColumn("host", 0, 0, lambda host: Text(host.name, style="bold"), "left"),
    HostColumn("state", 12, 0, state, "left"),
    HostColumn("step", 7, 2, step),
    HostColumn("gpu", 22, 1, gpu),
    HostColumn("images/s", 8, 4, speed),
    HostColumn("share", 6, 6, share),
    HostColumn("cpu", METER_WIDTH + 5, 3, cpu),
    HostColumn("memory", 12, 5, memory),
    HostColumn("heat", 12, 7, heat),
    HostColumn("loss", 7, 8, loss),
    HostColumn("network", 17, 9, network),
    HostColumn("cache/peers/origin", 18, 10, data),
)
