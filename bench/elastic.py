"""Measure what losses cost an elastic run, beside a restart, and prove that nothing else changed.

    python -m bench.elastic [--kills 30] [--restarts 3] [--step-ms 60] [--scratch FOLDER]
    python -m bench.elastic --pairs 7 --images 9000

Four gloo ranks train three exact epochs of a small network without batch norm on three hosts (real
sshd on loopback addresses, each with a home and a folder of its own), three times:

undisturbed   without --elastic: its weights are what the others are compared with
elastic       random losses: a rank, an agent, all processes of a host, those and its connections,
              all of a host stopped (SIGSTOP); the host of rank 0 among them. Each time all ranks
              have joined again, one is lost, and in a third of the cases at once another one
restart       --max-restarts in place of --elastic, a rank killed a few times

Prints, for both kinds of recovery, the seconds from a loss to the next step that is new (p50, p95;
a stopped host: from the end of the lease), whether a process of a survivor was started again, what
the ledger says, and the largest difference of a weight.

With losses, a step waits for --step-ms as for a GPU, so that few images last for many of them.

With --pairs, only what --elastic costs while nothing is lost: pairs of runs, without and with it in
turn in that order; of each the median time of a step, of intervals of 25, and the CPU of all ranks
for a step; of the pairs the median of their ratios.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.images import small
from bench.small_net import STEP_SECONDS
from bench.turns import in_turn
from bench.usage import cpu_seconds
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.run_folder import RunFolder
from rackrun.units import plural
from tests.launcher.lab import ROOT, Lab, children
from tests.waiting import until
from training import checkpoint

SLOTS = (1, 2, 1)
EPOCHS = 3
GLOBAL_BATCH = 24
LEASE_SECONDS = 4.0
LASTING_STEPS = 20  # with all ranks, before the next loss
PAIR_STEPS = 25  # between two lines of a log whose times are compared: they are in milliseconds
SECOND_LOSSES = 1 / 3  # of the cases: another host at once, or while the others regroup
WENT_ON = re.compile(r"(\d+) ranks? on \d+ hosts? go on from step ([\d,]+) \(generation \d+\)")


@dataclass(frozen=True)
class Settings:
    """Losses in elastic runs."""

    kills: int = 30
    """Losses in the elastic run; 0: no such run."""
    restarts: int = 3
    """Losses in the run with --max-restarts; 0: no such run."""
    seed: int = 1
    """Which losses, and when."""
    images: int = 30_000
    """Training images; a step takes 24 of them."""
    step_ms: float = 60.0
    """A step of a run with losses takes so many milliseconds longer."""
    pairs: int = 0
    """Only compare steps without and with --elastic, in so many pairs of runs."""
    scratch: Path = Path(tempfile.gettempdir())
    """Folder for data and hosts."""


@dataclass
class Loss:
    """Something that was lost."""

    kind: str
    at: float
    """The time of this machine's clock."""
    step: int
    """The furthest step at that time."""
    left: int
    """How many ranks are left."""
    next_step: float = 0.0
    """Seconds until the first new step; 0: there was none."""


@dataclass
class Job:
    """A run on the hosts, its output by time, and the losses in it."""

    lab: Lab
    process: subprocess.Popen[str]
    runs: Path
    lines: list[tuple[float, str]] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)

    def follow(self) -> None:
        """Keep what the launcher prints; on a thread of its own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.time(), line.rstrip()))
            if os.environ.get("BENCH_LOG"):
                sys.stderr.write(line)

    @property
    def is_over(self) -> bool:
        """Return whether the launcher has ended."""
        return self.process.poll() is not None

    @property
    def folder(self) -> Path:
        """Return the newest run folder of the launcher."""
        return max(path for path in self.runs.iterdir() if not path.is_symlink())

    def steps(self) -> list[tuple[int, float]]:
        """Return the steps that first ranks have logged on any host, with their times."""
        steps_taken = []
        for host in self.lab.hosts:
            for path in host.folder.glob(f"work/{self.runs.name}/*/metrics.jsonl"):
                for line in path.read_text().splitlines():
                    with suppress(ValueError):  # of a writer that was killed
                        entry = json.loads(line)
                        if entry["kind"] == "train":
                            steps_taken.append((int(entry["step"]), float(entry["time"])))
        return steps_taken

    def step(self) -> int:
        """Return the furthest step."""
        return max((step for step, _ in self.steps()), default=0)

    def is_whole(self) -> bool:
        """Return whether all ranks have trained together for a while."""
        starts = [WENT_ON.search(line) for _, line in [*self.lines] if "go on from" in line]
        newest = next((found for found in reversed(starts) if found), None)
        ranks, since = (int(newest[1]), int(newest[2].replace(",", ""))) if newest else (0, 0)
        lacks = newest is not None and ranks < sum(SLOTS)
        return not lacks and self.step() > since + LASTING_STEPS

    def scratch(self, host: int) -> str:
        """Return the agent's folder on a host in the newest attempt."""
        return str(json.loads((self.folder / "plan.json").read_text())["hosts"][host]["scratch"])

    def processes(self, host: int) -> list[int]:
        """Return the processes of the run on a host, the guard of its agent first."""
        with suppress(OSError, ValueError):
            agent, _, guard, *_ = json.loads(Path(self.scratch(host), "agent.pid").read_text())
            return [guard, *children(guard)] if agent else []
        return []

    def ranks(self, host: int) -> list[int]:
        """Return the processes of the ranks of a host."""
        return [pid for pid in self.processes(host) if is_rank(pid)]


def is_rank(pid: int) -> bool:
    """Return whether a process is a rank."""
    with suppress(OSError):
        return b"\0training\0classify\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def main(args: list[str]) -> None:
    """Run undisturbed, with losses, and with restarts; print the table."""
    settings = parse(Settings, "python -m bench.elastic", args)
    dice = random.Random(settings.seed)
    with (
        tempfile.TemporaryDirectory(dir=settings.scratch) as folder,
        three_hosts(Path(folder)) as lab,
    ):
        shards = draw(Path(folder), settings.images)
        total = EPOCHS * -(-settings.images // GLOBAL_BATCH)
        print(f"{total} steps of {GLOBAL_BATCH} images, seed {settings.seed}", flush=True)
        if settings.pairs:
            compare_steps(lab, shards, settings.pairs)
            return
        slow = f"--env={STEP_SECONDS}={settings.step_ms / 1000}"
        if settings.kills:
            plain = started(lab, shards, "plain")
            finish(plain)
            report_pace("undisturbed", plain)
            elastic = started(lab, shards, "elastic", "--elastic", slow)
            ended = disturb(elastic, dice, settings.kills)
            finish(elastic)
            report_pace("elastic", elastic)
            report(elastic, ended, weights(plain), shards)
        if settings.restarts:
            attempts = f"--max-restarts={settings.restarts + 1}"
            again = started(lab, shards, "again", slow, attempts)
            disturb(again, dice, settings.restarts, restarts=True)
            again.process.send_signal(signal.SIGINT)
            finish(again)
            show_recovery("restart", again.losses)


def compare_steps(lab: Lab, shards: Path, pairs: int) -> None:
    """Print what steps take with --elastic, relative to those of a run without it beside it."""
    number = itertools.count()

    def cost(*options: str) -> tuple[float, float]:
        """Return the seconds and the CPU seconds of a step."""
        runs = f"run-{next(number)}"
        job = started(lab, shards, runs, *options, logged_steps=PAIR_STEPS)
        cores = cores_in_use(job)
        finish(job)
        pace = report_pace(runs, job, PAIR_STEPS)
        return pace, pace * cores

    ways = {"without": cost, "--elastic": partial(cost, "--elastic")}
    plain, elastic = in_turn(pairs, ways).values()
    for position, what in enumerate(("time", "CPU")):
        ratios = [
            ours[position] / base[position] for base, ours in zip(plain, elastic, strict=True)
        ]
        middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"with --elastic: {middle:.3f} of the {what} of a step, {least:.3f} to {most:.3f}")


def cores_in_use(job: Job) -> float:
    """Return how many cores the ranks use on average, from a while after their start to the end."""
    until(lambda: job.is_over or job.step() >= 2 * PAIR_STEPS, "the run trains", 600)
    samples = []
    while not job.is_over:
        pids = [pid for host in range(len(SLOTS)) for pid in job.ranks(host)]
        samples.append((time.monotonic(), *cpu_seconds(*pids)))
        time.sleep(1.0)
    whole = [sample for sample in samples if len(sample) == 1 + sum(SLOTS) and all(sample)]
    if len(whole) < 2:
        sys.exit("a run was too short: type more --images")
    seconds, *by_rank = (last - first for first, last in zip(whole[0], whole[-1], strict=True))
    return sum(by_rank) / seconds


@contextmanager
def three_hosts(folder: Path) -> Iterator[Lab]:
    """Start three hosts, each with a home and a work folder of its own."""
    lab = Lab(folder)
    try:
        for host in lab.ready(len(SLOTS)).hosts:
            (host.folder / "work").mkdir()
        yield lab
    finally:
        lab.stop()


def draw(folder: Path, count: int) -> Path:
    """Convert random images of two classes; return the folder of shards."""
    rng = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "images" / label).mkdir(parents=True)
        for number in range(-(-count * 5 // 9)):
            (folder / "images" / label / f"{number}.jpg").write_bytes(small(rng, 16))
    shards = folder / "shards"
    args = ["convert", "folder", str(folder / "images"), str(shards)]
    subprocess.run([sys.executable, "-m", *args], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return shards


def started(lab: Lab, shards: Path, runs: str, *options: str, logged_steps: int = 1) -> Job:
    """Start a run on all hosts."""
    hosts = [
        f"slots={slots} workdir={host.folder}/work python={sys.executable}"
        for slots, host in zip(SLOTS, lab.hosts, strict=True)
    ]
    launcher = ["--plain", "--no-serve", "--runs", runs, "--env", f"PYTHONPATH={ROOT}", *options]
    launcher += [f"--lease-seconds={LEASE_SECONDS:g}", str(lab.write_hosts(*hosts))]
    task = ["classify", "--model=bench.small_net:net", "--weights=", f"--data={shards}"]
    task += ["--exact-epochs", "--ledger", f"--global-batch={GLOBAL_BATCH}", f"--epochs={EPOCHS}"]
    task += ["--image-size=48", "--device=cpu", "--workers=0", "--final=last", "--seed=3"]
    # AdamW makes 1e-1 of rounding errors of 1e-7 on such data, with one rank as with four.
    task += ["--optimizer=sgd", "--lr=0.01", "--warmup-epochs=0", "--lr-schedule=cosine"]
    task += [f"--log-every-steps={logged_steps}", "--no-tensorboard"]
    process = lab.run_ssh(*launcher, *task, before=("env",), stderr=subprocess.STDOUT)
    job = Job(lab, process, lab.folder / runs)
    threading.Thread(target=job.follow, daemon=True).start()
    return job


def finish(job: Job) -> None:
    """Wait for the end of a run."""
    job.process.wait(timeout=3600)
    time.sleep(0.2)  # for its last lines


# -- losses


def stop_all(job: Job, host: int) -> None:
    """Stop all processes of the run on a host until it was left out, then let them go on."""
    pids = job.processes(host)
    kill(pids, signal.SIGSTOP)
    threading.Timer(3 * LEASE_SECONDS, kill, (pids, signal.SIGCONT)).start()


RANK, STOPPED = "a rank", "a host that was stopped"
LOSSES: dict[str, Callable[[Job, int], None]] = {
    RANK: lambda job, host: kill(job.ranks(host)[:1]),
    "an agent": lambda job, host: kill(job.processes(host)[1:2]),
    "all processes of a host": lambda job, host: kill(job.processes(host)),
    "those and its connections": lambda job, host: kill(
        [*job.lab.hosts[host].sessions(), *job.processes(host)]
    ),
    STOPPED: stop_all,
}


def kill(pids: list[int], number: int = signal.SIGKILL) -> None:
    """Send processes that may be gone a signal."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def disturb(job: Job, dice: random.Random, count: int, restarts: bool = False) -> int:
    """Lose something `count` times; return how many processes of survivors have ended."""
    ended = 0
    while len(job.losses) < count:
        until(lambda: job.is_over or job.is_whole(), "all ranks train", 600)
        if job.is_over:
            break
        if restarts:  # each host in turn: one that fails twice is left out of further attempts
            victims, kinds = [len(job.losses) % len(SLOTS)], [RANK]
        else:
            two = count - len(job.losses) > 1 and dice.random() < SECOND_LOSSES
            victims = dice.sample(range(len(SLOTS)), 2 if two else 1)
            # A silent host is lost alone: its lease would count as the time of the other one.
            kinds = [dice.choice([k for k in LOSSES if not two or k != STOPPED]) for _ in victims]
        spared = set(range(len(SLOTS))) - set(victims)
        others = {pid for host in spared for pid in job.ranks(host)}
        losses, left = [], sum(SLOTS)
        for host, kind in zip(victims, kinds, strict=True):
            left -= 1 if kind == RANK else SLOTS[host]
            losses.append(Loss(kind, time.time(), job.step(), left))
            LOSSES[kind](job, host)
            time.sleep(dice.choice((0.0, 0.05, 0.2)))
        job.losses += losses
        if not all([recovered(job, loss) for loss in losses]):
            break
        ended += 0 if restarts else sum(not is_rank(pid) for pid in others)
        print(f"{len(job.losses)} losses, step {job.step():,}", flush=True)
    return ended


def recovered(job: Job, loss: Loss) -> bool:
    """Wait for the first new step after a loss, and note when it was; False: the run has ended."""

    def new_step() -> float | bool:
        if job.is_over:
            return True
        for printed_at, line in [*job.lines]:
            if printed_at <= loss.at:
                continue
            went_on = WENT_ON.search(line)
            if went_on and int(went_on[1]) <= loss.left:
                step, since = int(went_on[2].replace(",", "")), loss.at
            elif ": restart " in line:
                step, since = loss.step, printed_at
            else:
                continue
            times = [at for number, at in job.steps() if number > step and at > since]
            return min(times) - loss.at if times else False
        return False

    seconds = until(new_step, f"a step after {loss.kind}", 600)
    loss.next_step = 0.0 if seconds is True else float(seconds)
    return not job.is_over


# -- what came of it


def report_pace(name: str, job: Job, logged_steps: int = 1) -> float:
    """Print and return the median seconds of a step; end here if the run has failed."""
    if code := job.process.returncode:
        sys.exit("\n".join((f"{name}: exit code {code}", *(line for _, line in job.lines[-40:]))))
    times = sorted(dict(job.steps()).items())
    paces = [
        (later - sooner) / logged_steps
        for (before, sooner), (after, later) in zip(times, times[1:], strict=False)
        if after - before == logged_steps
    ]
    pace = statistics.median(paces)
    print(f"{name}: {1000 * pace:.2f} ms a step", flush=True)
    return pace


def report(job: Job, ended: int, expected: Any, shards: Path) -> None:
    """Print recovery, survivors, ledger and weights of the elastic run."""
    for kind in (None, *LOSSES):  # a stopped host's seconds include the lease
        losses = [x for x in job.losses if x.kind == kind or (not kind and x.kind != STOPPED)]
        show_recovery(f"  {kind}" if kind else "elastic, no host stopped", losses)
    print(f"processes of survivors that have ended: {ended}")
    result = json.loads((job.folder / "result.json").read_text())
    print(f"generations: {len(result['generations'])}, {result['verdict']}")
    regroups = [group["regroup_seconds"] for group in result["generations"][1:] if group["lost"]]
    print(f"regrouped in (launcher): {quantiles([x for x in regroups if x is not None])}")
    args = ["training", "ledger", str(job.folder), f"--data={shards}"]
    checked = subprocess.run(
        [sys.executable, "-m", *args], cwd=ROOT, capture_output=True, text=True
    )
    print(f"ledger: exit code {checked.returncode}: {(checked.stdout + checked.stderr).strip()}")
    actual = weights(job)
    difference = max(float(abs(expected[name] - actual[name]).max()) for name in expected)
    print(f"largest difference of a weight: {difference:.2g}", flush=True)


def weights(job: Job) -> dict[str, Any]:
    """Return the weights of a finished run."""
    final: dict[str, Any] = checkpoint.read(RunFolder(job.folder).final)["model"]
    return final


def show_recovery(name: str, losses: Sequence[Loss]) -> None:
    """Print the seconds from losses to the next step."""
    seconds = [loss.next_step for loss in losses if loss.next_step]
    if losses:
        print(f"{name}: {plural(len(losses), 'loss', 'losses')}, next step {quantiles(seconds)}")


def quantiles(seconds: Sequence[float]) -> str:
    """Return median, 95th percentile and the longest."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return f"p50 {statistics.median(ordered):.2f} s, p95 {high:.2f} s, max {ordered[-1]:.2f} s"


if __name__ == "__main__":
    run(main)
