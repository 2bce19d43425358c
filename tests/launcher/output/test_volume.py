"""Much output: every byte in its log, memory flat, time linear."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from rackrun.launcher.remote.agent.frames import READ_BYTES
from rackrun.launcher.supervision.agents import QUEUED_EVENTS
from rackrun.launcher.supervision.supervisor import EVENTS_PER_TURN
from tests.lab.hosts import peak_mib
from tests.lab.waiting import until

LAUNCHER_MIB = 66  # of a run that prints nothing: 61 to 63, and what malloc keeps
COPIES = 6  # of what came in a turn, on its way to the screen: events, joined, whole lines, written
MEMORY_MIB = LAUNCHER_MIB + (QUEUED_EVENTS + COPIES * EVENTS_PER_TURN) * READ_BYTES / 2**20  # 122
SSH_MIB = 40  # what Fabric and its buffers add


LINE = b"a line of some length, as a chatty rank would write it over and over\n"


def flooder(folder: Path, megabytes: int) -> list[str]:
    """Return the command of a rank that writes this many bytes in lines."""
    script = folder / "flood.py"
    script.write_text(
        "import sys\n"
        f"block = {LINE!r} * ({1_000_000 // len(LINE)} + 1)\n"
        f"for _ in range({megabytes}): sys.stdout.buffer.write(block[:{1_000_000}])\n"
    )
    return [sys.executable, str(script)]


SIZES = (10, 100)  # megabytes


@pytest.mark.security("SSH-7")
def test_a_flood_over_ssh_takes_time_in_proportion_and_no_more_memory(start_lab, tmp_path):
    """SSH-7: likewise of lines through sshd, with the screen in a file."""
    lab = start_lab(1)
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()}"))
    took = []
    for megabytes in SIZES:
        with (tmp_path / "screen").open("wb") as screen:
            command = ("--", *flooder(tmp_path, megabytes))
            args = ("--ssh-config", str(lab.config), "--name", str(megabytes), hosts, *command)
            process = lab.launcher(*args, stdout=screen, before=("env",))  # our own child
        peak, processor = watched(process.pid)
        _, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        (log,) = lab.folder.glob(f"runs/*-{megabytes}/logs/*/*/rank-0.out")
        assert log.stat().st_size == 1_000_000 * megabytes
        assert peak < MEMORY_MIB + SSH_MIB
        took.append(processor)
        log.unlink()
    assert took[1] <= 12 * took[0]


def watched(pid: int) -> tuple[float, float]:
    """Wait for a child; return its peak memory and its CPU time."""
    peak = 0.0
    while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        with contextlib.suppress(IndexError):  # it ended in between
            peak = peak_mib(pid)
        time.sleep(0.05)
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return peak, (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_output_without_a_reader_waits_in_the_ranks_pipe(start_lab, tmp_path):
    """While the launcher does not read, the agent's memory stays small; later all of it arrives."""
    lab = start_lab(1)
    process = lab.run_ssh(lab.cheap_hosts(), "--", *flooder(tmp_path, 50))
    until(lambda: any(lab.folder.glob("runs/2*/logs/*/*/rank-0.out")), "the rank writes", 60)
    process.send_signal(signal.SIGSTOP)
    time.sleep(2)
    (host,) = json.loads((lab.run_folder() / "plan.json").read_text())["hosts"]
    agent, *_ = json.loads(Path(host["scratch"], "agent.pid").read_text())
    assert peak_mib(agent) < 40
    process.send_signal(signal.SIGCONT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    (log,) = lab.folder.glob("runs/2*/logs/*/*/rank-0.out")
    assert log.stat().st_size == 50_000_000
