"""Random faults against real runs: `python -m tests.campaign.campaign --rounds 500 --seed 1`.

A round starts a run on hosts that share nothing but this machine's kernel (see `hosts`), lets one
fault of `faults` happen at a random moment, and then looks: exit code, one true last line, time,
no traceback, nothing left on any host or of the launcher, whole checkpoints, and the next launch
works at once. Round N of seed S is the same fault in the same place every time:

    python -m tests.campaign.campaign --seed S --only N
"""

import argparse
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rackrun.contract.variables import NOTE_ROWS
from tests.campaign.containers import ContainerRound, Containers
from tests.campaign.faults import (
    ATTACHED,
    CONTAINER,
    DETACHED,
    LIMITS,
    PEERS,
    SERVED,
    SLURM,
    START,
    Fault,
    Scene,
)
from tests.campaign.hosts import Hosts
from tests.campaign.outcome import Outcome, partial_checkpoints, table
from tests.campaign.slurm import Slurm, SlurmRound
from tests.lab.hosts import ROOT, processes_with, with_signal
from tests.training.trained_rows import exact_epochs

RANK = str(Path(__file__).with_name("rank.py"))
HOSTS = 3
CLEAN_SECONDS = 10.0
"""After the launcher's end, until every host that was lost has ended its ranks by itself."""

ARRIVAL_SECONDS = 65.0
"""The same where a link may have broken while a program was sent, which is waited for."""

ROUNDS_PER_LAB = 25
SLACK = 1.5
"""Times are promised for an idle machine; a campaign measures, and fails beyond this factor."""

TABLE = [*ATTACHED, *START, *DETACHED, *SERVED, *PEERS, *SLURM, *CONTAINER]


class Round:
    """One run and what happens to it."""

    def __init__(self, hosts: Hosts, fault: Fault, number: int, seed: int, slow: float) -> None:
        self.hosts, self.fault, self.number, self.slow = hosts, fault, number, slow
        self.chance = random.Random(f"{seed}/{number}/moment")
        self.canary = f"RUN_CANARY={uuid.uuid4()}"
        self.runs = hosts.folder / f"round-{number}"
        self.err = ""

    def play(self) -> Outcome:
        """Start a run, inject the fault, wait for the end, and check the outcome."""
        process = self._start()
        scene = Scene(self.hosts, process.pid, self.chance)
        hurt_at = time.monotonic()
        try:
            self._wait_for_the_moment(process)
            hurt_at = time.monotonic()
            if process.poll() is None:
                self.fault.hurt(scene)
            process = self._watched(process)
            _, self.err = process.communicate(timeout=self._patience())
        except subprocess.TimeoutExpired:
            self._give_up(process)
        took = time.monotonic() - hurt_at
        outcome = Outcome(self.number, self.fault, process.returncode, took, output=self.err)
        self._heal(scene)
        outcome.violations += self._violations(outcome, scene)
        return outcome

    def _start(self) -> "subprocess.Popen[str]":
        """Start the run; return the process that stands for the launcher."""
        return self._launch(*self.fault.options, *self._command())

    def _watched(self, process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
        """Return the process whose exit code is the run's."""
        return process

    def _command(self) -> tuple[str, ...]:
        misdeed = ()
        if self.fault.misdeed:
            culprit, moment = self.chance.randrange(HOSTS), self.chance.uniform(0.2, 2.0)
            misdeed = (self.fault.misdeed, str(culprit), f"{moment:.2f}")
        return ("--", sys.executable, "-S", RANK, str(self.fault.rank_seconds), *misdeed)

    def _launch(self, *args: str) -> "subprocess.Popen[str]":
        python = self.hosts.cheap_python()
        hosts = str(self.hosts.write_hosts(f"python={python} workdir={self.hosts.folder} slots=1"))
        split = args.index("--")
        given = (*LIMITS, "--runs", str(self.runs), *args[:split], hosts, *args[split:])
        return self.hosts.run_ssh(*given, env=self._environment(), start_new_session=True)

    def _environment(self) -> dict[str, str]:
        name, _, value = self.canary.partition("=")
        return {name: value, "HOME": str(self.hosts.home)}

    def _wait_for_the_moment(self, process: "subprocess.Popen[str]") -> None:
        """Wait until a random moment of the start, or of the training."""
        if self.fault.early:
            time.sleep(self.chance.uniform(0.0, 2.5 * self.slow))
            return
        deadline = time.monotonic() + 60 * self.slow
        while process.poll() is None and time.monotonic() < deadline:
            if self._is_training():
                break
            time.sleep(0.02)
        if not self.fault.misdeed:
            time.sleep(self.chance.uniform(0.0, 1.0))

    def _is_training(self) -> bool:
        return len(list(self.runs.glob("2*/step-*"))) == HOSTS

    def _patience(self) -> float:
        return (self.fault.seconds + self.fault.rank_seconds % 60) * 3 * self.slow + 30

    def _give_up(self, process: "subprocess.Popen[str]") -> None:
        """End a launcher that hangs: the round has failed."""
        self.err = "HANGS: the launcher was still there after three times its time"
        with_signal(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=10)

    def _heal(self, scene: Scene) -> None:
        self.fault.heal(scene)
        time.sleep(4)  # Linux answers "no route to host" for 3 s after it missed a neighbour

    def _violations(self, outcome: Outcome, scene: Scene) -> Iterator[str]:
        yield from self._wrong_end(outcome, scene)
        self.hosts.settle(ARRIVAL_SECONDS if self.fault.early else CLEAN_SECONDS * self.slow)
        yield from (f"left: {line[:100]!r}" for line in self.hosts.left())
        mine = {p: line for p, line in processes_with(self.canary).items() if p != scene.launcher}
        yield from (f"left here: {line[:100]}" for line in mine.values())
        yield from (f"litter: {name}" for name in self.hosts.litter())
        yield from self._bad_files()
        if failure := self._next_launch():
            yield failure

    def _wrong_end(self, outcome: Outcome, scene: Scene) -> Iterator[str]:
        fault, lines = self.fault, self.err.splitlines()
        if self.err.startswith("HANGS"):
            yield self.err
        elif outcome.code not in fault.codes:
            yield f"exit code {outcome.code}, not {' or '.join(map(str, fault.codes))}"
        if outcome.seconds > fault.promised_seconds * SLACK * self.slow:
            yield f"took {outcome.seconds:.1f} s of {fault.promised_seconds:.0f} that were promised"
        if "internal error of rackrun" in self.err or 'rackrun/__main__.py", line' in self.err:
            yield "a traceback of the launcher"
        if "\x1b" in self.err.replace("\x1b[0m", ""):
            yield "an escape sequence on a plain screen"
        if fault.kills_launcher:
            return
        if not lines:
            yield "no last line"
        elif (expected := fault.names.format(victim=scene.victim)) not in lines[-1]:
            yield f"the last line does not name {expected}"

    def _bad_files(self) -> Iterator[str]:
        return partial_checkpoints(self.runs)

    def _next_launch(self) -> str:
        """Launch at once on the same hosts; return what is wrong with that."""
        process = self._launch("--", "true")
        try:
            _, err = process.communicate(timeout=60 * self.slow)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            return "the next launch hangs"
        return f"the next launch: {err.strip()[-300:]}" if process.returncode else ""


class DetachedRound(Round):
    """A detached run: faults happen on its hosts, and `attach` gives its exit code."""

    def _start(self) -> "subprocess.Popen[str]":
        process = self._launch("--detach", *self.fault.options, *self._command())
        out, self.err = process.communicate(timeout=90 * self.slow)
        assert process.returncode == 0, self.err
        self.run = out.strip()
        return self._look("attach")

    def _look(self, verb: str) -> "subprocess.Popen[str]":
        options = {"env": self._environment(), "start_new_session": True}
        runs = ("--runs", str(self.runs)) if verb == "attach" else ()
        return self.hosts.run_ssh(*runs, self.run, verb=(verb,), **options)

    def _watched(self, process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
        """Return a new `attach` if the fault has ended the first one."""
        if self.fault.verb:
            stop = self._look(self.fault.verb)
            _, err = stop.communicate(timeout=self._patience())
            assert stop.returncode == 0, err
        return process


class ServedRound(Round):
    """Real training on shards that the launcher's nginx serves, in epochs that must be exact."""

    def _command(self) -> tuple[str, ...]:
        return ("catdog", "--data", str(self.hosts.shards), *TRAINING)

    def _launch(self, *args: str) -> "subprocess.Popen[str]":
        if "catdog" not in args:
            return super()._launch(*args)
        hosts = f"python={sys.executable} workdir={ROOT} slots=1"
        given = ("--serve", "--serve-native", *LIMITS, "--hang-seconds", "60")
        given = (*given, "--runs", str(self.runs), *self.fault.options)
        given = (*given, "--env", f"{NOTE_ROWS}=1")
        task = args[args.index("catdog") :]
        path = str(self.hosts.write_hosts(hosts))
        return self.hosts.run_ssh(
            *given, path, *task, env=self._environment(), start_new_session=True
        )

    def _is_training(self) -> bool:
        return any(self.runs.glob("2*/checkpoints/step-*.pt"))

    def _bad_files(self) -> Iterator[str]:
        folders = sorted(self.runs.glob("2*"))
        if 0 not in self.fault.codes or not folders:
            return
        for folder in folders:
            yield from (f"partial file {path.name}" for path in folder.rglob("*.partial"))
        try:
            exact_epochs(*folders)
        except (AssertionError, KeyError) as wrong:
            yield f"epochs are not exact: {wrong!r}"


TRAINING = (
    *(
        "--exact-epochs",
        "--epochs",
        "6",
        "--image-size",
        "32",
        "--width",
        "4",
        "--batch-size",
        "8",
    ),
    *("--device", "cpu", "--no-tensorboard", "--workers", "1", "--save-minutes", "0.01"),
)


class PeersRound(ServedRound):
    """The same on hosts that share their caches, of which none has room for all of the data."""

    def _command(self) -> tuple[str, ...]:
        caches = ("--cache", "/tmp/cache", "--cache-size", "0.003", "--epochs", "30")
        return ("catdog", "--data", str(self.hosts.many_shards), *TRAINING, *caches)


KINDS: dict[str, Any] = {
    "attached": Round,
    "detached": DetachedRound,
    "served": ServedRound,
    "peers": PeersRound,
    "slurm": SlurmRound,
    "container": ContainerRound,
}


def chosen(seed: int, numbers: Iterable[int], part: str = "") -> Iterator[tuple[int, Fault]]:
    """Yield the fault of each round of a seed, of those whose names hold `part`."""
    faults = [fault for fault in TABLE if part in fault.name]
    for number in numbers:
        chance = random.Random(f"{seed}/{number}/fault")
        yield number, chance.choices(faults, [fault.weight for fault in faults])[0]


def campaign(
    seed: int, numbers: Sequence[int], slow: float = 1.0, part: str = ""
) -> Iterator[Outcome]:
    """Yield the outcome of each round; hosts are made anew now and then, and after a violation."""
    rounds = list(chosen(seed, numbers, part))
    labs = {"slurm": Slurm, "container": Containers}
    yield from played([r for r in rounds if r[1].kind not in labs], seed, slow, make_hosts)
    for kind, make in labs.items():
        yield from played([r for r in rounds if r[1].kind == kind], seed, slow, make)


def played(
    rounds: Sequence[tuple[int, Fault]], seed: int, slow: float, make: Callable[[], Any]
) -> Iterator[Outcome]:
    """Yield the outcome of rounds that need the same kind of lab."""
    lab, left = None, 0
    try:
        for number, fault in rounds:
            if lab is None or left == 0:
                lab, left = _made_anew(lab, make), ROUNDS_PER_LAB
            try:
                outcome = KINDS[fault.kind](lab, fault, number, seed, slow).play()
            except (AssertionError, OSError, subprocess.TimeoutExpired) as error:
                # A run that does not start breaks a promise too: the rounds after it go on.
                outcome = Outcome(number, fault, None, 0.0, [f"precondition: {error!r:.300}"])
            yield outcome
            left = 0 if outcome.violations else left - 1
    finally:
        if lab is not None:
            lab.stop()


def _made_anew(lab: Any, make: Callable[[], Any]) -> Any:
    if lab is not None:
        lab.stop()
    return make()


def make_hosts() -> Hosts:
    """Return hosts for the rounds of runs over SSH."""
    return Hosts(HOSTS)


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep `count` cores busy meanwhile."""
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> int:
    """Run a campaign and print its table; 1 when any round broke a promise."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 100_000)
    parser.add_argument("--only", type=int, help="one round, by its number")
    parser.add_argument("--kind", default="", help="rounds of these faults only: a part of a name")
    parser.add_argument("--busy", type=int, default=0, help="cores to keep busy meanwhile")
    parser.add_argument("--slow", type=float, default=1.0, help="factor for all promised times")
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # with `&`, a shell ignores some
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    numbers = range(options.rounds) if options.only is None else [options.only]
    outcomes = []
    with burning(options.busy):
        for outcome in campaign(options.seed, numbers, options.slow, options.kind):
            outcomes.append(outcome)
            bad = "; ".join(outcome.violations)
            print(
                f"{outcome.number:4} {outcome.fault.name:24} {outcome.code!s:>5}"
                f" {outcome.seconds:5.1f} s  {bad}",
                flush=True,
            )
            if bad:
                print(
                    "     | " + outcome.output.strip()[-1500:].replace("\n", "\n     | "),
                    flush=True,
                )
    print(f"\nseed {options.seed}, {len(outcomes)} rounds\n\n{table(outcomes)}")
    return int(any(outcome.violations for outcome in outcomes))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
