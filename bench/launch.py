"""Measure how fast and how light a launch is.

    python -m bench.launch [starts|step|task|output|idle] [HOSTS...]

starts  seconds from the command until torchrun runs on the last host (a shell script stands in for
        it, whose first line marks the moment), checks of the hosts included; interleaved with
        peers that only start `python3 -c ...` there:
        OpenSSH clients in a shell loop (also with the cheapest key exchange), pdsh (apt-get install
        pdsh), parallel-ssh, torchrunx until the last of its agents is started (a shell script
        stands in for them), and rackrun's bare channels, which show what logins and a Python for
        each host cost at least. PEERS names the Python of an environment with those two:
        python3 -m venv /tmp/peers && /tmp/peers/bin/pip install parallel-ssh torchrunx
        To run at all, torchrunx needs more than SSH: torch and itself on every host, in the
        same place as here, and TCP from every host to two open ports of the launcher's machine.
        It takes hosts on loopback for its own machine and starts no SSH there: it is patched
step    seconds from the command to the first all-reduce on two hosts, against two torchruns that
        are started by hand
task    seconds from ./run-local to the first step of cats and dogs, and the CPU seconds of the
        whole run, for each number of ranks
output  16 ranks of 20 MB each, against a plain copy of as many bytes over bare channels
idle    CPU time and memory of a launcher that waits for that many hosts

All hosts are real sshd on loopback addresses of this machine, so clients and servers share it.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Literal

import psutil

from bench.turns import in_turn
from bench.usage import cpu_seconds
from rackrun.commandline.options import Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.ssh import ConnectSettings, Machine, Network
from rackrun.units import plural
from tests.lab.hosts import ROOT, Lab, children, free_port
from tests.lab.waiting import until

ROUNDS = 3
STEP_ROUNDS = 15
OUTPUT_BYTES = 20_000_000
IDLE_SECONDS = 20.0

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

FIRST_STEP = """\
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    open(sys.argv[1], "w").write(str(time.time()))
dist.destroy_process_group()
os._exit(0)
"""


@dataclass(frozen=True)
class Settings:
    """How fast and how light a launch is."""

    what: Positional[Literal["starts", "step", "task", "output", "idle"]] = "starts"
    """What to measure."""
    hosts: Positional[tuple[int, ...]] = ()
    """How many hosts, or ranks of a task; starts and task measure each of these numbers."""


def main(args: list[str]) -> None:
    """Measure one thing in a lab of its own."""
    settings = parse(Settings, "python -m bench.launch", args)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # only the first launch compiles the launcher
    with tempfile.TemporaryDirectory(prefix="bench-launch-") as folder:
        lab = Lab(Path(folder))
        try:
            MEASUREMENTS[settings.what](lab, settings.hosts)
        finally:
            lab.stop()


def starts(lab: Lab, counts: tuple[int, ...]) -> None:
    """Print the seconds until the last torchrun runs, for each number of hosts."""
    counts = counts or (1, 4, 16, 64)
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


def step(lab: Lab, counts: tuple[int, ...]) -> None:
    """Print the seconds until the first all-reduce on two hosts."""
    lab.ready(2)
    script, mark = lab.folder / "step.py", lab.folder / "first-step"
    script.write_text(FIRST_STEP)
    hosts = lab.write_hosts(f"python={sys.executable}")

    def first_step(run: Callable[[], None]) -> float:
        subprocess.run([sys.executable, "-c", "import torch"], check=True)  # into the page cache
        began = time.time()
        run()
        return float(mark.read_text()) - began

    runs = {
        "run-ssh": partial(step_with_run_ssh, lab, hosts, script, mark),
        "by hand": partial(step_by_hand, script, mark),
    }
    ways = {name: partial(first_step, run) for name, run in runs.items()}
    ours, theirs = in_turn(STEP_ROUNDS, ways).values()
    print(f"run-ssh {median(ours):.2f} s, by hand {median(theirs):.2f} s")
    later = sorted(seconds - by_hand for seconds, by_hand in zip(ours, theirs, strict=True))
    print(f"later by {median(later):.2f} s ({later[0]:.2f} to {later[-1]:.2f})")


def step_with_run_ssh(lab: Lab, hosts: Path, script: Path, mark: Path) -> None:
    """Start two ranks by ./run-ssh."""
    command = (sys.executable, str(script), str(mark))
    process = lab.typed(str(hosts), "--", *command, before=REAL_START)
    _, complaint = process.communicate()
    assert process.returncode == 0, complaint


def step_by_hand(script: Path, mark: Path) -> None:
    """Start two ranks by two torchruns, as one would type them in two terminals."""
    port = free_port("127.0.0.1")
    common = ["--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    runs = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *common, f"--master-port={port}"]
            + [f"--node-rank={node}", str(script), str(mark)],
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
            start_new_session=True,
        )
        for node in range(2)
    ]
    assert not any(run.wait() for run in runs)


def task(lab: Lab, counts: tuple[int, ...]) -> None:
    """Print how long a task takes to start."""
    demo = [sys.executable, "-m", "rackrun.catdog", "demo", str(lab.folder), "--images", "400"]
    subprocess.run(demo, check=True, stdout=subprocess.DEVNULL)
    print(f"seconds until the first step (CPU of the whole run), medians of {ROUNDS}")
    for count in counts or (1, 2):
        costs = [start_task(lab, count) for _ in range(ROUNDS)]
        wall, cpu = (median(column) for column in zip(*costs, strict=True))
        print(f"{plural(count, 'rank')}: {wall:.2f} ({cpu:.1f})", flush=True)


def start_task(lab: Lab, count: int) -> tuple[float, float]:
    """Return the seconds until the first step was written down, and the CPU seconds of all."""
    runs = lab.folder / "runs"
    options = ["--nproc", str(count), "--runs", str(runs)]
    options += ["catdog", "--data", str(lab.folder / "shards"), "--recipe", "demo", "--epochs", "1"]
    command = [
        sys.executable,
        "-m",
        "rackrun.launcher",
        "local",
        *options,
        "--log-every-steps",
        "1",
    ]
    cpu, began = sum(os.times()[2:4]), time.monotonic()
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        until(lambda: any(has_text(path) for path in runs.glob("2*/metrics.jsonl")), "a step", 120)
        seconds = time.monotonic() - began
    assert run.returncode == 0
    shutil.rmtree(runs)
    return seconds, sum(os.times()[2:4]) - cpu


def has_text(path: Path) -> bool:
    """Return whether there is something in a file."""
    return path.stat().st_size > 0


def output(lab: Lab, counts: tuple[int, ...]) -> None:
    """Print how long much output takes, and a bare copy of it, each without its start and end."""
    count = counts[0] if counts else 16
    lab.ready(count)
    code = f"import sys; sys.stdout.write(({'x' * 99!r} + chr(10)) * {OUTPUT_BYTES // 100})"
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    ways: dict[str, Callable[[str], float]] = {
        "bare channels, into files": partial(copy_over_channels, lab),
        "run-ssh, into logs": partial(copy_over_run_ssh, lab, hosts, "/dev/null"),
        "run-ssh, into logs and a file": partial(
            copy_over_run_ssh, lab, hosts, str(lab.folder / "screen")
        ),
    }
    pairs = {name: partial(lambda way: (way(code), way("pass")), way) for name, way in ways.items()}
    print(f"{count} x {OUTPUT_BYTES / 1e6:.0f} MB (seconds, medians)")
    for name, taken in in_turn(ROUNDS, pairs).items():
        seconds, empty = (median(column) for column in zip(*taken, strict=True))
        print(f"{name:30} {seconds:5.2f}, of which start and end {empty:5.2f}")


def copy_over_run_ssh(lab: Lab, hosts: Path, screen: str, code: str) -> float:
    """Time the output of ranks through ./run-ssh."""
    began = time.monotonic()
    with Path(screen).open("w") as file:
        command = (sys.executable, "-c", code)
        process = lab.run_ssh(str(hosts), "--", *command, before=REAL_START, stdout=file)
        _, complaint = process.communicate()
    assert process.returncode == 0, complaint
    taken = time.monotonic() - began
    shutil.rmtree(lab.folder / "runs")  # or the disk would still be busy with it the next time
    return taken


def copy_over_channels(lab: Lab, code: str) -> float:
    """Time the same bytes through bare channels into files, with login and the start of Python."""
    began = time.monotonic()
    network = Network(ConnectSettings(config=lab.config))
    machines = network.connect([host.host for host in lab.hosts])

    def copy(number: int) -> None:
        channel = machines[number].open([sys.executable, "-c", code])
        with (lab.folder / f"copy-{number}").open("wb") as file:
            while data := channel.receive():
                file.write(data)
        channel.close()
        (lab.folder / f"copy-{number}").unlink()

    threads = [threading.Thread(target=copy, args=(number,)) for number in range(len(machines))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    network.close()
    return time.monotonic() - began


def idle(lab: Lab, counts: tuple[int, ...]) -> None:
    """Print what a launcher costs while its ranks sleep."""
    count = counts[0] if counts else 128
    lab.ready(count)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    process = lab.run_ssh(str(hosts), "--", "sleep", "999", before=REAL_START)

    def all_sleep() -> bool:
        return all(len(children(host.process.pid)) > 4 for host in lab.hosts)

    until(all_sleep, "all ranks sleep", 180)
    before = cpu_seconds(process.pid)[0]
    time.sleep(IDLE_SECONDS)
    used = cpu_seconds(process.pid)[0] - before
    memory = psutil.Process(process.pid).memory_info().rss
    print(f"{count} hosts: {100 * used / IDLE_SECONDS:.1f} % of a core, {memory / 1e6:.0f} MB")
    process.send_signal(signal.SIGINT)
    process.communicate()


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

MEASUREMENTS: dict[str, Callable[[Lab, tuple[int, ...]], None]] = {
    "starts": starts,
    "step": step,
    "task": task,
    "output": output,
    "idle": idle,
}

if __name__ == "__main__":
    run(main)
