"""A detached run on hosts that are really one machine, and the commands that look at it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.lab.hosts import Lab, Sshd, processes_with, with_signal
from tests.lab.waiting import until

SHORT = ("--lease-seconds", "3", "--checkpoint-seconds", "5")
WAIT = "import time; print('here', flush=True); time.sleep(999)"
RANK = f"{sys.executable} -c"


class DetachedLab:
    """A detached run on some hosts, started in a folder of its own."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.work = lab.folder / "work"
        self.work.mkdir()
        self.home = lab.folder / "started-here"
        self.home.mkdir()
        settings = f"python={lab.cheap_python()} workdir={self.work} slots=1"
        self.hosts = str(lab.write_hosts(settings))
        self.run = ""

    def detach(self, *args: str, **more: Any) -> str:
        """Start a run, and wait until nothing of what was typed is left."""
        code, out, err = self.start_detached("0", *args, **more).wait_for_end()
        assert code == 0, err
        self.run = out.strip()
        assert re.fullmatch("[0-9a-f]{8}", self.run)
        return self.run

    def start_detached(self, seconds: str, *args: str, **more: Any) -> "Typed":
        """Type `--detach`; a command has to run for so many seconds."""
        options = {"env": {"HOME": str(self.home), **more.pop("env", {})}, "cwd": self.home, **more}
        words = ("--detach", "--detach-seconds", seconds, *SHORT, *args)
        return Typed(self.lab.run_ssh(*words, start_new_session=True, **options))

    def start(self, verb: str, *args: str, **more: Any) -> "subprocess.Popen[str]":
        """Start `./run-ssh VERB RUN-ID`."""
        env = {"HOME": str(self.home), **more.pop("env", {})}
        words = (*args, self.run)
        return self.lab.run_ssh(*words, verb=(verb,), cwd=self.home, env=env, **more)

    def result_of(self, verb: str, *args: str) -> tuple[int, str, str]:
        """Type `./run-ssh VERB RUN-ID`; return exit code, output and errors."""
        return Typed(self.start(verb, *args)).wait_for_end()

    def status(self) -> dict[str, Any]:
        code, out, err = self.result_of("status", "--json")
        assert code == 0, err
        return dict(json.loads(out))

    def wait_for_states(self, *states: str) -> None:
        """Wait until `status` shows these states of the hosts."""

        def shown() -> tuple[str, ...]:
            return tuple(host["state"] for host in self.status()["hosts"])

        until(lambda: shown() == states, f"{states} are shown", 60)

    @property
    def folder(self) -> Path:
        """Return the run folder of the newest attempt."""
        return sorted((self.home / "runs").glob("2*"))[-1]

    def processes(self) -> dict[int, str]:
        """Return the run's processes on all hosts: agents and ranks."""
        return {pid: line for host in self.lab.hosts for pid, line in self.on(host).items()}

    def on(self, host: Sshd) -> dict[int, str]:
        """Return the run's processes on one host."""
        processes = processes_with(f"HOME={host.folder}").items()
        return {pid: line for pid, line in processes if "sshd" not in line}

    def controller(self) -> int:
        """Return the process that supervises the run: it holds the run's entries open."""
        return next(iter(writers_of(self.folder / "events.jsonl")), 0)

    def wait_for_ranks(self, count: int) -> None:
        def ranks() -> list[str]:
            return [line for line in self.processes().values() if line.startswith(RANK)]

        until(lambda: len(ranks()) == count, f"{count} ranks run", 60)

    def kill(self) -> None:
        for folder in (self.home / "runs").glob("2*"):
            for pid in writers_of(folder / "events.jsonl"):
                with_signal(pid, signal.SIGKILL)
        for pid in self.processes():
            with_signal(pid, signal.SIGKILL)

    def wait_until_clean(self, seconds: float = 20) -> None:
        until(lambda: not self.processes(), "nothing is left", seconds)


class Typed:
    """A command that was typed."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process

    def wait_for_end(self) -> tuple[int, str, str]:
        """Return exit code, output and errors."""
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err

    def first_line(self) -> str:
        """Return the first line of its output."""
        assert self.process.stdout is not None
        return str(self.process.stdout.readline()).strip()


def writers_of(path: Path) -> list[int]:
    """Return the processes that have a file open for writing."""
    found = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            names = [link.name for link in folder.iterdir() if link.readlink() == path]
            texts = [(folder.parent / "fdinfo" / name).read_text() for name in names]
        except OSError:
            continue
        if any(int(text.split("flags:")[1].split()[0], 8) & os.O_WRONLY for text in texts):
            found.append(int(folder.parent.name))
    return found
