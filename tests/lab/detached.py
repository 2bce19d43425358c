"""A detached run on hosts that are really one machine, and machines from which to look at it."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from rackrun.launcher.remote import run_manager
from tests.lab.hosts import Lab, Sshd, children, processes_with, with_signal
from tests.lab.waiting import until

SHORT = ("--lease-seconds", "3", "--checkpoint-seconds", "5")
SHORT += ("--detach-seconds", "0")
WAIT = "import time; print('here', flush=True); time.sleep(999)"
RANK = f"{sys.executable} -c"


class DetachedLab:
    """A detached run on three hosts, and machines from which to look at it."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.work = lab.folder / "work"
        self.work.mkdir()
        self.home = self.machine("started-here")
        settings = f"python={lab.cheap_python()} workdir={self.work} slots=1"
        self.hosts = str(lab.write_hosts(settings))
        self.run = ""

    def machine(self, name: str) -> Path:
        """Return another machine's home: with keys for the hosts, without records of any run."""
        home = self.lab.folder / name
        home.mkdir()
        return home

    def detach(self, *args: str, **more: Any) -> str:
        """Start a run, and wait until nothing of the launcher is left."""
        options = {"env": {"HOME": str(self.home), **more.pop("env", {})}, "cwd": self.home}
        code, out, err = self.lab.result_of("--detach", *SHORT, *args, **options, **more)
        assert code == 0, err
        self.run = out.strip()
        assert re.fullmatch("[0-9a-f]{8}", self.run)
        return self.run

    def start(self, verb: str, *args: str, home: Path | None = None) -> "subprocess.Popen[str]":
        """Start `./run-ssh VERB RUN-ID`, here or on another machine."""
        where = home or self.home
        hosts = ("--hosts", self.hosts) if where != self.home else ()
        env = {"HOME": str(where)}
        arguments = (*hosts, *args, self.run)
        return self.lab.run_ssh(*arguments, verb=(verb,), cwd=where, env=env)

    def result_of(self, verb: str, *args: str, home: Path | None = None) -> tuple[int, str, str]:
        process = self.start(verb, *args, home=home)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def status(self, home: Path | None = None) -> dict[str, Any]:
        code, out, err = self.result_of("status", "--json", home=home)
        assert code == 0, err
        return dict(json.loads(out))

    @property
    def state(self) -> Path:
        """Return the folder of the controller on the first host."""
        return self.lab.hosts[0].folder / ".rackrun" / self.run

    @property
    def folder(self) -> Path:
        """Return the run folder of the newest attempt on the hosts, which share it here."""
        return sorted((self.work / "runs").glob("2*"))[-1]

    def processes(self) -> dict[int, str]:
        """Return the run's processes on all hosts: controller, relays, agents, ranks."""
        return {pid: line for host in self.lab.hosts for pid, line in self.on(host).items()}

    def on(self, host: Sshd) -> dict[int, str]:
        """Return the run's processes on one host."""
        below = children(host.process.pid)
        processes = processes_with(f"HOME={host.folder}").items()
        return {pid: line for pid, line in processes if pid not in below}

    def controller(self) -> int:
        return run_manager.controller_of(self.run)

    def relays(self) -> list[int]:
        """Return relays and their carriers on all hosts, the older first."""
        return [pid for pid in run_manager.our_pids() if run_manager.is_relay(pid, self.run)]

    def wait_for_ranks(self, count: int) -> None:
        def ranks() -> list[str]:
            return [line for line in self.processes().values() if line.startswith(RANK)]

        until(lambda: len(ranks()) == count, f"{count} ranks run", 60)

    def kill(self) -> None:
        for pid in self.processes():
            with_signal(pid, signal.SIGKILL)

    def wait_until_clean(self, seconds: float = 20) -> None:
        until(lambda: not self.processes(), "nothing is left", seconds)
