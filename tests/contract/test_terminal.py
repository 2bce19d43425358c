"""What a person at a terminal gets: a board, Ctrl-C, and the terminal back as it was."""

import json
import os
import signal
import uuid
from pathlib import Path

import pytest

from tests.lab.hosts import processes_with
from tests.lab.run import Terminal, start
from tests.lab.waiting import until

COLORS = {"TERM": "xterm-256color"}
TRAINS = """\
import time
from rackrun import report
for step in range(1, 161):
    time.sleep(0.05)
    epoch, within = divmod(step - 1, 80)
    report(epoch=epoch + 1, epochs=2, step=step, steps=160, epoch_step=within + 1, epoch_steps=80,
           loss=1 / step, accuracy=0.5, images_per_second=800.0)
print("all pictures seen")
report(phase="done", accuracy=0.9434)
"""
SAVES = """\
import os, signal, time
def save(number, frame): print("saved", flush=True); os._exit(143)
signal.signal(signal.SIGTERM, save)
print("ready", os.getpid(), flush=True)
while True: time.sleep(1)
"""


def ended(process, terminal):
    until(lambda: (terminal.text() and False) or process.poll() is not None)
    return process.poll()


def log_of(folder, rank=0):
    (path,) = folder.glob(f"runs/2*/logs/*/*/rank-{rank}.out")
    return path


def test_a_board_shows_hosts_and_progress(tmp_path):
    """A row per host with its state, a bar with the epoch, then a summary; and nothing is left."""
    terminal = Terminal()
    (tmp_path / "trains.py").write_text(TRAINS)
    line = "./run-local --nproc 2 -- python trains.py"
    process = start(line, tmp_path, env=COLORS, terminal=terminal)
    head, progress = ("trains", "2 ranks on 1 host"), ("epoch 1/2", "images/s", "run ends in")
    for text in (*head, *progress, "localhost", "training"):
        until(lambda text=text: terminal.shows(text), text)
    assert ended(process, terminal) == 0
    until(lambda: terminal.shows("done in"))
    shown = terminal.text()
    # One line of both ranks, unless one wrote its own too late to be joined with the other's.
    lines = ("0-1 x2 │ all pictures seen",), ("0 │ all pictures seen", "1 │ all pictures seen")
    assert any(all(line in shown for line in each) for each in lines)
    assert "94.3%" in shown
    assert "● " not in shown  # the board is gone
    assert terminal.restored()


@pytest.mark.parametrize(("victim", "code"), [("rank", 137), ("agent", 75), ("launcher", 143)])
def test_the_terminal_is_given_back_however_a_run_ends(victim, code, tmp_path):
    """Cursor and settings are as before, the board is gone, and so is every process."""
    terminal, canary = Terminal(), str(uuid.uuid4())
    (tmp_path / "saves.py").write_text(SAVES)
    words = "./run-local --nproc 2 -- python saves.py"
    process = start(words, tmp_path, env={**COLORS, "RUN_CANARY": canary}, terminal=terminal)
    until(lambda: terminal.shows("ready") and terminal.shows("● "))
    plan = json.loads(log_of(tmp_path).parents[3].joinpath("plan.json").read_text())
    agent = Path(plan["hosts"][0]["scratch"], "agent.pid")
    pids = {
        "rank": lambda: log_of(tmp_path).read_text().split()[1],
        "launcher": lambda: process.pid,
    }
    pid = int(pids.get(victim, lambda: json.loads(agent.read_text())[0])())
    os.kill(pid, signal.SIGTERM if victim == "launcher" else signal.SIGKILL)
    assert ended(process, terminal) == code, terminal.text()
    assert terminal.restored()
    assert "● " not in terminal.text()
    until(lambda: not processes_with(f"RUN_CANARY={canary}").keys() - {process.pid})


@pytest.mark.security("SSH-7")
def test_control_characters_are_shown_not_obeyed(tmp_path):
    """A rank that sets the title, clears the screen and writes to the clipboard only shows it."""
    nasty = "\x1b]0;owned\x07 \x1b[2J \x1b]52;c;eA==\x07 \x9b31m \x08 \u202eabc"
    terminal = Terminal()
    code = f"print({nasty!r}); print('\x1b[31mred\x1b[0m')"
    words = ["./run-local", "--", "python", "-X", "utf8", "-c", code]
    assert ended(start(words, tmp_path, env=COLORS, terminal=terminal), terminal) == 0
    until(lambda: terminal.shows("done in"))
    assert "␛]0;owned␇" in terminal.text()
    assert "red" in terminal.text()
    for sequence in (b"\x1b]0;", b"\x1b[2J", b"\x1b]52", "\x9b".encode(), b"\x08"):
        assert sequence not in terminal.bytes
    assert log_of(tmp_path).read_bytes().decode().startswith(nasty)


STOPPED = """\
import os, time
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
print(("x" * 99 + chr(10)) * 20_000, end="", flush=True)
time.sleep(3)
print("the end", flush=True)
"""


def test_a_stopped_terminal_does_not_stop_the_run(tmp_path):
    """Ctrl-S, for longer than the lease and for more lines than any pipe holds: the ranks go on,
    the logs have all of it, and the run is done."""
    terminal = Terminal()
    (tmp_path / "stopped.py").write_text(STOPPED)
    line = "./run-local --lease-seconds 2 --nproc 2 -- python stopped.py"
    process = start(line, tmp_path, env=COLORS, terminal=terminal)
    until(lambda: terminal.shows("ready"))
    terminal.type(b"\x13")
    (tmp_path / "go").touch()
    until(lambda: any(tmp_path.glob("runs/2*/result.json")))
    terminal.type(b"\x11")
    until(lambda: terminal.skip() or process.poll() == 0)
    for rank in range(2):
        log = log_of(tmp_path, rank).read_bytes()
        assert len(log) > 2_000_000 and log.endswith(b"the end\n")


SAVES_SLOWLY = """\
say() {{ for i in 1 2 3 4 5; do echo $i; sleep 0.1; done; echo done > {saved}; exit; }}
((RANK)) && {{ sleep 0.5; exit 3; }}
trap say TERM; while :; do sleep 0.1; done
"""


def test_a_reader_that_goes_away_at_the_end_cuts_nothing_short(tmp_path):
    """A rank has failed, another one saves: it is left the time, and its code is the true one."""
    code = SAVES_SLOWLY.format(saved=tmp_path / "saved")
    with start(["./run-local", "--nproc", "2", "--", "bash", "-c", code], tmp_path) as process:
        assert any("stopping all ranks" in line for line in process.stderr)
    assert process.returncode == 3
    assert (tmp_path / "saved").read_text() == "done\n"


def test_a_reader_that_does_not_read_delays_nothing(tmp_path):
    """A full pipe behind the launcher: the ranks end in time, the reader gets the rest later."""
    code = "import sys\nfor _ in range(20): sys.stdout.write('y' * 999999 + '\\n')\n"
    process = start(["./run-local", "--", "python", "-c", code], tmp_path)
    until(lambda: any(tmp_path.glob("runs/2*/result.json")))
    assert log_of(tmp_path).stat().st_size == 20_000_000
    process.communicate(timeout=60)
    assert process.returncode == 0
