"""Elastic runs: whoever is lost, the others go on, and who returns joins them.

The ranks are `elastic_rank.py`, which speak the protocol of groups without torch.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.remote import locks
from tests.launcher.drive import Drive
from tests.launcher.lab import children, with_signal
from tests.waiting import until

RANK = str(Path(__file__).parents[1] / "elastic_rank.py")
LIMITS = {"lease_seconds": 3.0, "hang_seconds": 30.0, "grace_seconds": 1.0}


class Elastic(Drive):
    """An elastic run of stand-in ranks."""

    def __init__(self, folder: Path, steps: int, *words: object, **options: Any) -> None:
        self.steps = steps
        command = [sys.executable, RANK, str(steps), "0.02", *map(str, words)]
        options = {"slots": [1, 2, 1], "limits": LIMITS, **options}
        super().__init__(folder, command, elastic=True, **options)

    def lines(self, member: int) -> list[dict[str, Any]]:
        """Return the steps that a member has made, in all its processes."""
        path = self.folder / f"steps-{member}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def step(self, member: int) -> int:
        """Return the newest step of a member; 0 before the first."""
        return int(self.lines(member)[-1]["step"]) if self.lines(member) else 0

    def pid_of(self, member: int) -> int:
        """Return the process of a member that has made a step."""
        return int(until(lambda: self.lines(member))[-1]["pid"])

    def agent(self, host: int) -> tuple[int, int]:
        """Return the process ids of a host's agent and of its guard."""
        scratch = Path(self.plan["hosts"][host]["scratch"])
        agent, _, guard, *_ = json.loads((scratch / "agent.pid").read_text())
        return agent, guard

    def processes(self, host: int) -> list[int]:
        """Return all processes of the run on a host."""
        agent, guard = self.agent(host)
        return [guard, *children(guard)] if agent else []

    def reach(self, step: int, *members: int) -> None:
        """Wait until these members have made a step."""
        until(lambda: all(self.step(member) >= step for member in members))

    def join_again(self, member: int, pid: int) -> int:
        """Wait until another process of a member makes steps; return it."""
        return int(until(lambda: self.pid_of(member) != pid and self.pid_of(member)))


def kept_on(run: Elastic, *members: int) -> None:
    """Every step once, in order, in one process: nothing was started again or done twice."""
    for member in members:
        lines = run.lines(member)
        made, pids = [line["step"] for line in lines], {line["pid"] for line in lines}
        assert made == list(range(1, run.steps + 1)), f"rank {member} made the steps {made}"
        assert len(pids) == 1, f"rank {member} was started again: {pids}"


def agree(run: Elastic) -> None:
    """Whoever made a step had the same state after it as all others."""
    states: dict[int, str] = {}
    for member in range(8):
        for line in run.lines(member):
            known = states.setdefault(line["step"], line["digest"])
            assert known == line["digest"], f"another state of step {line['step']}"


def test_a_lost_rank_costs_the_others_nothing(tmp_path: Path) -> None:
    """Others of its host and of other hosts go on in their processes; it starts again and joins."""
    run = Elastic(tmp_path, 250)
    run.reach(20, 0, 1, 2, 3)
    lost = run.pid_of(2)
    os.kill(lost, signal.SIGKILL)
    run.join_again(2, lost)
    assert run.wait() == 0, run.err
    kept_on(run, 0, 1, 3)
    agree(run)
    assert "lost rank 2 on 127.0.0.3 at step" in run.err and "killed by SIGKILL" in run.err
    assert "rank 2 on 127.0.0.3 joined; 4 ranks on 3 hosts go on from step" in run.err
    first, smaller, whole = run.result["generations"]
    assert (first["ranks"], smaller["ranks"], whole["ranks"]) == (4, 3, 4)
    assert smaller["lost"] and whole["joined"] == ["rank 2 on 127.0.0.3"]
    assert run.result["verdict"] == "done" and run.result["leader"] == "127.0.0.2"


def test_the_first_rank_and_another_at_once(tmp_path: Path) -> None:
    """Two losses at once are one smaller group; the next in order leads it, and has the results."""
    run = Elastic(tmp_path, 200)
    run.reach(20, 0, 1, 2, 3)
    pids = run.pid_of(0), run.pid_of(3)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    run.join_again(0, pids[0])
    run.join_again(3, pids[1])
    assert run.wait() == 0, run.err
    kept_on(run, 1, 2)
    agree(run)
    assert run.result["leader"] == "127.0.0.3"


@pytest.mark.parametrize("part", ["agent", "torchrun", "all"])
def test_a_lost_host_returns(tmp_path: Path, part: str) -> None:
    """Whatever of a host dies, the others go on; it is cleaned up, starts again and joins."""
    run = Elastic(tmp_path, 400)
    run.reach(10, 0, 1, 2, 3)
    pids = run.pid_of(1), run.pid_of(2)
    killed = {
        "agent": lambda: [run.agent(1)[0]],
        "torchrun": lambda: [
            pid for pid in run.processes(1) if "fake_torchrun" in run.alive().get(pid, "")
        ],
        "all": lambda: run.processes(1),
    }[part]()
    assert killed
    for pid in killed:
        with_signal(pid, signal.SIGKILL)
    run.join_again(1, pids[0])
    run.join_again(2, pids[1])
    assert run.wait() == 0, run.err
    kept_on(run, 0, 3)
    agree(run)
    assert run.err.count("joined; 4 ranks on 3 hosts go on") == 1
    assert set(run.result["hosts"].values()) == {"clean"}


def test_a_host_that_answers_after_it_was_given_up_returns(tmp_path: Path) -> None:
    """An agent that starts too late is ended, so that it keeps no GPU, and its host is clean."""
    block = tmp_path / "127.0.0.4"
    block.touch()
    limits = {**LIMITS, "start_seconds": 8.0}
    run = Elastic(tmp_path, 1100, slots=[1, 1, 1], spares=1, limits=limits, blocks=str(tmp_path))
    run.reach(10, 0, 1)
    first = run.pid_of(1)
    for pid in run.processes(1):
        with_signal(pid, signal.SIGKILL)
    until(lambda: "no agent answered within 8 s" in read(run))
    block.unlink()
    run.join_again(1, first)
    until(lambda: '"name": "127.0.0.4", "node": 2, "state": "clean"' in read(run))
    for pid in run.processes(1):
        with_signal(pid, signal.SIGKILL)
    run.reach(1, 2)  # the spare that was too late takes its place now
    assert run.wait() == 0, run.err
    kept_on(run, 0)
    assert "1 rank on 1 host goes on from step" in run.err
    agree(run)


def test_a_silent_host_is_fenced_off(tmp_path: Path) -> None:
    """A host that is stopped is left out after the lease; when it wakes up it speaks for nobody."""
    run = Elastic(tmp_path, 700)
    run.reach(10, 0, 1, 2, 3)
    old = run.processes(0)
    pid = run.pid_of(0)
    for process in old:
        os.kill(process, signal.SIGSTOP)
    until(lambda: "lost 127.0.0.2 at step" in read(run))
    for process in old:
        with_signal(process, signal.SIGCONT)
    until(lambda: not set(old) & set(run.alive()))
    run.join_again(0, pid)
    assert run.wait() == 0, run.err
    kept_on(run, 1, 2, 3)
    agree(run)
    generations = [line["generation"] for line in run.lines(0) if line["pid"] == pid]
    assert set(generations) == {1}, "it took part in a group after it was lost"


def test_a_stopped_rank_is_replaced(tmp_path: Path) -> None:
    """A rank that a signal stopped is ended after the lease, and starts again."""
    run = Elastic(tmp_path, 300)
    run.reach(10, 0, 1, 2, 3)
    pid = run.pid_of(3)
    os.kill(pid, signal.SIGSTOP)
    run.join_again(3, pid)
    assert run.wait() == 0, run.err
    kept_on(run, 0, 1, 2)


def test_a_spare_replaces_a_lost_host(tmp_path: Path) -> None:
    """A spare starts when a host is lost; that one is the next spare, once it is clean."""
    run = Elastic(tmp_path, 400, slots=[1, 1, 1], spares=1)
    run.reach(10, 0, 1)
    assert not run.lines(2) and run.plan["world_size"] == 2
    for pid in run.processes(1):
        with_signal(pid, signal.SIGKILL)
    run.reach(100, 2)
    for pid in run.processes(2):
        with_signal(pid, signal.SIGKILL)
    until(lambda: len({line["pid"] for line in run.lines(1)}) == 2)
    assert run.wait() == 0, run.err
    kept_on(run, 0)
    agree(run)


def test_a_polite_run_leaves_a_host_to_who_waits_for_it(tmp_path: Path) -> None:
    """The others go on; it stays away while another run has the host, or waits, and then joins."""
    (tmp_path / "locks").mkdir()
    run = Elastic(tmp_path, 1200, slots=[1, 2, 1], locks=str(tmp_path / "locks"))
    run.reach(10, 0, 1, 2, 3)
    pids, path = run.pid_of(1), str(tmp_path / "locks" / "127.0.0.3.lock")
    ticket, descriptor = locks.take_ticket(path, "1")
    try:
        until(lambda: "left 127.0.0.3 at step" in read(run))
        until(lambda: locks.hold(path, shared=False))
        began = run.step(0)
        run.reach(began + 200, 0)  # more than one try to have it again
        locks.release()
        run.reach(run.step(0) + 200, 0)
        assert run.pid_of(1) == pids, "it came back before whoever waits"
    finally:
        locks.remove_lock(ticket, descriptor)
    run.join_again(1, pids)
    assert run.wait() == 0, run.err
    kept_on(run, 0, 3)
    agree(run)
    assert "waits for it" in run.err and "others wait" not in run.err
    assert "joined; 4 ranks on 3 hosts go on" in run.err
    assert run.result["incidents"] == {}
    assert set(run.result["hosts"].values()) == {"clean"}


def test_a_polite_run_that_cannot_do_without_the_host_ends_to_queue_again(tmp_path: Path) -> None:
    """It would be below --min-hosts: its launch saves and waits, as that of any other run."""
    (tmp_path / "locks").mkdir()
    run = Elastic(tmp_path, 400, slots=[1, 1], min_hosts=2, locks=str(tmp_path / "locks"))
    run.reach(10, 0, 1)
    ticket, descriptor = locks.take_ticket(str(tmp_path / "locks" / "127.0.0.3.lock"), "1")
    try:
        run.wait()
    finally:
        locks.remove_lock(ticket, descriptor)
    assert "gave way" in run.err and "left 127.0.0.3" not in run.err


def test_a_failure_of_its_own_ends_the_run(tmp_path: Path) -> None:
    """An exception in a rank is no loss: the run ends with its exit code and names it."""
    run = Elastic(tmp_path, 200, "fail", 2, 20)
    assert run.wait() == 1
    assert run.result["rank"] == 2 and "a mistake of this rank's own" in run.result["cause"]
    assert not run.alive()


def test_a_host_that_is_lost_again_soon_stays_away_for_a_while(tmp_path: Path) -> None:
    """A rank that dies again soon after it has joined is left alone, and the others end well."""
    run = Elastic(tmp_path, 300)
    run.reach(5, 0, 1, 2, 3)
    first = run.pid_of(3)
    os.kill(first, signal.SIGKILL)
    os.kill(run.join_again(3, first), signal.SIGKILL)
    assert run.wait() == 0, run.err
    kept_on(run, 0, 1, 2)
    assert len({line["pid"] for line in run.lines(3)}) == 2
    assert run.result["hosts"]["127.0.0.4"] == "clean"
    assert "killed by SIGKILL; not started again for 30s" in run.err


def test_a_run_below_its_least_number_of_hosts_ends(tmp_path: Path) -> None:
    """With fewer hosts than --min-hosts a run ends as any other, with the loss as its cause."""
    run = Elastic(tmp_path, 2000, slots=[1, 1], min_hosts=2)
    run.reach(10, 0, 1)
    os.kill(run.pid_of(1), signal.SIGKILL)
    assert run.wait() == 137
    assert run.result["rank"] == 1 and not run.alive()


def test_a_broken_exchange_without_a_loss(tmp_path: Path) -> None:
    """An exchange that fails without a loss is tried again, once; then its error ends the run.

    It fails on all ranks at once: which of them says so first, is named.
    """
    run = Elastic(tmp_path, 200, "broken", 1, 20)
    assert run.wait() == 75
    assert "by peer" in run.result["cause"] and run.result["rank"] in range(4)
    assert [one["ranks"] for one in run.result["generations"]] == [4, 4]


def test_states_that_differ_end_the_run(tmp_path: Path) -> None:
    """Ranks that have different states after a regrouping do not train on."""
    run = Elastic(tmp_path, 2000, "fork", 1, 0)
    run.reach(20, 0, 1, 2, 3)
    os.kill(run.pid_of(3), signal.SIGKILL)
    assert run.wait() == 75
    assert "is not that of rank" in run.result["cause"]


def test_ctrl_c_stops_an_elastic_run(tmp_path: Path) -> None:
    """The first Ctrl-C ends all ranks; none of their ends is taken for a loss."""
    run = Elastic(tmp_path, 5000)
    run.reach(10, 0, 1, 2, 3)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "lost" not in run.err and not run.alive()


def read(run: Elastic) -> str:
    """Return what the launcher has written so far, which its log of generations repeats."""
    live = run.folder / "live.json"
    return live.read_text() if live.exists() else ""
