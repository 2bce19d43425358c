"""Runs on hosts behind cables that faults happen to: attached, detached, served, one per node."""

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.lab.detached import writers_of
from tests.lab.fault import LEASE_SECONDS, Fault, Outcome, with_limits
from tests.lab.faulty_hosts import OnHosts
from tests.lab.hosts import ROOT, children, command_line, processes_with, with_signal
from tests.lab.waiting import until

RANK = str(Path(__file__).with_name("fault_rank.py"))
SAYS_DONE = "all steps are done"


class Run(OnHosts):
    """An attached run, and what a fault does to it."""

    def __init__(
        self, fault: Fault, folder: Path, chance: random.Random | None, slow: float, count: int = 2
    ) -> None:
        super().__init__(count)
        self.fault, self.chance, self.slow = fault, chance, slow
        self.number = chance.randint(1, count) if chance else count
        """Of the host of the fault."""

        self.canary = f"RUN_CANARY={uuid.uuid4()}"

    # -- the run

    def start(self) -> None:
        """Start it."""
        self.process = self.launch(*self.fault.options, words=self.command())

    def command(self) -> tuple[str, ...]:
        """Return what the launcher is to run."""
        if self.fault.command:
            return ("--", *self.fault.command)
        ranks = (sys.executable, "-S", RANK, str(self.fault.rank_seconds))
        return ("--", *ranks, *self.misdeed())

    def misdeed(self) -> tuple[str, ...]:
        """Return what which rank does by itself, and when."""
        if not self.fault.misdeed:
            return ()
        culprit = self.chance.randrange(len(self.hosts.hosts)) if self.chance else self.number - 1
        self.number = culprit + 1
        moment = self.chance.uniform(0.2, 2.0) if self.chance else 0.3
        return (self.fault.misdeed, str(culprit), f"{moment:.2f}")

    def launch(self, *options: str, words: tuple[str, ...]) -> Any:
        """Start a launcher in the run's folder."""
        return self.hosts.run_ssh(
            *(*with_limits("--runs", str(self.runs), *options), self.write_hosts(), *words),
            fresh=self.fault.moment != "step",
            env=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        """Return the variables that mark what is left on this machine."""
        return dict([self.canary.split("=")])

    def wait_for_the_moment(self) -> None:
        """Wait until ranks train, or for a moment of the start."""
        if self.fault.moment != "step" and self.chance:
            time.sleep(self.chance.uniform(0.0, 2.5))
        elif self.fault.moment != "step":
            until(lambda: self.is_over() or MOMENTS[self.fault.moment](self), self.fault.moment, 60)
        elif not self.fault.command:
            until(lambda: self.is_over() or self.is_training(), "ranks train", 60 * self.slow)
            if self.is_over() and not self.fault.misdeed:
                raise AssertionError(f"no training: {self.process.communicate()}")
            if self.chance and not self.fault.misdeed:
                time.sleep(self.chance.uniform(0.0, 1.0))

    def is_over(self) -> bool:
        """Return True once the launcher has ended."""
        return self.process.poll() is not None

    def is_training(self) -> bool:
        """Return True once every rank has saved its first checkpoint."""
        return len(list(self.runs.glob("2*/step-[0-9]"))) == len(self.hosts.hosts)

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Return how it ended and what it wrote; None for a launcher that hangs."""
        try:
            _, said = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            with_signal(self.process.pid, signal.SIGKILL)
            return None, self.process.communicate()[1]
        return self.process.returncode, said

    # -- faults

    @property
    def victim(self) -> str:
        """Return the address of the host of the fault."""
        return self.hosts.hosts[self.number - 1].address

    def processes(self, kind: str) -> list[int]:
        """Return the processes of a kind: rank, loader, daemon, shim, torchrun, agent,
        session or controller on the host of the fault; launcher, or its nginx; or all."""
        if kind == "launcher":
            return [self.process.pid]
        if kind == "nginx":
            return [p for p in children(self.process.pid) if "nginx" in command_line(p)]
        if kind == "all":
            return list(self.hosts.processes(self.number))
        return self.hosts.parts(self.number).get(kind, [])

    def send(self, kinds: str, *names: str) -> None:
        """Send signals, some time apart, to a process of each kind of `agent+shim`."""
        pids = [pid for kind in kinds.split("+") for pid in self.any_of(self.processes(kind))]
        assert pids or self.fault.moment != "step", f"no {kinds} on {self.victim}"
        self.send_to(pids, names[0])
        for name in names[1:]:
            time.sleep(0.2)
            self.send_to(pids, name)

    def any_of(self, pids: list[int]) -> list[int]:
        """Return one of them: any, or the first without chance."""
        return [self.chance.choice(pids)] if pids and self.chance else pids[:1]

    def send_to(self, pids: Iterable[int], name: str) -> None:
        """Send a signal to all of them."""
        for pid in pids:
            with_signal(pid, signal.Signals[f"SIG{name}"])

    def pause(self, kind: str, seconds: float) -> None:
        """Stop the launcher, or all of a host, for so long."""
        pids = self.processes(kind)
        self.send_to(pids, "STOP")
        time.sleep(seconds)
        self.send_to(pids, "CONT")

    def kill_pythons(self) -> None:
        """Do what `killall -9 python3` does."""
        lines = self.hosts.processes(self.number).items()
        self.send_to((pid for pid, line in lines if "python" in line), "KILL")

    def pull_cable(self) -> None:
        """Take the link of the host down."""
        self.hosts.pull_cable(self.number)

    def plug_cable(self) -> None:
        """Bring it up again."""
        self.hosts.plug_cable(self.number)

    def cut_off_until_restart(self) -> None:
        """Pull the cable until the run goes on without the host."""
        self.pull_cable()
        (events,) = self.runs.glob("2*/events.jsonl")
        until(lambda: '"restart"' in events.read_text(), "the run starts again", 60 * self.slow)
        self.plug_cable()

    def flap(self) -> None:
        """Pull the cable for less than the lease."""
        self.pull_cable()
        time.sleep(LEASE_SECONDS / 3)
        self.plug_cable()

    def reject(self, *rule: str) -> None:
        """Add a rule of a firewall for what comes in at the host."""
        self.hosts.firewall(self.number, *rule)

    def allow(self) -> None:
        """Take the rules away again."""
        self.hosts.allow(self.number)

    def cut_power(self) -> None:
        """Take the power of the host away."""
        self.hosts.cut_power(self.number)

    def boot(self) -> None:
        """Give it back."""
        self.hosts.boot(self.number)

    def reboot(self) -> None:
        """Take it away and give it back."""
        self.cut_power()
        self.boot()

    def fill_tmp(self) -> None:
        """Leave no byte in the /tmp of the host."""
        with (self.hosts.tmp(self.number) / "full").open("wb") as file, suppress(OSError):
            while True:
                os.write(file.fileno(), bytes(1 << 20))

    def empty_tmp(self) -> None:
        """Remove what fill_tmp wrote."""
        (self.hosts.tmp(self.number) / "full").unlink(missing_ok=True)

    def let_outgrow_memory(self) -> None:
        """Let a rank need more memory than its cgroup of 64 MB has."""
        (rank,) = self.processes("rank")
        self.memory.mkdir()
        sizes = {"limit_in_bytes": 64 << 20, "memsw.limit_in_bytes": 64 << 20}
        sizes |= {"max": 64 << 20, "swap.max": 0}
        for name, size in sizes.items():
            if (path := self.memory / f"memory.{name}").exists():
                path.write_text(str(size))
        (self.memory / "cgroup.procs").write_text(str(rank))
        self.send_to([rank], "USR1")

    @property
    def memory(self) -> Path:
        """Return the folder of that cgroup."""
        old = Path("/sys/fs/cgroup/memory")
        return (old if old.exists() else old.parent) / self.hosts.folder.name

    def lift_memory_limit(self) -> None:
        """Remove it."""
        until(lambda: not (self.memory / "cgroup.procs").read_text(), "it is empty", 20)
        self.memory.rmdir()

    @property
    def run(self) -> str:
        """Return the name of the run, as one types it."""
        plan = sorted(self.runs.glob("2*/plan.json"))[-1]
        return str(json.loads(plan.read_text())["run_id"])[:8]

    def look(self, verb: str, *options: str) -> Any:
        """Type a verb for the run."""
        return self.hosts.run_ssh(*options, self.run, verb=(verb,), env=self.environment())

    def type(self, verb: str) -> None:
        """Type a verb and wait for its end."""
        _, err = (process := self.look(verb)).communicate(timeout=60 * self.slow)
        assert process.returncode == 0, err

    # -- what is left

    def settle(self, seconds: float) -> None:
        """Wait until nothing is left, for so long at most."""
        self.hosts.settle(seconds)

    def left(self) -> Iterator[str]:
        """Yield what is left of the run, on hosts and here."""
        yield from (f"left: {what}" for what in self.hosts.left())
        mine = {p: line for p, line in processes_with(self.canary).items() if p != self.process.pid}
        yield from (f"left here: {line[:100]}" for line in mine.values())

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield what is wrong with the files of the run."""
        yield from partial_files(self.runs)
        folders = sorted(self.runs.glob("2*"))
        if not folders or self.fault.ends_launcher or outcome.code is None:
            return
        try:
            result = json.loads((folders[-1] / "result.json").read_text())
        except (OSError, ValueError) as error:
            if not self.fault.loses_result:
                yield f"no result: {error}"
            return
        if result["exit_code"] != outcome.code and outcome.code not in (-1, -2, -15):
            yield f"result.json has exit code {result['exit_code']}"
        states = dict(result["hosts"])
        if self.fault.loses_host:
            states.pop(self.victim, None)
        yield from (f"{host}: {state}" for host, state in states.items() if state != "clean")
        if self.fault.misdeed and outcome.code != 75 and None in result["codes"].values():
            yield f"a rank has no exit code: {result['codes']}"
        if outcome.code == 0 and not self.fault.command:
            yield from self.lost_output(folders[-1])

    def lost_output(self, folder: Path) -> Iterator[str]:
        """Yield the ranks whose last line is not in their log of the last attempt."""
        newest = max((int(path.name) for path in folder.glob("logs/*/*")), default=1)
        for path in folder.glob(f"logs/*/{newest}/rank-*.out"):
            if SAYS_DONE not in path.read_text(errors="replace"):
                yield f"{path.name} lacks its last line"

    def next_launch(self) -> Iterator[str]:
        """Launch at once on the same hosts; yield what is wrong with that."""
        process = self.launch(words=("--", "true"))
        try:
            _, err = process.communicate(timeout=60 * self.slow)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            yield "the next launch hangs"
            return
        if process.returncode:
            yield f"the next launch: {err.strip()[-300:]}"


MOMENTS: dict[str, Callable[[Run], object]] = {
    "spawn": lambda run: True,
    "login": lambda run: run.hosts.processes(run.number),
    "plan": lambda run: any(run.runs.glob("2*/plan.json")),
    "ranks": lambda run: run.processes("loader"),
}
"""Moments of the start: an event that is waited for; in a campaign any moment of 2.5 s."""


def partial_files(runs: Path) -> Iterator[str]:
    """Yield what is under a final name and not whole, or under another and still there."""
    for path in runs.glob("2*/step-[0-9]"):
        if not json.loads(path.read_text()).get("end"):
            yield f"checkpoint {path.name} is not whole"
    for path in runs.glob("2*/result*.json"):
        json.loads(path.read_text())
    for path in runs.glob("2*/.*"):
        yield f"partial file {path.name}"


class DetachedRun(Run):
    """A detached run: its controller is on this machine, and `attach` gives its exit code."""

    def start(self) -> None:
        """Start it, and attach."""
        process = self.launch("--detach", *self.fault.options, words=self.command())
        _, err = process.communicate(timeout=90 * self.slow)
        assert process.returncode == 0, err
        self.process = self.look("attach")

    def processes(self, kind: str) -> list[int]:
        """Return the processes of a kind; what supervises the run has its entries open."""
        if kind == "controller":
            return [pid for path in self.runs.glob("2*/events.jsonl") for pid in writers_of(path)]
        return super().processes(kind)

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield the same; the code of an `attach` that is interrupted is not that of the run."""
        yield from super().unwhole(replace(outcome, code=-2) if outcome.code == 130 else outcome)


class NodeRun(Run):
    """`rackrun node` on each host, started by a scheduler; the code is the first node's."""

    def start(self) -> None:
        """Start both launchers."""
        self.port = "29511"
        self.nodes = self.launch_nodes(*self.fault.options, words=self.command())
        self.process = self.nodes[0]

    def launch_nodes(self, *options: str, words: tuple[str, ...]) -> list[Any]:
        """Start a launcher on each host; `tests.lab.cheap_node` has a stand-in for torchrun."""
        nodes = []
        for number in range(1, len(self.hosts.hosts) + 1):
            about = {"NNODES": len(self.hosts.hosts), "NODE_RANK": number - 1}
            about |= {"MASTER_ADDR": "10.77.0.11", "MASTER_PORT": self.port, "PYTHONPATH": ROOT}
            program = (*self.hosts.inside(number), sys.executable, "-m", "tests.lab.cheap_node")
            nodes.append(
                subprocess.Popen(
                    [*program, *with_limits("--runs", str(self.runs), *options), *words],
                    env={
                        **os.environ,
                        **{n: str(v) for n, v in about.items()},
                        **self.environment(),
                    },
                    cwd=self.hosts.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                )
            )
        return nodes

    def processes(self, kind: str) -> list[int]:
        """Return processes of a kind; the launcher is that of the host of the fault."""
        if kind == "launcher":
            return children(self.nodes[self.number - 1].pid)[:1]
        return super().processes(kind)

    def send_to_launchers(self, name: str) -> None:
        """Send a signal to the launchers of all nodes, as a scheduler does."""
        self.send_to([children(node.pid)[0] for node in self.nodes], name)

    def wait(self, seconds: float) -> tuple[int | None, str]:
        """Return how the first node ended; the others have to end as well."""
        ended = super().wait(seconds)
        for node in self.nodes[1:]:
            node.communicate(timeout=seconds)
        return ended

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield checkpoints that are not whole; each node writes a result of its own."""
        yield from partial_files(self.runs)

    def next_launch(self) -> Iterator[str]:
        """Launch at once on the same hosts."""
        for node in self.launch_nodes(words=("--", "true")):
            _, err = node.communicate(timeout=60 * self.slow)
            if node.returncode:
                yield f"the next launch: {err.strip()[-300:]}"


class ServedRun(Run):
    """Real training on shards that the launcher's nginx serves, in epochs that must be exact."""

    task = ("--epochs", "6")

    def __init__(
        self, fault: Fault, folder: Path, chance: random.Random | None, slow: float
    ) -> None:
        super().__init__(fault, folder, chance, slow, 3)

    def data(self) -> Path:
        """Return the shards."""
        return self.hosts.shards

    def command(self) -> tuple[str, ...]:
        """Return a task on the shards."""
        return ("catdog", "--data", str(self.data()), *TRAINING, *self.task)

    def launch(self, *options: str, words: tuple[str, ...]) -> Any:
        """Start a launcher that serves, for a task."""
        if words[0] == "--":
            return super().launch(*options, words=words)
        path = self.hosts.write_hosts(f"python={sys.executable} workdir={ROOT} slots=1")
        serve = ("--serve", "--serve-native", "--hang-seconds", "60")
        serve += ("--env", "RACKRUN_NOTE_ROWS=1", "--runs", str(self.runs))
        options = with_limits(*serve, *options)
        return self.hosts.run_ssh(*options, str(path), *words, env=self.environment())

    def is_training(self) -> bool:
        """Return True once there is a checkpoint."""
        return any(self.runs.glob("2*/checkpoints/step-*.pt"))

    def unwhole(self, outcome: Outcome) -> Iterator[str]:
        """Yield partial files, and what is wrong with the epochs."""
        from tests.lab.oracles import exact_epochs

        folders = sorted(self.runs.glob("2*"))
        yield from (f"partial {p.name}" for each in folders for p in each.rglob("*.partial"))
        try:
            exact_epochs(*folders)
        except (AssertionError, KeyError) as wrong:
            yield f"epochs are not exact: {wrong!r}"


class CachedRun(ServedRun):
    """The same on hosts that keep shards in a cache, of which none has room for all of them."""

    task = ("--cache", "/tmp/cache", "--cache-size", "0.003", "--epochs", "10")

    def data(self) -> Path:
        """Return more of them."""
        return self.hosts.many_shards

    def spoil_cache(self) -> None:
        """Change a byte in the middle of every shard that the host keeps."""
        folder = self.hosts.tmp(self.number)
        kept = until(lambda: list(folder.glob("cache/*/*/*.tar")), "a shard is kept", 60)
        for path in kept:
            with suppress(FileNotFoundError), path.open("r+b") as file:
                file.seek(path.stat().st_size // 2)
                byte = file.read(1)
                file.seek(-1, os.SEEK_CUR)
                file.write(bytes([byte[0] ^ 1]))


TRAINING = (
    *("--exact-epochs", "--image-size", "32", "--width", "4", "--batch-size", "8"),
    *("--device", "cpu", "--no-tensorboard", "--workers", "1", "--save-minutes", "0.01"),
)


class FaultyHosts:
    """Hosts behind cables, made anew for each run."""

    KINDS = {
        "attached": Run,
        "detached": DetachedRun,
        "node": NodeRun,
        "served": ServedRun,
        "cached": CachedRun,
    }

    def run(self, fault: Fault, folder: Path, chance: Any, slow: float) -> Run:
        """Return a run of the fault's kind that is still to be started."""
        return self.KINDS[fault.started_as](fault, folder, chance, slow)

    def stop(self) -> None:
        """Leave nothing: there is nothing between runs."""
