"""The board by itself, drawn from events: every size of cluster and terminal."""

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from rackrun.launcher.output.dashboard import Dashboard
from rackrun.launcher.output.run_view import view
from rackrun.launcher.run.events import (
    Event,
    Gpu,
    Lost,
    Opened,
    Output,
    RankEnded,
    RankStarted,
    Report,
    Usage,
)
from rackrun.launcher.run.job import Work
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.state import RunState
from rackrun.run_folder import RunFolder
from tests.lab.run import Terminal
from tests.unit import planned


def plan_of(hosts: int, slots: int = 1, model: str = "", work: Work = planned.PROGRAM) -> Plan:
    names = [f"gpu{n:03}" for n in range(1, hosts + 1)]
    return planned.plan_of(*names, slots=slots, work=work, gpus=bool(model), gpu_model=model)


def training(node: int, rank: int, **fields: object) -> Report:
    return Report(node, rank, {"rank": rank, "phase": "train", **fields})


class Stage:
    """A board on a terminal of our own, fed with events, half a second before each look."""

    def __init__(self, plan: Plan, columns: int, lines: int) -> None:
        self.terminal = Terminal(columns, lines)
        self.now = time.monotonic()
        self.run = RunState(plan, self.now)
        stream = os.fdopen(os.dup(self.terminal.theirs), "w")
        self.board = Dashboard(Console(file=stream, force_terminal=True, highlight=False))
        self.lines: dict[int, str] = {}

    def play(self, *events: Event) -> str:
        self.now += 0.5
        for event in events:
            self.run.take(event, self.now)
            if isinstance(event, Output):
                self.lines[event.node] = event.data.decode().strip()
        folder = RunFolder(Path("/x"))
        self.board.draw(view(self.run, "catdog", folder, self.now, self.lines))
        return self.terminal.text()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Stage]]:
    """Yield dashboards on the terminal of the test."""
    made: list[Stage] = []

    class Here(Stage):
        def __init__(self, plan: Plan, columns: int = 120, lines: int = 30) -> None:
            monkeypatch.setenv("COLUMNS", str(columns))
            monkeypatch.setenv("LINES", str(lines))
            super().__init__(plan, columns, lines)
            self.board.__enter__()
            made.append(self)

    yield Here
    for one in made:
        one.board.__exit__()
        one.board.console.file.close()


def test_a_row_shows_all_about_a_host(stage):
    """State, step, its share of the images, CPU, memory, GPUs, the last line."""
    display = stage(plan_of(2), 160)
    shown = display.play(
        Opened(0, 1),
        RankStarted(0, 0, 5),
        RankStarted(1, 1, 5),
        training(0, 0, step=7, steps=100, epoch=1, epochs=5, epoch_step=7, epoch_steps=20,
                 loss=0.51234, accuracy=0.75, images_per_second=5000.0),
        Usage(0, 0.5, 8 * 10**9, 64 * 10**9, (Gpu(90, 30_000, 80_000), Gpu(70, 60_000, 80_000)),
              2 * 10**9, 10**6),
        Output(0, 0, "out", b"a line\n"),
    )  # fmt: skip
    row = next(line for line in shown.splitlines() if line.strip().startswith("gpu001"))
    for cell in ("● training", "7", "50%", "8.0/64 GB", "2x 80%  75% mem"):
        assert cell in row
    assert row.rstrip().endswith("a line")
    for text in ("epoch 1/5", "7/20", "loss 0.5123", "accuracy 75.0%", "5,000 images/s"):
        assert text in shown


def busy(node: int, *gpus: int) -> Usage:
    """Return a host whose GPUs are this busy, in percent."""
    percent = tuple(Gpu(busy, 60_000, 80_000) for busy in gpus)
    return Usage(node, 0.35, 8 * 10**9, 64 * 10**9, percent)


def test_a_cluster_of_gpus_on_80_columns(stage):
    """GPUs come before the CPU, one idle GPU of eight shows, and so does where the run is."""
    display = stage(plan_of(2, 8, model="H100 80GB\x1b[2J"), 80, 24)
    step = {"epochs": 16, "epoch_steps": 100, "steps": 1600}
    display.play(training(0, 0, epoch=2, step=110, **step))
    fields = {"epoch": 2, "step": 150, "images_per_second": 9000.0, "best": 0.615, **step}
    fields["dataset"] = "flowers, 10 images"
    shown = display.play(
        *(RankStarted(rank // 8, rank, 5) for rank in range(16)),
        *(training(rank // 8, rank, loss=2.3, checkpoint=1100, **fields) for rank in range(16)),
        busy(0, *[97] * 8),
        busy(1, *[97] * 7, 0),
    )
    head, first, second = [line for line in shown.splitlines() if "●" in line or "state" in line]
    assert head.split() == ["host", "state", "step", "gpu", "cpu"]
    assert "8x 97%  75% mem" in first
    assert "7x 97% 1x 0%  75% mem" in second
    assert "catdog  ·  16 ranks on 2 hosts, 8 each, H100 80GB␛[2J" in shown
    assert f"run {display.run.plan.run_id[:8]}  ·  /x  ·  flowers, 10 images" in shown
    assert "loss 2.3   9,000 images/s   run ends in 0:" in shown
    assert "best validation accuracy 61.5%  ·  last checkpoint at step 1,100" in shown


@pytest.mark.parametrize(("model", "state"), [("H100", "slow heat"), ("", "training")])
def test_a_hot_gpu_is_seen(stage, model, state):
    """Temperature and power of the hottest; its host stands first as slow, if ranks use GPUs."""
    display = stage(plan_of(2, model=model), 160)
    hot = Gpu(60, 1, 2, 93, 1_000, "heat"), Gpu(97, 1, 2, 70, 400)
    shown = display.play(
        *(RankStarted(rank, rank, 5) for rank in range(2)),
        *(training(rank, rank, step=1) for rank in range(2)),
        *(Usage(node, 0.5, 1, 2, gpus) for node, gpus in enumerate((hot[1:], hot))),
    )
    rows = [line for line in shown.splitlines() if "●" in line]
    second = next(row for row in rows if "gpu002" in row)
    assert f"● {state}" in second and "93 °C 1,000 W" in second
    assert any("● training" in row and "70 °C 400 W" in row for row in rows)
    assert (rows[0] == second) is bool(model)


def test_broken_hosts_stand_first(stage):
    """Of 40 hosts on a small terminal, the lost and the failed one are on top."""
    display = stage(plan_of(40), 80, 20)
    display.play(*(RankStarted(node, node, 5) for node in range(40)))
    display.play(*(training(node, node, step=1) for node in range(40)))
    shown = display.play(Lost(39, "silent for 15 s"), RankEnded(38, 38, 1))
    rows = [line.split()[:3] for line in shown.splitlines() if line.strip().startswith("gpu")]
    assert [row[0] for row in rows[:3]] == ["gpu039", "gpu040", "gpu001"]
    assert [row[2] for row in rows[:3]] == ["failed", "lost", "training"]
    assert "hosts more: " in shown
    assert "lost" not in shown.partition("hosts more: ")[2]


def test_many_hosts_fit_a_small_terminal(stage):
    """128 hosts on 24 lines: as many rows as fit, and the rest counted by state."""
    display = stage(plan_of(128), 100, 24)
    shown = display.play(*(RankStarted(node, node, 5) for node in range(64)))
    assert "gpu065   ● connecting" in shown
    assert "114 hosts more: 50 connecting, 64 running" in " ".join(shown.split())
    assert len(shown.rstrip().splitlines()) <= 24


@pytest.mark.parametrize("columns", [20, 25, 40, 60, 80, 99, 100, 200])
def test_no_width_breaks_the_board(stage, columns):
    """On a narrow terminal columns give way; no row becomes two, or has a hole in it."""
    display = stage(plan_of(3), columns, 24)
    shown = ""
    for step in range(1, 4):
        shown = display.play(
            training(0, 0, step=step, steps=9, epoch=1, epochs=1, epoch_step=step, epoch_steps=9,
                     loss=0.5, accuracy=0.7, images_per_second=123456.0),
            Output(0, 0, "out", b"x" * 30 + b"\n"),
            Usage(0, 0.5, 8 * 10**9, 64 * 10**9),
        )  # fmt: skip
    rows = [line for line in shown.splitlines() if line.strip().startswith("gpu")]
    assert len([row for row in rows if "│" not in row]) == 3
    first = next(row for row in rows if "│" not in row)
    assert " " * 12 not in first.strip()


def test_a_host_that_holds_up_the_others_shows_in_its_row(stage):
    """Its state says by what it is slow, as long as the first rank says so."""
    display = stage(plan_of(2))
    for node in (0, 1):
        display.play(RankStarted(node, node, 5), training(node, node, step=20))
    slow = {"slow_rank": 1, "slow_why": "network", "slow": "slower than the others"}
    text = display.play(training(0, 0, step=21, **slow))
    assert re.search(r"gpu001 +● training", text)
    assert re.search(r"gpu002 +● slow network", text)
    assert "slow" not in display.play(training(0, 0, step=41, slow_rank=-1, slow=""))


@pytest.mark.parametrize("columns", [30, 80])
def test_lines_are_whole_on_a_narrow_terminal(stage, columns):
    """The terminal wraps them, so paths can be selected: no line is broken or cut before."""
    display = stage(plan_of(2), columns, 60)
    display.play(RankStarted(0, 0, 5))
    path = "/results/of a long name/" + "/".join("abcdefgh" * 2 for _ in range(5))
    lines = (f"rackrun: log: {path}", f"gpu001:0-1 x2 | {path}", path)
    display.board.show_lines("".join(f"{line}\n" for line in lines))
    display.terminal.text()
    written = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", display.terminal.bytes).decode()
    for whole in (f"rackrun: log: {path}\r\n", f"gpu001:0-1 x2 │ {path}\r\n", f"\n{path}\r\n"):
        assert whole in written


def test_lines_above_leave_the_board_whole(stage):
    """Where it is drawn with a line, its own long line is wrapped as it is without one."""
    display = stage(plan_of(1), 80, 24)
    display.play(
        training(0, 0, dataset="flowers of many gardens, 1,234,567 images in 1,000 classes")
    )
    display.board.show_lines("a line")
    _, found, after = display.terminal.text().partition("a line")
    assert found and "images in 1,000 classes" in " ".join(after.split()), after


def test_of_very_many_lines_the_newest_are_shown(stage):
    """And how many are in output.log only."""
    display = stage(plan_of(1))
    display.board.show_lines("".join(f"line {number}\n" for number in range(1502)))
    display.terminal.text()
    written = display.terminal.bytes.decode()
    assert "(1,002 lines, see output.log)" in written
    assert "line 1002\r\n" in written and "line 1001\r\n" not in written
