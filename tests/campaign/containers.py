"""Rounds in containers: a real Docker daemon, and hosts that start their ranks in an image."""

import contextlib
import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.faults import LIMITS, Fault
from tests.campaign.outcome import Outcome, partial_checkpoints, scratch_folders
from tests.lab.hosts import Lab, with_signal
from tests.launcher.run.test_containers import BORROWED, rank_image
from tests.nginx.conftest import docker, docker_daemon

RANK = str(Path(__file__).with_name("rank.py"))


class Containers:
    """A daemon, an image that borrows this machine's programs, and two hosts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rackrun-campaign-", dir="/var/tmp"))
        self.open = contextlib.ExitStack()
        self.open.enter_context(docker_daemon())
        self.image = self.open.enter_context(rank_image())
        self.lab = Lab(self.folder)
        self.lab.ready(2)
        for host in self.lab.hosts:
            socket = os.environ.get("DOCKER_HOST", "")
            (host.folder / ".bashrc").write_text(f"export DOCKER_HOST='{socket}'\n")

    def stop(self) -> None:
        """End the hosts, the image and the daemon."""
        self.lab.stop()
        self.open.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ContainerRound:
    """One run in containers and what happens to it."""

    def __init__(self, labs: Containers, fault: Fault, number: int, seed: int, slow: float) -> None:
        self.labs, self.fault, self.number, self.slow = labs, fault, number, slow
        self.chance = random.Random(f"{seed}/{number}/moment")
        self.runs = labs.folder / f"round-{number}"

    def play(self) -> Outcome:
        """Start a run, inject the fault, wait for the end, and check the outcome."""
        process = self._launch("python", "-S", RANK, str(self.fault.rank_seconds))
        deadline = time.monotonic() + 60 * self.slow
        while len(list(self.runs.glob("2*/step-*"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(self.chance.uniform(0.0, 1.0))
        hurt_at = time.monotonic()
        self._hurt(process)
        _, err = process.communicate(timeout=200 * self.slow)
        took = time.monotonic() - hurt_at
        outcome = Outcome(self.number, self.fault, process.returncode, took, output=err)
        outcome.violations += self._violations(outcome)
        return outcome

    def _launch(self, *command: str) -> "subprocess.Popen[str]":
        volumes = [arg for folder in BORROWED for arg in ("--volume", f"{folder}:{folder}:ro")]
        hosts = str(self.labs.lab.write_hosts(f"python={self.labs.lab.cheap_python()}"))
        given = ("--image", self.labs.image, *volumes, *LIMITS, "--runs", str(self.runs))
        return self.labs.lab.run_ssh(*given, hosts, "--", *command)

    def _hurt(self, process: "subprocess.Popen[str]") -> None:
        name = self.fault.name.removeprefix("container-")
        victim = self.chance.choice(containers() or [""])
        if name in ("kill", "pause"):
            docker(name, victim)
        elif name == "rank-KILL":
            with_signal(self.chance.choice(running(RANK) or [0]), signal.SIGKILL)
        elif name == "docker-run-KILL":
            with_signal(self.chance.choice(running("docker\0run\0") or [0]), signal.SIGKILL)
        elif name.startswith("launcher-"):
            process.send_signal(signal.Signals[f"SIG{name.removeprefix('launcher-')}"])

    def _violations(self, outcome: Outcome) -> Iterator[str]:
        if outcome.code not in self.fault.codes:
            yield f"exit code {outcome.code}, not {' or '.join(map(str, self.fault.codes))}"
        if "internal error of rackrun" in outcome.output:
            yield "a traceback of the launcher"
        deadline = time.monotonic() + 20 * self.slow
        while (containers() or running(RANK)) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield from (f"left: container {name}" for name in containers())
        yield from (f"left: process {pid}" for pid in running(RANK))
        yield from (f"litter: {path}" for path in scratch_folders(self.runs))
        yield from partial_checkpoints(self.runs)
        again = self._launch("true")
        _, err = again.communicate(timeout=120 * self.slow)
        if again.returncode:
            yield f"the next launch: {err.strip()[-300:]}"


def containers() -> list[str]:
    """Return the containers that the daemon knows."""
    output = docker("ps", "--all", "--quiet", "--filter", "name=rackrun-")
    return output.stdout.decode().split()


def running(words: str) -> list[int]:
    """Return the processes of containers, and of `docker run`, with these words."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            if words in line and "-m\0launcher" not in line:
                result.append(int(entry.name))
    return result
