"""The launcher's own messages, outside of dashboards."""

import io
import os
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from rackrun.launcher.output.console import (
    PROGRESS_SECONDS,
    PlainOutput,
    next_commands,
    say,
    time_of_day,
)
from rackrun.launcher.output.dashboard import Dashboard
from rackrun.launcher.run.events import Report
from rackrun.launcher.run.job import Command, Job, TaskWork
from rackrun.launcher.run.plan import Plan, PlannedHost, make_plan
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.run_folder import RunFolder
from tests.lab.warm import ROOT

SAY = """
import sys
from rackrun.launcher.output.console import say
say("first")
sys.stdin.readline()
for number in range(3):
    say(f"word {number}")
print("went on")
"""


def test_output_without_a_reader_ends_nothing():
    """`./run-ssh ... 2>&1 | head -1`: the reader leaves, and what was under way goes on."""
    process = subprocess.Popen(
        [sys.executable, "-c", SAY],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name != "PYTHONUNBUFFERED"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin and process.stdout and process.stderr
    assert process.stderr.readline() == "rackrun: first\n"
    process.stderr.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stdout.read() == "went on\n"
    assert process.wait() == 0
    process.stdout.close()


def test_what_is_said_is_text(capfd):
    """SSH-7: a host's text in our messages and notes moves no cursor."""
    line = "node1: \x1b]0;PWNED\x07\u202e\nnode2: \x1b[2J"
    plan = Plan("id", 0, ())
    drawn = io.StringIO()
    board = Dashboard(plan, "x", Path("/x"))
    board.console = Console(file=drawn, force_terminal=True, width=200)
    board.note(line)
    shown = [drawn.getvalue()]
    for tell in (say, PlainOutput(plan).note):
        tell(line)
        shown.append(capfd.readouterr().err)
    expected = {"gpu\x1b[2J01": line}
    board.finish(
        Result("failed", 1, line, None, None, None, "", "", {}, expected, 1.0, {}, Path("/x"))
    )
    assert "\x1b]" not in drawn.getvalue() and "\x1b[2J" not in drawn.getvalue()
    assert drawn.getvalue().count("PWNED") > 1
    for text in shown:
        assert "node1: ␛]0;PWNED␇\\u202e\nnode2: ␛[2J" in text


def test_a_plain_screen_shows_progress_before_the_first_epoch_ends(capfd, monkeypatch):
    """Now and then a line: what the ranks load, then where in the first epoch they are."""
    host = PlannedHost("gpu01", "10.0.0.1", 1, "python", "/", "/x")
    plan = make_plan(Job(Command(("x",)), RunFolder(Path("/x"))), [host], 1)
    run, screen = RunState(plan, 0.0), PlainOutput(plan)

    def drawn(now: float, **fields: object) -> str:
        run.take(Report(0, 0, fields), now)
        monkeypatch.setattr(screen, "progress_at", 0.0)
        screen.draw(run, now)
        return capfd.readouterr().err

    assert drawn(PROGRESS_SECONDS - 1, phase="start") == ""
    clock = r"rackrun: ([01]\d|2[0-3]):[0-5]\d:[0-5]\d"
    assert re.fullmatch(f"{clock} loading\n", drawn(PROGRESS_SECONDS + 1, phase="start"))
    drawn(20.0, phase="train", epoch=1, epochs=9, step=1, steps=900)
    text = "epoch 1/9, step 11/900, loss 0.5, 80 images/s, 3% waiting for data, run ends in 14:49\n"
    assert re.fullmatch(
        f"{clock} {text}", drawn(30.0, step=11, loss=0.5, images_per_second=80.0, data_share=0.03)
    )


def test_a_line_has_the_time_at_which_it_was_true():
    """Also where a record is replayed: two moments are as far apart as they were."""
    now = time.monotonic()
    before, then = (time.strptime(time_of_day(now - ago), "%H:%M:%S") for ago in (3600.0, 0.0))
    minutes = [one.tm_hour * 60 + one.tm_min for one in (before, then)]
    assert (minutes[1] - minutes[0]) % (24 * 60) in (59, 60, 61)


def test_what_uses_the_model_is_typed_as_it_stands(tmp_path, monkeypatch):
    """The path is quoted; there is no such line without a model, or for a command of the user."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs"
    run.mkdir()
    report = {"final": str(run / "final.pt")}
    result = Result("done", 0, "done", None, None, None, "", "", {}, {}, 1.0, report, run)
    host = PlannedHost("a", "a", 1, "python", "/", "/x")

    def planned(work: TaskWork | Command) -> Plan:
        return make_plan(Job(work, RunFolder(run)), [host], 1)

    plan = planned(TaskWork("catdog"))
    assert not list(next_commands(result, plan))
    (run / "final.pt").touch()
    assert not list(next_commands(result, planned(Command(("python", "train.py")))))
    for work, says in (
        (TaskWork("./my task.py"), "final.pt' IMAGE --task './my task.py'"),
        (TaskWork("classify", ("--model", "timm:resnet18")), "final.pt' IMAGE"),
        (TaskWork("classify", ("--model", "my:Net")), "final.pt' IMAGE --model my:Net"),
        (TaskWork("classify", ("--lr", "1", "--model=my:Net")), "IMAGE --model my:Net"),
    ):
        ((_, args),) = next_commands(result, planned(work))
        assert args.endswith(says)
    ((_, args),) = next_commands(result, plan)
    assert args == "./run-local predict 'my runs/final.pt' IMAGE"
    for width in (80, 30):  # no path is cut or broken
        drawn, board = io.StringIO(), Dashboard(plan, "x", run)
        board.console = Console(file=drawn, force_terminal=True, width=width, color_system=None)
        board.finish(replace(result, resume="./run-local catdog --resume 'my runs'"))
        lines = [line.strip() for line in drawn.getvalue().splitlines()]
        assert {args, "./run-local catdog --resume 'my runs'"} < set(lines)
        assert any(re.fullmatch("model +my runs/final.pt", line) for line in lines), lines
