"""Runs in containers that faults happen to: a real Docker daemon, and hosts that use an image."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.lab.fault import LIMITS, Fault, Outcome
from tests.lab.faulty_runs import RANK, Run, partial_files
from tests.lab.faulty_slurm import scratch_folders
from tests.lab.hosts import Lab
from tests.lab.servers import BORROWED, docker, docker_daemon, rank_image


class Containers:
    """A daemon, an image that borrows this machine's programs, and two hosts."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="rackrun-test-", dir="/var/tmp"))
        self.open = contextlib.ExitStack()
        self.open.enter_context(docker_daemon())
        self.image = self.open.enter_context(rank_image())
        self.lab = Lab(self.folder)
        self.lab.ready(2)
        for host in self.lab.hosts:
            socket = os.environ.get("DOCKER_HOST", "")
            (host.folder / ".bashrc").write_text(f"export DOCKER_HOST='{socket}'\n")

    def run(self, fault: Fault, folder: Path, chance: Any, slow: float) -> "ContainerRun":
        """Return a run that is still to be started."""
        return ContainerRun(self, fault, folder, chance, slow)

    def stop(self) -> None:
        """End the hosts, the image and the daemon."""
        self.lab.stop()
        self.open.close()
        shutil.rmtree(self.folder, ignore_errors=True)


class ContainerRun(Run):
    """One run in containers and what happens to it."""

    victim = "127.0.0.3"

    def __init__(
        self, labs: Containers, fault: Fault, folder: Path, chance: Any, slow: float
    ) -> None:
        self.labs, self.fault, self.chance, self.slow = labs, fault, chance, slow
        self.hosts, self.process = labs.lab, None
        self.runs = folder / "runs"

    def __exit__(self, *error: object) -> None:
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
            self.process.communicate()

    def command(self) -> tuple[str, ...]:
        """Return what runs in the containers."""
        return ("--", "python", "-S", RANK, str(self.fault.rank_seconds))

    def launch(self, *options: str, words: tuple[str, ...]) -> Any:
        """Start a launcher."""
        volumes = [arg for folder in BORROWED for arg in ("--volume", f"{folder}:{folder}:ro")]
        hosts = str(self.hosts.write_hosts(f"python={self.hosts.cheap_python()}"))
        image = ("--image", self.labs.image, *volumes)
        return self.hosts.run_ssh(*image, *LIMITS, "--runs", str(self.runs), hosts, *words)

    def processes(self, kind: str) -> list[int]:
        """Return the launcher, or the processes of `docker run`, or those of ranks."""
        if kind == "launcher":
            return [self.process.pid]
        return running("docker\0run\0" if kind == "docker run" else RANK, kind == "rank")

    def docker(self, verb: str) -> None:
        """Kill or pause one of the containers."""
        names = containers()
        docker(verb, self.chance.choice(names) if self.chance else names[0])

    def settle(self, seconds: float) -> None:
        """Wait until no container is left, for so long at most."""
        deadline = time.monotonic() + seconds
        while any(self.left()) and time.monotonic() < deadline:
            time.sleep(0.1)

    def left(self) -> Iterator[str]:
        """Yield what is left of the run."""
        yield from (f"left: container {name}" for name in containers())
        yield from (f"left: process {pid}" for pid in running(RANK))
        yield from scratch_folders(self.runs)

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield checkpoints that are not whole."""
        yield from partial_files(self.runs)


def containers() -> list[str]:
    """Return the containers that the daemon knows."""
    output = docker("ps", "--all", "--quiet", "--filter", "name=rackrun-")
    return output.stdout.decode().split()


def running(part: str, only_python: bool = False) -> list[int]:
    """Return the processes of containers, and of `docker run`, whose command line has this part."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
            is_python = line.startswith(("python\0-S", f"{sys.executable}\0-S"))
            if part in line and "./run-ssh" not in line and (is_python or not only_python):
                result.append(int(entry.name))
    return result
