"""Rounds under a real Slurm: two nodes, one `launcher node` on each."""

import random
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.faults import LIMITS, Fault
from tests.campaign.outcome import Outcome, partial_checkpoints, scratch_folders
from tests.lab.hosts import ROOT, command_line, with_signal
from tests.lab.slurm import SlurmLab, with_variable
from tests.lab.waiting import until

RANK = str(Path(__file__).with_name("rank.py"))
LAUNCHER = f"{sys.executable} -m tests.lab.cheap_node"
JOB = """\
#!/bin/sh
exec srun --kill-on-bad-exit=1 --wait=20 {launcher} {options} -- {command}
"""


class Slurm:
    """The daemons of a Slurm, for as long as a campaign needs them."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rackrun-campaign-", dir="/var/tmp"))
        self.lab = SlurmLab(self.folder)
        self.lab.start()

    def stop(self) -> None:
        """End jobs and daemons."""
        self.lab.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


class SlurmRound:
    """One job and what happens to it."""

    def __init__(self, slurm: Slurm, fault: Fault, number: int, seed: int, slow: float) -> None:
        self.slurm, self.fault, self.number, self.slow = slurm, fault, number, slow
        self.chance = random.Random(f"{seed}/{number}/moment")
        self.folder = slurm.folder / f"round-{number}"
        self.folder.mkdir()
        self.canary = uuid.uuid4().hex

    def play(self) -> Outcome:
        """Submit a job, inject the fault, wait for the end, and check the outcome."""
        job = self._submit(sys.executable, "-S", RANK, str(self.fault.rank_seconds))
        until(lambda: len(list(self.folder.glob("runs/2*/step-*"))) == 2)
        time.sleep(self.chance.uniform(0.0, 1.0))
        hurt_at = time.monotonic()
        self._hurt(job)
        ended = self.slurm.lab.ended(job)
        code, number = map(int, ended["ExitCode"].split(":"))
        took = time.monotonic() - hurt_at
        text = (self.folder / f"slurm-{job}.out").read_text()
        outcome = Outcome(
            self.number, self.fault, 128 + number if number else code, took, output=text
        )
        outcome.violations += self._violations(outcome)
        return outcome

    def _submit(self, *command: str) -> str:
        script = self.folder / f"job-{len(list(self.folder.iterdir()))}.sh"
        options = " ".join((*LIMITS, "--name", script.stem))
        script.write_text(JOB.format(launcher=LAUNCHER, options=options, command=" ".join(command)))
        variables = {"PYTHONPATH": str(ROOT), "RUN_CANARY": self.canary}
        return self.slurm.lab.submit(self.folder, "--nodes=2", str(script), **variables)

    def _hurt(self, job: str) -> None:
        name = self.fault.name.removeprefix("slurm-")
        if name == "scancel":
            self.slurm.lab.run("scancel", job)
        elif name == "node-power":
            self.slurm.lab.kill_node("n2")
        elif name.endswith("KILL"):
            kind = "campaign/rank.py" if name == "rank-KILL" else "cheap_node"
            lines = {pid: command_line(pid) for pid in self._processes()}
            processes = [
                pid
                for pid, line in lines.items()
                if kind in line and "srun" not in line and "fake_torchrun" not in line
            ]
            if processes:
                with_signal(self.chance.choice(processes), signal.SIGKILL)

    def _processes(self) -> list[int]:
        return with_variable(f"RUN_CANARY={self.canary}")

    def _violations(self, outcome: Outcome) -> Iterator[str]:
        if outcome.code not in self.fault.codes:
            yield f"exit code {outcome.code}, not {' or '.join(map(str, self.fault.codes))}"
        if "internal error of rackrun" in outcome.output:
            yield "a traceback of the launcher"
        deadline = time.monotonic() + 20 * self.slow
        while self._processes() and time.monotonic() < deadline:
            time.sleep(0.1)
        yield from (f"left: {command_line(pid)[:100]}" for pid in self._processes())
        if self.fault.name != "slurm-node-power":  # which leaves what was on its disk
            yield from (f"litter: {path}" for path in scratch_folders(self.folder / "runs"))
        yield from partial_checkpoints(self.folder / "runs")
        if self.fault.name == "slurm-node-power":
            self.slurm.lab.start_node("n2")
            self.slurm.lab.run("scontrol", "update", "nodename=n2", "state=resume")
            until(lambda: self.slurm.lab.idle() == 3)
        again = self.slurm.lab.ended(self._submit("true"))
        if again["ExitCode"] != "0:0":
            yield f"the next job: {again['JobState']} {again['ExitCode']}"
