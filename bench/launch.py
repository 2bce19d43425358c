"""Measure how fast launches are, beside peers that only start `python3 -c ...` on every host.

    python -m bench.launch [HOSTS...]

Seconds from the command until torchrun runs on the last host (a shell script stands in for it,
whose first line marks the moment), checks of the hosts included. In turn with it: OpenSSH clients
in a shell loop (also with the cheapest key exchange), pdsh (apt-get install pdsh), parallel-ssh,
torchrunx until the last of its agents is started (a shell script stands in for them), and rackrun's
bare channels, which show what logins and a Python for each host cost at least.

PEERS names the Python of an environment with parallel-ssh and torchrunx:
python3 -m venv /tmp/peers && /tmp/peers/bin/pip install parallel-ssh torchrunx
To run at all, torchrunx needs more than SSH: torch and itself on every host, in the same place as
here, and TCP from every host to two open ports of the launcher's machine. It takes hosts on
loopback for its own machine and starts no SSH there: it is patched.

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
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.ssh import ConnectSettings, Machine, Network
from tests.lab.hosts import Lab
from tests.lab.waiting import until

ROUNDS = 3

REAL_START = ("env",)
"""Before a command: starts Python anew, where tests fork one that has imported the launcher."""

NOW = "import time; print(time.time())"

PARALLEL_SSH = """\
import sys
from pssh.clients import ParallelSSHClient
from pssh.config import HostConfig
key, command, *hosts = sys.argv[1:]
names, ports = zip(*(host.rsplit(":", 1) for host in hosts))
client = ParallelSSHClient(
    list(names), host_config=[HostConfig(port=int(port)) for port in ports], pkey=key,
    pool_size=len(names), allow_agent=False,
)
for answer in client.run_command(command):
    print(*answer.stdout)
"""

TORCHRUNX = """\
import ipaddress, sys, torchrunx
ipaddress.IPv4Address.is_loopback = False
config, sys.executable, *hosts = sys.argv[1:]
torchrunx.Launcher(hosts, workers_per_host=1, backend="gloo", ssh_config_file=config).run(print)
"""


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
    if name in PEERS:
        command = [os.environ.get("PEERS", "false"), "-c", f"import {PEERS[name]}"]
        return not subprocess.run(command, stderr=subprocess.DEVNULL).returncode
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
    return latest_time_of(
        ["pdsh", "-R", "ssh", "-f", str(count), "-N", "-w", names, REMOTE],
        PDSH_SSH_ARGS_APPEND=f"-F {lab.config}",
    )


def start_with_parallel_ssh(lab: Lab, count: int) -> float:
    """Time parallel-ssh, which checks no host keys, up to the last remote program."""
    hosts = [f"{host.address}:{host.port}" for host in lab.hosts[:count]]
    return latest_time_of([os.environ["PEERS"], "-c", PARALLEL_SSH, str(lab.key), REMOTE, *hosts])


def start_with_torchrunx(lab: Lab, count: int) -> float:
    """Time torchrunx, which checks no host keys, up to its last agent."""
    agent = lab.folder / "torchrunx-agent"
    agent.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --hostname ]; do shift; done; : > {lab.folder}/started-"$2"\n'
    )
    agent.chmod(0o755)
    names = [host.address for host in lab.hosts[:count]]
    began = time.time()
    process = subprocess.Popen(
        [os.environ["PEERS"], "-c", TORCHRUNX, str(lab.config), str(agent), *names],
        cwd=lab.folder,  # where it keeps logs
        start_new_session=True,
    )
    last = last_start(lab, count)
    os.killpg(process.pid, signal.SIGKILL)  # it waits for its agents, and has a child that logs
    process.wait()
    return last - began


def latest_time_of(command: list[str], **variables: str) -> float:
    """Return the seconds from the start of a command to the latest of the times that it prints."""
    began = time.time()
    process = subprocess.run(
        command, env={**os.environ, **variables}, stdout=subprocess.PIPE, text=True, check=True
    )
    return max(map(float, process.stdout.split())) - began


def start_on_bare_channels(lab: Lab, count: int) -> float:
    """Time bare channels from the first login on: no launcher can do less on these hosts."""
    began = time.time()
    network = Network(ConnectSettings(config=lab.config))
    machines = network.connect([host.host for host in lab.hosts[:count]])

    def time_on(machine: Machine) -> float:
        channel = machine.open(["python3", "-I", "-S", "-c", NOW])
        output = b"".join(iter(channel.receive, b""))
        channel.close()
        return float(output)

    last = max(moment for moment in each(time_on, machines) if isinstance(moment, float))
    network.close()
    return last - began


def stand_in(lab: Lab, torchrun: str) -> Path:
    """Return an interpreter whose torchrun is a line of shell; $4 is --node-rank=N."""
    path = lab.cheap_python()
    text = path.read_text()
    start = text.index("shift 2; exec")
    path.write_text(f"{text[:start]}{torchrun};;\n{text[text.index('-c*importlib') :]}")
    return path


REMOTE = f"python3 -I -S -c '{NOW}'"

PEERS = {"parallel-ssh": "pssh", "torchrunx": "torchrunx"}
"""What the Python that PEERS names has to import for a contestant."""

CONTESTANTS: dict[str, Callable[[Lab, int], float]] = {
    "run-ssh": start_with_run_ssh,
    "ssh loop": start_with_ssh,
    "ssh, curve25519": start_with_cheap_ssh,
    "pdsh": start_with_pdsh,
    "parallel-ssh": start_with_parallel_ssh,
    "torchrunx": start_with_torchrunx,
    "bare channels": start_on_bare_channels,
}

if __name__ == "__main__":
    run(main)
