"""`--on-event`: events of a run reach a command of the user's, which never delays the run."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.output.on_event import EventCommand
from tests.lab.waiting import until

KEEP = """
import json, os, pathlib, sys
event = json.load(sys.stdin)
name = f"{event['time']:.6f}-{os.environ['RACKRUN_EVENT']}.json"
(pathlib.Path(__file__).parent / name).write_text(json.dumps(event))
"""
AGENT_KILLED_ONCE = """
import json, os, pathlib, signal
first = pathlib.Path("first")
if not first.exists():
    first.touch()
    agent = pathlib.Path(os.environ["RACKRUN_REPORTS"]).with_name("agent.pid")
    os.kill(json.loads(agent.read_text())[0], signal.SIGKILL)
    signal.pause()
"""


def keeping(folder: Path) -> list[str]:
    """Return a command that keeps each event in this folder."""
    (folder / "keep.py").write_text(KEEP)
    return [sys.executable, str(folder / "keep.py")]


def kept(folder: Path) -> list[dict[str, Any]]:
    """Return the events that the command has kept, in order."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_a_lost_host_and_a_restart_reach_the_command(start_lab, tmp_path):
    """The agent is killed in the first attempt; the second one ends well."""
    rack = start_lab(1)
    host = rack.hosts[0]
    rack.configure(f"Host gpu1\n  HostName {host.address}\n  Port {host.port}")
    args = ("--python", str(rack.cheap_python()), "--workdir", str(rack.folder), "-H", "gpu1")
    args += ("--max-restarts", "1", "--on-event", " ".join(keeping(tmp_path)))
    code, _, err = rack.result_of(*args, "--", sys.executable, "-c", AGENT_KILLED_ONCE)
    assert code == 0, err
    lost, restart, end = kept(tmp_path)
    assert [lost["event"], restart["event"], end["event"]] == ["lost", "restart", "end"]
    assert (lost["host"], lost["folder"]) == ("gpu1", restart["folder"])
    assert restart["text"].startswith("restart 1 of 1; failed: gpu1: ")
    assert "type the same command again" not in err + restart["text"]  # it is done already
    assert (end["result"]["verdict"], end["folder"]) == ("done", end["result"]["folder"])


def test_a_command_that_hangs_delays_no_event_and_is_named(tmp_path):
    """Events are taken at once; at the end, one limit holds for all that are left."""
    pids = tmp_path / "pids"
    script = f"echo $$ >> {pids}; sleep 999 & echo $! >> {pids}; wait"
    command = EventCommand(["sh", "-c", script], tmp_path, limit_seconds=4.0)
    began = time.monotonic()
    for rank in range(3):
        command.send("stall", "no progress", "gpu01", rank)
    command.send("end", "done")
    assert time.monotonic() - began < 1.0
    said: list[str] = []
    command.wait(said.append)
    assert said == ["waiting up to 4 s for --on-event sh; Ctrl-C ends the wait"]
    first, second = command.problems()
    assert first == "--on-event sh, stall: ended after 4 s without a result"
    assert second == "--on-event sh: too slow; 3 events dropped"
    started = pids.read_text().split()
    assert len(started) == 4
    until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in started))


def test_an_abandoned_command_is_ended_and_runs_for_no_further_event(tmp_path):
    """As after Ctrl-C at the end of a run: nothing of it is left, nor named."""
    pids = tmp_path / "pids"
    command = EventCommand(["sh", "-c", f"echo $$ >> {pids}; exec sleep 999"], tmp_path)
    for number in range(20):
        command.send("stall", f"stall {number}")
    until(lambda: pids.exists() and pids.read_text())
    command.abandon()
    command.wait(print)
    (started,) = pids.read_text().split()
    assert not Path(f"/proc/{started}/exe").exists() and not [*command.problems()]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo one; echo two >&2; exit 3", "exit code 3: two"),
        ("exit 4", "exit code 4"),
        ("true", ""),
    ],
)
def test_a_command_that_fails_is_named_with_its_last_line(tmp_path, script, says):
    """Nothing of it reaches the terminal, which may show the dashboard."""
    command = EventCommand(["sh", "-c", script], tmp_path)
    command.send("end", "done")
    command.wait(print)
    assert list(command.problems()) == [f"--on-event sh, end: {says}"] * bool(says)
