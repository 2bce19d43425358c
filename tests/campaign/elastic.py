"""Random losses in elastic runs: whatever is lost when, those that are left go on.

    python -m tests.campaign.elastic [--rounds 300] [--seed 7] [--only ROUND]

A round starts ranks without torch on two to four hosts, and loses a rank, a shim, torchrun, an
agent, all of a host, or stops one, once to five times at random moments: also while the ranks
regroup, while newcomers start, and near the last step. Then no process of a survivor was started
again, every step was made once and with the same state on all ranks, and nothing is left.
"""

import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from tests.launcher.drive import end_all
from tests.launcher.lab import with_signal
from tests.launcher.supervision.test_elastic import Elastic, agree, kept_on

STEPS = 300
Pids = list[int]


@dataclass(frozen=True)
class Settings:
    """Random losses in elastic runs."""

    rounds: int = 300
    """Number of runs."""
    seed: int = 7
    """Which losses, and when."""
    only: int = -1
    """The only round to play; -1: all."""


@dataclass
class Round:
    """One run, and what was lost in it."""

    number: int
    seed: int
    lost: list[str] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    output: str = ""

    def play(self, folder: Path) -> "Round":
        """Start the run, lose what chance names, wait for the end, and judge."""
        dice = random.Random(f"{self.seed} {self.number}")
        slots = [dice.randrange(1, 3) for _ in range(dice.randrange(2, 5))]
        elastic = Elastic(folder, STEPS, slots=slots)
        try:
            self._lose(elastic, slots, dice)
            code = elastic.wait()
            self.output = elastic.err
            self._judge(elastic, slots, code)
        except AssertionError as error:
            self.violations.append(str(error)[:500])
        finally:
            end_all()
        return self

    def _lose(self, elastic: Elastic, slots: list[int], dice: random.Random) -> None:
        """Lose ranks and hosts, all but one host at most, which is left alone."""
        elastic.reach(1, *range(sum(slots)))
        victims = dice.sample(range(len(slots)), len(slots) - 1)
        self.survivors = [
            member
            for host in range(len(slots))
            if host not in victims
            for member in range(sum(slots[:host]), sum(slots[: host + 1]))
        ]
        for _ in range(dice.randrange(1, 6)):
            time.sleep(dice.choice((0.0, 0.02, 0.1, 0.3, 1.0, 2.0)) * dice.random())
            if elastic.process.poll() is not None:
                return
            host, kind = dice.choice(victims), dice.choice([*KINDS])
            self.lost.append(f"{kind} of host {host}")
            KINDS[kind](elastic, host)

    def _judge(self, elastic: Elastic, slots: list[int], code: int) -> None:
        """Hold the invariants against what has happened."""
        assert code == 0, f"exit code {code}"
        kept_on(elastic, *self.survivors)
        agree(elastic)
        assert not elastic.alive(), f"left running: {elastic.alive()}"
        states = set(elastic.result["hosts"].values())
        assert states == {"clean"}, states
        numbers = [group["number"] for group in elastic.result["generations"]]
        assert numbers == list(range(1, len(numbers) + 1)), numbers
        assert "Traceback" not in elastic.err
        assert elastic.result["generations"][0]["ranks"] == sum(slots)


def of_host(*parts: str) -> Callable[[Elastic, int], None]:
    """Return what kills the processes of a host whose command lines have one of these parts."""

    def kill(elastic: Elastic, host: int) -> None:
        lines = elastic.alive()
        for pid in processes(elastic, host):
            if any(part in lines.get(pid, "") for part in parts):
                with_signal(pid, signal.SIGKILL)
                return

    return kill


def kill_agent(elastic: Elastic, host: int) -> None:
    """Kill the agent of a host."""
    for pid in processes(elastic, host)[1:2]:
        with_signal(pid, signal.SIGKILL)


def kill_all(elastic: Elastic, host: int) -> None:
    """Kill all processes of the run on a host."""
    for pid in processes(elastic, host):
        with_signal(pid, signal.SIGKILL)


def stop_all(elastic: Elastic, host: int) -> None:
    """Stop all processes of a host until after the lease."""
    pids = processes(elastic, host)
    for pid in pids:
        with_signal(pid, signal.SIGSTOP)
    time.sleep(4.5)
    for pid in pids:
        with_signal(pid, signal.SIGCONT)


def ask_to_stop(elastic: Elastic, host: int) -> None:
    """Send the agent of a host SIGTERM, as a host that shuts down does."""
    for pid in processes(elastic, host)[1:2]:
        with_signal(pid, signal.SIGTERM)


def processes(elastic: Elastic, host: int) -> Pids:
    """Return the processes of a host, its guard first; none between two agents."""
    try:
        return elastic.processes(host)
    except (OSError, ValueError):
        return []


KINDS: dict[str, Callable[[Elastic, int], None]] = {
    "rank": of_host("elastic_rank.py"),
    "shim": of_host("/agent.py"),
    "torchrun": of_host("fake_torchrun.py"),
    "agent": kill_agent,
    "all": kill_all,
    "stop": stop_all,
    "term": ask_to_stop,
}


def rounds(seed: int, numbers: range) -> Iterator[Round]:
    """Play rounds, one after the other."""
    for number in numbers:
        with tempfile.TemporaryDirectory() as folder:
            yield Round(number, seed).play(Path(folder))


def main(args: list[str]) -> int:
    """Play the rounds, print a line for each, and return 1 if one broke a promise."""
    settings = parse(Settings, "python -m tests.campaign.elastic", args)
    numbers = (
        range(settings.rounds) if settings.only < 0 else range(settings.only, settings.only + 1)
    )
    broken = 0
    for one in rounds(settings.seed, numbers):
        broken += bool(one.violations)
        sys.stdout.write(f"round {one.number}: {', '.join(one.lost)}: {one.violations or 'kept'}\n")
        if one.violations:
            sys.stdout.write(f"{one.output[-3000:]}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(numbers)} rounds, {broken} broken\n")
    return int(bool(broken))


if __name__ == "__main__":
    run(main)
