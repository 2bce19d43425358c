"""Jobs of a real Slurm that faults happen to: `rackrun node` on each of two nodes."""

import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from tests.lab.clusters import SlurmLab
from tests.lab.fault import LIMITS, Fault, Outcome
from tests.lab.faulty_runs import RANK, partial_files
from tests.lab.hosts import ROOT, command_line, processes_with, with_signal
from tests.lab.waiting import until

JOB = """\
#!/bin/sh
exec srun --kill-on-bad-exit=1 --wait=20 {python} -m tests.lab.cheap_node {options} -- {command}
"""


class Slurm:
    """The daemons of a Slurm, for as long as they are needed."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/var/tmp"))
        self.lab = SlurmLab(self.folder)
        self.lab.start()

    def run(self, fault: Fault, folder: Path, chance: Any, slow: float) -> "SlurmRun":
        """Return a job that is still to be submitted."""
        return SlurmRun(self.lab, fault, folder, chance, slow)

    def stop(self) -> None:
        """End jobs and daemons."""
        self.lab.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class SlurmRun:
    """One job and what happens to it."""

    victim = "n2"

    def __init__(
        self, lab: SlurmLab, fault: Fault, folder: Path, chance: random.Random | None, slow: float
    ) -> None:
        self.lab, self.fault, self.folder, self.chance = lab, fault, folder, chance
        self.slow = slow
        self.runs = folder / "runs"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.lab.cancel_all()

    def start(self) -> None:
        """Submit the job."""
        self.job = self.submit(sys.executable, "-S", RANK, str(self.fault.rank_seconds))

    def submit(self, *command: str) -> str:
        """Submit a job with a launcher on each node; return its number."""
        script = self.folder / f"job-{len(list(self.folder.iterdir()))}.sh"
        options = " ".join((*LIMITS, "--name", script.stem))
        script.write_text(
            JOB.format(python=sys.executable, options=options, command=" ".join(command))
        )
        variables = {"PYTHONPATH": str(ROOT), "RUN_CANARY": str(self.folder)}
        return self.lab.submit(self.folder, "--nodes=2", str(script), **variables)

    def wait_for_the_moment(self) -> None:
        """Wait until both ranks train."""
        until(lambda: len(list(self.runs.glob("2*/step-[0-9]"))) == 2)
        time.sleep(self.chance.uniform(0.0, 1.0) if self.chance else 0.0)

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Return how the job ended, and what it printed."""
        code, number = map(int, self.lab.ended(self.job)["ExitCode"].split(":"))
        said = (self.folder / f"slurm-{self.job}.out").read_text()
        return (128 + number if number else code), said

    def processes(self) -> dict[int, str]:
        """Return the processes of the job on all nodes."""
        pids = list(processes_with(f"RUN_CANARY={self.folder}"))
        return {pid: command_line(pid) for pid in pids}

    def send(self, kind: str, name: str) -> None:
        """Kill a rank, or a launcher."""
        assert name == "KILL"
        part = {"rank": RANK, "launcher": "tests.lab.cheap_node"}[kind]
        others = ("srun", "fake_torchrun", "agent.zip", *(() if kind == "rank" else ("memfd",)))
        lines = self.processes().items()
        pids = [p for p, line in lines if part in line and not any(o in line for o in others)]
        with_signal(self.chance.choice(pids) if self.chance else pids[-1], signal.SIGKILL)

    def cancel(self) -> None:
        """Cancel the job."""
        self.lab.run("scancel", self.job)

    def cut_power(self) -> None:
        """Kill all that runs on a node."""
        self.lab.kill_node(self.victim)

    def boot(self) -> None:
        """Start the node again."""
        self.lab.start_node(self.victim)
        self.lab.run("scontrol", "update", f"nodename={self.victim}", "state=resume")
        until(lambda: self.lab.idle() == 3)

    def settle(self, seconds: float) -> None:
        """Wait until nothing runs, for so long at most."""
        deadline = time.monotonic() + seconds
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.1)

    def left(self) -> Iterator[str]:
        """Yield what is left of the job."""
        for line in self.processes().values():
            yield f"left: {line.replace(chr(0), ' ')[:100]}"
        if self.fault.name != "power-cut":  # which leaves what was on its disk
            yield from scratch_folders(self.runs)

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield checkpoints that are not whole."""
        yield from partial_files(self.runs)

    def next_launch(self) -> Iterator[str]:
        """Submit another job; yield what is wrong with it."""
        job = self.submit("true")
        again = self.lab.ended(job)
        if again["ExitCode"] != "0:0":
            said = (self.folder / f"slurm-{job}.out").read_text()
            yield f"the next job: {again['JobState']} {again['ExitCode']}: {said}"


def scratch_folders(runs: Path) -> Iterator[str]:
    """Yield the agents' folders that a run has left, where hosts share one /tmp."""
    for plan in runs.glob("2*/plan*.json"):
        for host in json.loads(plan.read_text())["hosts"]:
            if Path(host["scratch"]).exists():
                yield f"left: {host['scratch']}"
