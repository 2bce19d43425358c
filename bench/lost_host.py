"""Measure how long a run stands still when it loses a host.

    sudo .venv/bin/python -m bench.lost_host [--hosts 4] [--rounds 10]

Hosts are network namespaces of this machine, each with an sshd, a name and a cable. In each round,
catdog trains on all of them, the cable of the last host is pulled after some steps, and the others
continue. The seconds are those of `events.jsonl`: from the loss, which is noticed after
`--lease-seconds` of silence, to the first step after it. torchrun and torch are the real ones, so
each rank has started Python anew, imported torch and joined the others. All hosts share the cores
of this machine.
"""

import json
import math
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.commandline.ranges import Between
from tests.lab.data import drawn_shards
from tests.lab.network import NetLab, net_labs
from tests.lab.waiting import until

IMAGES = 400
LEASE_SECONDS = 3
STARTED_WITHIN, CONTINUED_WITHIN = 120.0, 120.0
TASK = ("catdog", "--data", "shards", "--exact-epochs", "--epochs", "999", "--workers", "0")
SMALL = ("--image-size", "32", "--width", "4", "--global-batch", "8", "--log-every-steps", "1")
LIMITS = ("--lease-seconds", str(LEASE_SECONDS), "--max-restarts", "1", "--min-hosts", "1")
ALIKE = ("--no-serve", "--ignore-check", "code")  # the folders of hosts hold links to the shards


@dataclass(frozen=True)
class Settings:
    """How long a run stands still when it loses a host."""

    hosts: Annotated[int, Between(2, 16)] = 4
    """Hosts that train until one of them is lost."""
    rounds: Annotated[int, Between(1)] = 10
    """Runs that lose a host."""


def main(args: list[str]) -> None:
    """Print the seconds of each round from the loss to the next step, and their median."""
    settings = parse(Settings, "python -m bench.lost_host", args)
    seconds = []
    with tempfile.TemporaryDirectory(prefix="bench-lost-") as folder:
        shards = drawn_shards(Path(folder), IMAGES)
        for number in range(settings.rounds):
            with net_labs(Path(folder) / f"lab-{number}") as make:
                seconds.append(seconds_until_the_next_step(make(settings.hosts), shards))
            print(f"round {number + 1}: {seconds[-1]:.1f} s", flush=True)
    print(f"{settings.hosts} hosts: {median(seconds):.1f} s, median of {settings.rounds}")


def seconds_until_the_next_step(lab: NetLab, shards: Path) -> float:
    """Return the time from the loss of the last host to the next step of the others."""
    disks = [lab.folder / f"disk-{number}" for number in range(1, len(lab.hosts) + 1)]
    for disk in (lab.folder, *disks):
        disk.mkdir(exist_ok=True)
        (disk / "shards").symlink_to(shards)
    hosts = lab.write_hosts(*(f"python={sys.executable} workdir={disk}" for disk in disks))
    launch = lab.run_ssh(*LIMITS, *ALIKE, str(hosts), *TASK, *SMALL)
    until(lambda: steps(lab) > 10, "all train", STARTED_WITHIN)
    lab.pull_cable(len(lab.hosts))
    until(lambda: pause(lab) is not None, "the others continue", CONTINUED_WITHIN)
    launch.send_signal(signal.SIGINT)
    launch.communicate()
    seconds = pause(lab)
    assert seconds is not None
    return seconds


def pause(lab: NetLab) -> float | None:
    """Return the seconds from the loss to the next step, None until then."""
    (path,) = lab.folder.glob("runs/2*/events.jsonl")
    events = [json.loads(line) for line in path.read_text().splitlines(True) if line[-1] == "\n"]
    lost = next((event["time"] for event in events if event["event"] == "lost"), math.inf)
    trained = (event["time"] for event in events if event.get("phase") == "train")
    return next((seconds - lost for seconds in trained if seconds > lost), None)


def steps(lab: NetLab) -> int:
    """Return how many steps the first host has logged."""
    logs = (lab.folder / "disk-1").glob("runs/2*/metrics.jsonl")
    return sum(path.read_text().count('"step"') for path in logs)


if __name__ == "__main__":
    run(main)
