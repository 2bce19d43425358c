"""What a person at a terminal gets: a board, Ctrl-C, and the terminal back as it was."""

import os
import signal
import subprocess
import sys

import pytest

from tests.lab.run import Terminal
from tests.lab.waiting import until
from tests.launcher.conftest import pid_of
from tests.launcher.drive import HERE, ROOT, Drive

STAND_IN = [sys.executable, str(HERE / "stand_in.py")]
SAVES = (
    "import os, signal, sys, time\n"
    "def save(number, frame): print('saved', flush=True); os._exit(143)\n"
    "signal.signal(signal.SIGTERM, save)\n"
    "print('ready', flush=True)\n"
    "while True: time.sleep(1)\n"
)


def wait_for_end(drive: Drive, terminal: Terminal) -> int:
    until(lambda: (terminal.text() and False) or drive.process.poll() is not None)
    return int(drive.process.returncode)


def test_a_board_shows_hosts_and_progress(tmp_path):
    """A row per host with its state, a bar with the epoch, then a summary; and nothing is left."""
    terminal = Terminal()
    drive = Drive(tmp_path, [*STAND_IN, "2", "100", "0.05"], terminal, slots=[1, 1], plain=False)
    args = ("stand_in", "2 ranks on 2 hosts", "127.0.0.2", "127.0.0.3", "epoch 1/2", "run ends in")
    until(lambda: all(terminal.shows(text) for text in ("training", "images/s", *args)))
    assert wait_for_end(drive, terminal) == 0
    until(lambda: terminal.shows("done in"))
    shown = terminal.text()
    assert "all pictures seen" in shown
    assert "2 hosts:0-1 x2 │ all pictures seen" in shown
    assert "94.3%" in shown
    assert "● " not in shown  # the board is gone
    assert terminal.restored()


def test_the_terminal_is_given_back_however_a_run_ends(tmp_path):
    """A rank or an agent is killed, a rank is stopped, TERM, a bug: cursor and settings
    are as before, the board is gone, and so is every process."""
    codes = {"rank KILL": 137, "rank STOP": 75, "agent KILL": 75, "launcher TERM": 143}
    codes["launcher ALRM"] = 1
    command = [sys.executable, "-c", SAVES]
    shown = {fault: Terminal() for fault in codes}
    drives = {
        fault: Drive(tmp_path, command, terminal, slots=[1, 1], plain=False)
        for fault, terminal in shown.items()
    }
    for fault, terminal in shown.items():
        until(lambda terminal=terminal: terminal.shows("ready") and terminal.shows("● "))
        part, name = fault.split()
        drive = drives[fault]
        pid = drive.pid("'saved'") if part == "rank" else pid_of(drive, part)
        os.kill(pid, signal.Signals[f"SIG{name}"])
    for fault, terminal in shown.items():
        drive = drives[fault]
        assert wait_for_end(drive, terminal) == codes[fault], terminal.text()
        assert terminal.restored(), fault
        assert "● " not in terminal.text(), fault
        until(lambda drive=drive: not drive.alive())
    assert shown["launcher ALRM"].shows("ZeroDivisionError")


@pytest.mark.security("SSH-7")
def test_control_characters_are_shown_not_obeyed(tmp_path):
    """A rank that sets the title, clears the screen and writes to the clipboard only shows it."""
    nasty = "\x1b]0;owned\x07 \x1b[2J \x1b]52;c;eA==\x07 \x9b31m \x08 \u202eabc"
    terminal = Terminal()
    code = f"print({nasty!r}); print('\x1b[31mred\x1b[0m')"
    drive = Drive(tmp_path, [sys.executable, "-X", "utf8", "-c", code], terminal, plain=False)
    assert wait_for_end(drive, terminal) == 0
    until(lambda: terminal.shows("done in"))
    assert "␛]0;owned␇" in terminal.text()
    assert "red" in terminal.text()
    for sequence in (b"\x1b]0;", b"\x1b[2J", b"\x1b]52", "\x9b".encode(), b"\x08"):
        assert sequence not in terminal.bytes
    assert drive.log(0, "out").read_bytes().decode().startswith(nasty)


def test_a_stopped_terminal_does_not_stop_the_run(tmp_path):
    """Ctrl-S, for longer than the lease and for 120 MB of lines.

    The ranks go on, the logs have all of it, the launcher's memory stays flat, the run is done.
    """
    terminal = Terminal()
    code = (
        "import os, time\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.02)\n"
        "for _ in range(60): print(('x' * 99 + chr(10)) * 10_000, end='', flush=True)\n"
        "end = time.monotonic() + 4\n"
        "while time.monotonic() < end: print('x' * 1000, flush=True); time.sleep(0.001)\n"
        "print('the end', flush=True)"
    )
    drive = Drive(tmp_path, [sys.executable, "-c", code], terminal, slots=[2], plain=False)
    until(lambda: terminal.shows("ready"))
    terminal.type(b"\x13")
    (drive.folder / "go").touch()
    until(lambda: (drive.folder / "result.json").exists())
    terminal.type(b"\x11")
    until(lambda: terminal.skip() or drive.process.poll() == 0)
    assert drive.peak_mib < 122  # as under a flood of output: test_volume.py
    for rank in range(2):
        assert drive.log(rank, "out").stat().st_size > 60e6
        assert drive.log(rank, "out").read_bytes().endswith(b"the end\n")


def test_a_reader_that_goes_away_at_the_end_cuts_nothing_short(tmp_path):
    """A rank has failed, another one saves: it is left the time, and its code is the true one."""
    saved = tmp_path / "saved"
    say = "for i in 1 2 3 4 5; do echo $i; sleep 0.1; done"
    save = f"trap '{say}; echo done > {saved}; exit' TERM; while :; do sleep 0.1; done"
    code = f"((RANK)) && {{ sleep 0.5; exit 3; }}; {save}"
    drive = Drive(tmp_path, ["bash", "-c", code], slots=[1, 1])
    assert drive.process.stdout is not None and drive.process.stderr is not None
    lines = iter(drive.process.stderr.readline, "")
    assert any("stopping all ranks" in line for line in lines)
    drive.process.stdout.close()
    drive.process.stderr.close()
    assert drive.process.wait(60) == 3
    assert saved.read_text() == "done\n"
    assert not drive.alive()


def test_a_reader_that_does_not_read_delays_nothing(tmp_path):
    """A full pipe behind the launcher: the ranks end in time, the reader gets the rest later."""
    code = "import sys\nfor _ in range(20): sys.stdout.write('y' * 999999 + '\\n')\n"
    drive = Drive(tmp_path, [sys.executable, "-c", code])
    until(lambda: (drive.folder / "result.json").exists())
    assert drive.result["verdict"] == "done"
    assert drive.log(0, "out").stat().st_size == 20_000_000
    assert drive.wait() == 0


def test_launching_from_a_thread_leaves_signals_alone(tmp_path):
    """`launch` in a thread of a program works; that program handles Ctrl-C."""
    code = (
        "import json, sys, threading\n"
        "from tests.launcher.drive import main\n"
        "codes = []\n"
        f"words = {{'command': ['true'], 'folder': {str(tmp_path / 'run')!r}}}\n"
        "thread = threading.Thread(target=lambda: codes.append(main(**words)))\n"
        "thread.start(); thread.join()\n"
        "sys.exit(codes[0])"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0
