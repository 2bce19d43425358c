"""Measure how fast launches are, beside peers that only start `python3 -c ...` on every host.

    python -m bench.launch [HOSTS...]

Seconds from the command until torchrun runs on the last host (a shell script stands in for it,
whose first line marks the moment), checks of the hosts included. In turn with it: OpenSSH clients
in a shell loop (also with the cheapest key exchange), and pdsh (apt-get install pdsh).

All hosts are real sshd on loopback addresses of this machine, so clients and servers share it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

from bench.turns import in_turn
from rackrun.commandline.options import Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from tests.lab.hosts import Lab
from tests.lab.waiting import until

ROUNDS = 3

REAL_START = ("env",)
"""Before a command: starts Python anew, where tests fork one that has imported the launcher."""

NOW = "import time; print(time.time())"


@dataclass(frozen=True)
class Settings:
    """How fast a launch is."""

    hosts: Positional[tuple[int, ...]] = (1, 4, 16, 64)
    """How many hosts: each of these numbers is measured."""


def main(args: list[str]) -> None:
    """Print the seconds until the last torchrun runs, for each number of hosts."""
    counts = parse(Settings, "python -m bench.launch", args).hosts
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # only the first launch compiles the launcher
    with tempfile.TemporaryDirectory(prefix="bench-launch-") as folder:
        lab = Lab(Path(folder))
        try:
            measure(lab, counts)
        finally:
            lab.stop()


def measure(lab: Lab, counts: tuple[int, ...]) -> None:
    """Measure all contestants that are on this machine."""
    lab.ready(max(counts))
    lab.configure(*(f"Host {host.address}\n  Port {host.port}" for host in lab.hosts))
    installed = {name: start for name, start in CONTESTANTS.items() if is_there(name)}
    print(f"seconds, medians of {ROUNDS}; in brackets: times run-ssh")
    print(f"hosts  {'  '.join(f'{name:>16}' for name in installed)}")
    for count in counts:
        ways = {name: partial(start, lab, count) for name, start in installed.items()}
        seconds = {name: median(taken) for name, taken in in_turn(ROUNDS, ways).items()}
        ours = seconds["run-ssh"]
        shown = (f"{taken:7.2f} ({taken / ours:6.2f})" for taken in seconds.values())
        print(f"{count:5}  {'  '.join(shown)}", flush=True)


def is_there(name: str) -> bool:
    """Return whether a contestant is on this machine."""
    return name != "pdsh" or shutil.which("pdsh") is not None


def start_with_run_ssh(lab: Lab, count: int) -> float:
    """Time ./run-ssh, its checks of the hosts included, up to the last torchrun."""
    python = stand_in(lab, f': > {lab.folder}/started-"${{4#*=}}"; exec sleep 999')
    hosts = lab.write_hosts(f"python={python}")
    hosts.write_text("".join(hosts.read_text().splitlines(keepends=True)[:count]))
    began = time.time()
    process = lab.typed(str(hosts), "--", "true", before=REAL_START)
    last = last_start(lab, count)
    process.send_signal(signal.SIGINT)
    process.communicate()
    return last - began


def last_start(lab: Lab, count: int) -> float:
    """Return when the last of the hosts left its mark; remove all marks."""
    until(lambda: len(list(lab.folder.glob("started-*"))) == count, "all are started", 120)
    marks = list(lab.folder.glob("started-*"))
    last = max(mark.stat().st_mtime for mark in marks)
    for mark in marks:
        mark.unlink()
    return last


def start_with_ssh(lab: Lab, count: int, *options: str) -> float:
    """Time ssh clients, one for each host and all at once, which check nothing."""
    began = time.time()
    clients = [
        subprocess.Popen(
            ["ssh", "-F", str(lab.config), "-o", "BatchMode=yes", *options, host.address, REMOTE],
            stdout=subprocess.PIPE,
            text=True,
        )
        for host in lab.hosts[:count]
    ]
    return max(float(client.communicate()[0]) for client in clients) - began


def start_with_cheap_ssh(lab: Lab, count: int) -> float:
    """Time the same with the cheapest key exchange, which is ours as well."""
    return start_with_ssh(lab, count, "-o", "KexAlgorithms=curve25519-sha256")


def start_with_pdsh(lab: Lab, count: int) -> float:
    """Time pdsh over ssh up to the last remote program."""
    names = ",".join(host.address for host in lab.hosts[:count])
    began = time.time()
    printed = subprocess.run(
        ["pdsh", "-R", "ssh", "-f", str(count), "-N", "-w", names, REMOTE],
        env={**os.environ, "PDSH_SSH_ARGS_APPEND": f"-F {lab.config}"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout
    return max(map(float, printed.split())) - began


def stand_in(lab: Lab, torchrun: str) -> Path:
    """Return an interpreter whose torchrun is a line of shell; $4 is --node-rank=N."""
    path = lab.cheap_python()
    text = path.read_text()
    start = text.index("shift 2; exec")
    path.write_text(f"{text[:start]}{torchrun};;\n{text[text.index('-c*importlib') :]}")
    return path


REMOTE = f"python3 -I -S -c '{NOW}'"

CONTESTANTS: dict[str, Callable[[Lab, int], float]] = {
    "run-ssh": start_with_run_ssh,
    "ssh loop": start_with_ssh,
    "ssh, curve25519": start_with_cheap_ssh,
    "pdsh": start_with_pdsh,
}

if __name__ == "__main__":
    run(main)
