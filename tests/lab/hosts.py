"""Real sshd on loopback addresses, each with a host key of its own; bench/launch.py uses it too."""

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from rackrun.launcher.run.hosts import Host
from tests.lab import warm
from tests.lab.needs import need
from tests.lab.waiting import until
from tests.lab.warm import ROOT, free_port

BUSY = 4.0
"""How often a promised time may pass in a test: the machine does other things as well."""

FAKE = (sys.executable, "-S", os.fspath(ROOT / "tests" / "lab" / "fake_torchrun.py"))
"""Stands in for `python -m torch.distributed.run`."""

SHORT = ("--lease-seconds", "3", "--checkpoint-seconds", "2")
WAIT = ("--", sys.executable, "-c", "import time; time.sleep(999)")

SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile {folder}/pid
AuthorizedKeysFile {folder}/../authorized_keys
PubkeyAuthentication yes
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM {pam}
StrictModes no
UseDNS no
LogLevel VERBOSE
Subsystem sftp internal-sftp
SetEnv HOME={folder} OMP_NUM_THREADS=1
"""


APART = ("unshare", "--pid", "--fork", "--mount-proc")
"""Gives a host a PID namespace of its own; its sshd is the parent of orphans.

So what is left of a run there can be seen whatever its environment, session or parent is.
"""


@dataclass
class Sshd:
    """One sshd on one loopback address, a child of the test."""

    address: str
    port: int
    folder: Path
    process: "subprocess.Popen[bytes]"
    known_as: str = field(init=False)

    def __post_init__(self) -> None:
        self.known_as = f"[{self.address}]:{self.port}"

    @property
    def host(self) -> Host:
        return Host(self.address, port=self.port, user=getpass.getuser())

    @property
    def line(self) -> str:
        """Return the host as a line of hosts.txt."""
        return f"{getpass.getuser()}@{self.address}:{self.port}"

    @property
    def public_key(self) -> str:
        return " ".join((self.folder / "host_key.pub").read_text().split()[:2])

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    def sessions(self) -> list[int]:
        """Return the pids of the sshd processes that serve a connection."""
        return children(self.process.pid)

    def serving(self) -> list[str]:
        """Return the titles of sshd processes that serve a connection."""
        lines = self.processes().values()
        return [line for line in lines if line.startswith("sshd") and "[listener]" not in line]

    def processes(self) -> dict[int, str]:
        """Return the processes of this host by id: with `APART`, all of them."""
        lines = {pid: command_line(pid) for pid in children(self.process.pid)}
        return {pid: line for pid, line in lines.items() if line}

    def stop(self) -> None:
        for pid in [self.process.pid, *self.sessions()]:  # the daemon first: none comes after
            with_signal(pid, signal.SIGKILL)
        self.process.wait()
        for lock in Path("/tmp").glob(f"rackrun-{self.address}-{self.port}.lock*"):
            # Of an agent that a test killed, if it is not ending; a test may plant a folder.
            if lock.is_dir():
                lock.rmdir()
            else:
                lock.unlink(missing_ok=True)


class Lab:
    """Some sshd, one user key, and the client's files: known_hosts and ssh_config."""

    def __init__(self, folder: Path) -> None:
        need("sshd")
        self.folder = folder
        self.hosts: list[Sshd] = []
        self.key = make_key(folder / "user_key")
        self.known_hosts = folder / "known_hosts"
        self.home = folder / "home"
        self.config = folder / "ssh_config"
        (folder / "authorized_keys").write_text(self.key.with_suffix(".pub").read_text())
        self.configure()

    def configure(self, *lines: str) -> None:
        """Write the ssh_config: the lab's own key and known_hosts, behind the given lines."""
        self.config.write_text(
            "\n".join(lines)
            + f"\nHost *\n  IdentityFile {self.key}\n  IdentityAgent none\n"
            + f"  UserKnownHostsFile {self.known_hosts}\n  GlobalKnownHostsFile /dev/null\n"
        )

    def start(
        self,
        address: str = "",
        extra: str = "",
        command: tuple[str, ...] = (),
        port: int = 0,
        pam: str = "no",
    ) -> Sshd:
        """Start one more sshd; `command` goes before it, such as `ip netns exec NAME`."""
        if command:
            need("root")
        number = len(self.hosts) + 2
        address = address or f"127.0.{number >> 8}.{number & 255}"
        folder = self.folder / f"host-{number}"
        folder.mkdir()
        make_key(folder / "host_key")
        port = port or free_port(address)
        config = folder / "sshd_config"
        about = {"address": address, "port": port, "folder": folder, "pam": pam}
        config.write_text(SSHD_CONFIG.format(**about) + extra)
        with (folder / "log").open("wb") as log:
            sshd = [*command, sshd_path(), "-D", "-e", "-f", os.fspath(config)]
            process = subprocess.Popen(sshd, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        self.hosts.append(Sshd(address, port, folder, process))
        return self.hosts[-1]

    def trust(self) -> None:
        """Write every host's key into known_hosts."""
        lines = [f"{host.known_as} {host.public_key}\n" for host in self.hosts]
        self.known_hosts.write_text("".join(lines))

    def write_hosts(self, *settings: str) -> Path:
        """Write hosts.txt: the settings of the first, second, ... host, then the last again."""
        path = self.folder / "hosts.txt"
        padded = [*settings, *[(settings or ("",))[-1]] * len(self.hosts)]
        pairs = zip(self.hosts, padded, strict=False)
        lines = [f"{self.line_of(host)} {more}\n" for host, more in pairs]
        path.write_text("".join(lines))
        return path

    def line_of(self, host: Sshd) -> str:
        """Return the line of a host in hosts.txt."""
        return host.line

    def cheap_python(
        self, torch: str = "2.0", name: str = "python", trains: bool = False, cuda: str = ""
    ) -> Path:
        """Write an interpreter with a stand-in for torchrun and a given torch; it starts in 0.1 s.

        One that `trains` has imported torch when it runs a module.
        """
        path = self.folder / name
        described = f'{{"version": "3.11.7", "torch": "{torch}", "cuda": "{cuda}"}}'
        path.write_text(
            "#!/bin/sh\n"
            'case "$1 $2" in\n-c*torch.distributed.run*|-uc*torch.distributed.run*)\n'
            f'shift 2; exec {shlex.join(FAKE)} "$@";;\n'
            f"-c*importlib.util*) echo '{described}'; exit;; esac\n"
            f'exec {warm.interpreter() if trains else sys.executable} "$@"\n'
        )
        path.chmod(0o755)
        return path

    def cheap_hosts(self, *settings: str) -> str:
        """Write hosts.txt with `cheap_python` for each host; return its path."""
        python = f"python={self.cheap_python()}"
        return str(self.write_hosts(*[f"{python} {more}" for more in settings or ("",)]))

    def run_folder(self) -> Path:
        """Return the folder of the only run."""
        (folder,) = (self.folder / "runs").glob("2*")
        return folder

    def result(self) -> dict[str, Any]:
        """Return the result of the only run."""
        return dict(json.loads((self.run_folder() / "result.json").read_text()))

    def of_the_run(self) -> dict[int, str]:
        """Return the run's processes on all hosts: below an sshd, or started with the run's id."""
        plan = json.loads((self.run_folder() / "plan.json").read_text())
        below = {pid for host in self.hosts for pid in host.processes()}
        marked = processes_with(f"RACKRUN_RUN_ID={plan['run_id']}")
        return {pid: command_line(pid) for pid in below | marked.keys() if command_line(pid)}

    def started(self, ranks: int) -> dict[int, str]:
        """Wait until that many ranks of `WAIT` sleep; return the processes of the run."""
        runs = self.folder / "runs"
        until(lambda: runs.exists() and any(runs.glob("2*")), "a run folder is made", 20)
        until((self.run_folder() / "plan.json").exists, "the plan is written", 20)

        def sleeping() -> list[str]:
            lines = self.of_the_run().values()
            return [line for line in lines if line.endswith("sleep(999)\0")]

        until(lambda: len(sleeping()) == ranks, f"{ranks} ranks run", 60)
        return self.of_the_run()

    def run_ssh(
        self, *args: str, verb: tuple[str, ...] = (), **more: Any
    ) -> "subprocess.Popen[str]":
        """Start `./run-ssh` with the lab's ssh_config."""
        return self.launcher(*verb, "--ssh-config", os.fspath(self.config), *args, **more)

    def typed(self, *args: str, **more: Any) -> "subprocess.Popen[str]":
        """Start the same with the lab's settings in ~/.ssh/config."""
        (self.home / ".ssh").mkdir(parents=True, exist_ok=True)
        shutil.copy(self.config, self.home / ".ssh" / "config")
        return self.launcher(*args, **more)

    def launcher(
        self,
        *args: str,
        cwd: Path | None = None,
        before: tuple[str, ...] = (),
        python: str = sys.executable,
        **more: Any,
    ) -> "subprocess.Popen[str]":
        """Start `./run-ssh` as a child with readable output; `before` precedes this Python.

        Its home is the lab's, so that no run is remembered in the home of the tests.
        """
        arguments = ["-m", "rackrun", "./run-ssh", *args]
        variables = {"PYTHONPATH": os.fspath(ROOT), "HOME": os.fspath(self.home)}
        options = {
            "cwd": cwd or self.folder,
            "env": {**os.environ, **variables, **more.pop("env", {})},
            "stdin": subprocess.DEVNULL,
            **dict.fromkeys(("stdout", "stderr"), subprocess.PIPE),
            "text": True,
            "errors": "replace",
            **more,
        }
        if before:
            return subprocess.Popen([*before, python, *arguments], **options)
        return warm.Launcher(*arguments, **options)

    def result_of(self, *args: str, **more: Any) -> tuple[int, str, str]:
        """Run `./run-ssh`; return exit code, output and errors."""
        process = self.run_ssh(*args, **more)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    def ready(self, count: int, **options: Any) -> "Lab":
        """Start `count` sshd, as `start` does, wait until they answer, and make them known."""
        started = [self.start(**options) for _ in range(count)]
        for host in started:
            wait_for_banner(host.address, host.port)
        # Else the process that answered may count as one that was there before a test's run.
        until(lambda: not any(host.serving() for host in started), "every sshd is idle", 20)
        self.trust()
        return self

    def stop(self) -> None:
        for host in self.hosts:
            host.stop()


def make_key(path: Path) -> Path:
    """Make an ed25519 key pair without a passphrase."""
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return path


def sshd_path() -> str:
    result = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    assert result, "tests/machine.sh installs openssh-server"
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    return result


def wait_for_banner(address: str, port: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with socket.create_connection((address, port), timeout=5) as sock:
                if sock.recv(4) == b"SSH-":
                    return
        except OSError:
            pass
        assert time.monotonic() < deadline, f"no sshd at {address}:{port}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the pids below `pid`, zombies left out."""
    result = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                result += [process.pid] * (process.status() != psutil.STATUS_ZOMBIE)
    return result


def processes_with(variable: str) -> dict[int, str]:
    """Return ids and command lines of the processes whose environment has this `NAME=value`."""
    name, _, value = variable.partition("=")
    lines = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended meanwhile
            if process.environ().get(name) == value:
                lines[process.pid] = " ".join(process.cmdline())
    return lines


def users() -> set[str]:
    """Return the names of the users that have processes."""
    return {process.info["username"] for process in psutil.process_iter(["username"])}


def parent_of(pid: int) -> int:
    """Return the parent of a process; 0 when it is gone."""
    try:
        return psutil.Process(pid).ppid()
    except psutil.NoSuchProcess:
        return 0


def command_line(pid: int) -> str:
    """Return the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""


def peak_mib(pid: int) -> float:
    """Return the peak memory of a process; rusage would include its parent's at the fork."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def with_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def user() -> str:
    """Return the name of the account: another one in each process that runs tests."""
    return f"rackrun{os.getpid()}"


def root(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
