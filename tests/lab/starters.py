"""How a run may be started, and how what started it may end: terminals, programs, notebooks."""

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.lab.checkout import copy_rackrun
from tests.lab.clusters import SlurmLab
from tests.lab.fault import LEASE_SECONDS, LIMITS
from tests.lab.faulty_hosts import OnHosts, in_network
from tests.lab.faulty_runs import RANK
from tests.lab.hosts import ROOT, children, processes_with, with_signal
from tests.lab.run import MAIN
from tests.lab.waiting import until

TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
PROGRAM = """
import sys, rackrun
ended = rackrun.launch(*{words!r}, **{options!r})
sys.exit(ended.exit_code)
"""


class Starter(OnHosts):
    """A run on one host that a command without a terminal has started, as in a CI job."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self.folder = folder

    def start(self) -> None:
        """Start the run, and wait until it trains."""
        self.begin()
        until(lambda: self.process.poll() is not None or self.step(), "it trains", 120)
        assert self.process.poll() is None, self.process.communicate()

    def begin(self) -> None:
        """Start what starts the run."""
        self.process = self.spawn(sys.executable, str(MAIN), "./run-ssh", *self.words())

    def words(self) -> tuple[str, ...]:
        """Return the words of the launcher."""
        return (
            *("--ssh-config", str(self.hosts.config), "--runs", str(self.runs), *LIMITS),
            *(self.write_hosts(), *self.ranks()),
        )

    def ranks(self) -> tuple[str, ...]:
        """Return the command to run."""
        return ("--", sys.executable, "-S", RANK, "300")

    def spawn(self, *program: str, **streams: Any) -> Any:
        """Start a program at the switch."""
        default = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        with in_network(self.hosts.bridge):
            return subprocess.Popen(
                program,
                **{**default, "stderr": subprocess.PIPE, **streams},
                env=self.environment(),
                cwd=self.working_folder(),
                start_new_session=True,
                text=True,
                errors="replace",
            )

    def working_folder(self) -> Path:
        """Return the folder in which it is typed."""
        return self.hosts.folder

    def environment(self) -> dict[str, str]:
        """Return the user's variables."""
        about = {"PYTHONPATH": str(ROOT), "HOME": str(self.hosts.home)}
        return {**os.environ, **about, "TERM": "xterm-256color"}

    def step(self) -> int:
        """Return the step that rank 0 has saved; 0 when it has not."""
        return int(self.checkpoint().get("step", 0))

    def checkpoint(self) -> dict[str, Any]:
        """Return what rank 0 has saved."""
        for path in self.runs.glob("2*/step-0"):
            return dict(json.loads(path.read_text()))
        return {}

    def end(self, how: str, seconds: float) -> str:
        """Let what started the run end: by signals, or by closing what reads its output.

        Return what became of the run: `goes on`, or `CODE stops`, `CODE saves`; `goes on` after
        twice the lease of the hosts, `saves` if a rank saved because it was asked to stop.
        """
        self.hurt(how)
        still = time.monotonic() + 2 * LEASE_SECONDS
        deadline = time.monotonic() + seconds
        while self.is_left():
            self.drain()
            if time.monotonic() > still:
                before = self.step()
                time.sleep(1.0)
                if self.step() > before + 5:
                    return "goes on"
            assert time.monotonic() < deadline, "it neither ends nor goes on"
            time.sleep(0.05)
        saved = "saves" if self.checkpoint().get("asked") else "stops"
        return saved if how == "KILL" else f"{self.code(seconds)} {saved}".lstrip()

    def is_left(self) -> bool:
        """Return True while anything of the run is left."""
        return any(self.hosts.left())

    def code(self, seconds: float) -> int | str:
        """Return the exit code of what started the run, as a shell shows it.

        A second Ctrl-C may meet a Python that is about to end, and kill it.
        """
        code = int(self.process.wait(seconds))
        return 128 - code if code < 0 else code

    def hurt(self, how: str) -> None:
        """Send the signals, or close what reads the output."""
        if how == "pipe closed":
            self.process.stdout.close()
            self.process.stderr.close()
            return
        for name in how.split():
            self.signal(name)
            time.sleep(0.3)

    def signal(self, name: str) -> None:
        """Send a signal to it."""
        with_signal(self.process.pid, signal.Signals[f"SIG{name}"])

    def drain(self) -> None:
        """Read what nobody reads."""


class OnTerminal(Starter):
    """One that a command on a terminal has started."""

    def begin(self) -> None:
        self.ours, theirs = os.openpty()
        program = (sys.executable, "-c", TAKE_TERMINAL, sys.executable)
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        words = (*program, str(MAIN), "./run-ssh", *self.words())
        self.process = self.spawn(*words, **streams)
        os.close(theirs)

    def signal(self, name: str) -> None:
        if name == "INT":
            os.write(self.ours, b"\x03")
        elif name == "HUP":
            os.close(self.ours)
            self.ours = -1
        else:
            super().signal(name)

    def drain(self) -> None:
        with suppress(OSError):
            while self.ours >= 0 and select.select([self.ours], [], [], 0)[0]:
                os.read(self.ours, 1 << 16)

    def step(self) -> int:
        self.drain()
        return super().step()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if self.ours >= 0:
            os.close(self.ours)


class PipedOnTerminal(OnTerminal):
    """The same with its output in a pipe, as before `| head`."""

    def begin(self) -> None:
        self.ours, theirs = os.openpty()
        program = (sys.executable, "-c", TAKE_TERMINAL, sys.executable)
        self.process = self.spawn(*program, str(MAIN), "./run-ssh", *self.words(), stdin=theirs)
        os.close(theirs)


class OnAnotherMachine(OnTerminal):
    """One that a terminal here has started on another machine, by `--on`."""

    def begin(self) -> None:
        (host,) = self.hosts.hosts
        self.hosts.configure(f"Host other\n  HostName {host.address}\n  Port {host.port}\n")
        (host.folder / ".ssh").mkdir()
        shutil.copy(self.hosts.config, host.folder / ".ssh" / "config")
        copy_rackrun(self.working_folder(), self.hosts.cheap_python())
        shutil.copy(self.write_hosts(), self.working_folder())
        super().begin()

    def words(self) -> tuple[str, ...]:
        on = ("--on", "other", "--ssh-config", str(self.hosts.config))
        return (*on, *LIMITS, "--sync", "hosts.txt", *self.ranks())

    def working_folder(self) -> Path:
        return self.hosts.folder / "project"

    def environment(self) -> dict[str, str]:
        about = {"PYTHONPATH": str(self.working_folder()), "HOME": str(self.hosts.folder)}
        return {**super().environment(), **about}


class AsFirstProcess(Starter):
    """One whose launcher is process 1, as in a container."""

    def begin(self) -> None:
        apart = ("unshare", "--pid", "--fork", "--mount-proc", sys.executable)
        self.process = self.spawn(*apart, str(MAIN), "./run-ssh", *self.words())

    def signal(self, name: str) -> None:
        for pid in children(self.process.pid)[:1]:
            with_signal(pid, signal.Signals[f"SIG{name}"])


class FromProgram(Starter):
    """One that a program has started by `rackrun.launch`."""

    def begin(self) -> None:
        self.process = self.spawn(sys.executable, "-c", self.program())

    def program(self) -> str:
        """Return the text of the program."""
        names = [name.lstrip("-").replace("-", "_") for name in LIMITS[::2]]
        options = {"hosts": self.write_hosts(), "ssh_config": str(self.hosts.config), "plain": True}
        options |= {
            "runs": str(self.runs),
            **dict(zip(names, map(float, LIMITS[1::2]), strict=True)),
        }
        return PROGRAM.format(words=self.ranks(), options=options)


class FromNotebook(FromProgram):
    """One that a cell of a notebook has started by `rackrun.launch`; its kernel is the process."""

    def begin(self) -> None:
        from jupyter_client import BlockingKernelClient

        connection = self.hosts.folder / "kernel.json"
        self.process = self.spawn(sys.executable, "-m", "ipykernel_launcher", "-f", str(connection))
        # The kernel makes the file before it writes it.
        until(lambda: connection.exists() and "}" in connection.read_text(), "a kernel is up", 60)
        self.client = BlockingKernelClient(connection_file=str(connection))
        with in_network(self.hosts.bridge):
            self.client.load_connection_file()
            self.client.start_channels()
            self.client.wait_for_ready(timeout=60)
        self.client.execute(self.program())

    def hurt(self, how: str) -> None:
        if how == "pipe closed":
            self.client.stop_channels()
        else:
            super().hurt(how)

    def code(self, seconds: float) -> str:
        """Return nothing: a kernel may live on."""
        return ""

    def __exit__(self, *error: object) -> None:
        self.client.stop_channels()
        super().__exit__(*error)


MARK = {"STARTED_BY": f"test-{os.getpid()}"}


class InSlurm(Starter):
    """One that `srun` has started as `rackrun node` in a step of a job.

    Slurm signals all processes of a step, so torchrun is the real one.
    """

    def begin(self) -> None:
        self.slurm = SlurmLab(self.folder)
        self.slurm.start()
        node = (sys.executable, str(MAIN), "node", *LIMITS, "--runs", str(self.runs))
        self.process = subprocess.Popen(
            ["srun", "--nodes=1", "--ntasks=1", *node, *self.ranks()],
            env={**self.slurm.environment, **MARK, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def signal(self, name: str) -> None:
        if name == "KILL":
            super().signal(name)
        elif job := self.slurm.run("squeue", "--noheader", "--format=%i"):
            self.slurm.run("scancel", f"--signal={name}", f"{job}.0")

    def is_left(self) -> bool:
        return bool(set(processes_with("=".join(*MARK.items()))) - {self.process.pid})

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self.slurm.stop()


STARTERS = {
    "terminal": OnTerminal,
    "--on": OnAnotherMachine,
    "no terminal": Starter,
    "PID 1": AsFirstProcess,
    "srun": InSlurm,
    "launch()": FromProgram,
    "notebook": FromNotebook,
}
