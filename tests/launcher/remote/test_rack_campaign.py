"""Random jobs of three accounts on four hosts: no GPU twice, nobody starves, whoever dies.

Each rank locks a file for its GPU, which the launcher knows nothing of: a second one would find it
locked. A fourth account leaves files of all kinds beside the locks.

    pytest --long -k rack_campaign                              300 jobs
    RACK_FIRST=100 RACK_JOBS=50 RACK_SEED=28 pytest --long ...  those from the 101st on
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rackrun.launcher.remote import locks
from tests.lab import warm
from tests.lab.hosts import ROOT, Lab
from tests.lab.planted_gpus import PlantedRack

GPUS = (4, 4, 2, 2)
JOBS = 300
AT_ONCE = 8
NOBODY = 65534
LAUNCH = (  # as `python -m rackrun.launcher ssh`, but for the time between two looks at busy hosts
    "import sys, rackrun.launcher.lifecycle.planning as planning; planning.WAIT_SECONDS = 0.5;"
    " from rackrun.launcher.commands import ssh; from rackrun.commandline.program import run;"
    " run(ssh.main)"
)
RANK = """
import fcntl, os, sys, time
seconds, observed = float(sys.argv[1]), sys.argv[2]
local = int(os.environ["LOCAL_RANK"])
visible = os.environ.get("CUDA_VISIBLE_DEVICES")
gpu = visible.split(",")[local] if visible else local
name = f"{os.environ['OBSERVED_HOST']}-{gpu}"
with open(f"{observed}/{name}", "r+") as file:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        with open(f"{observed}/twice", "a") as twice:
            print(name, os.environ["RACKRUN_RUN_NAME"], file=twice)
        sys.exit(9)
    print("START", repr(time.time()), flush=True)
    time.sleep(seconds)
"""


@dataclass
class Job:
    """A launch of the campaign."""

    name: str
    args: tuple[str, ...]
    seconds: float
    waits: bool
    kill_after: float | None = None
    process: "subprocess.Popen[str] | None" = None
    typed_at: float = 0.0
    waited_at: float | None = None
    granted_at: float | None = None
    started_at: float | None = None
    log: Path = field(default_factory=Path)

    def look(self) -> None:
        """Note when it began to wait, when it got its GPUs, and when its first rank started."""
        text = self.log.read_text(errors="replace")
        if self.waited_at is None and "waiting (" in text:
            self.waited_at = time.time()
        if self.granted_at is None and re.search(r"\d ranks? on \d", text):
            self.granted_at = time.time()
        if self.started_at is None and "START" in text:
            starts = [line.rpartition(" ")[2] for line in text.splitlines() if "START" in line]
            self.started_at = min(map(float, starts))


def few_jobs() -> list[Job]:
    """Return jobs for two hosts with two GPUs each: all wait for the first, and one dies of it."""
    wait, gpus = "--wait", "--gpus-needed"
    return [
        Job("first", (gpus, "4"), 3.0, waits=False),
        Job("dead", (gpus, "3", wait), 0.5, waits=True, kill_after=2.5),
        Job("whole", ("--include", "gpu02", wait), 0.5, waits=True),
        Job("all", (gpus, "4", wait), 0.5, waits=True),
    ]


def random_jobs(seed: int) -> Iterator[Job]:
    """Yield random jobs: any GPUs, parts of hosts, whole hosts; waiting or not; some are killed."""
    chance = random.Random(seed)
    for number in range(JOBS):
        kind, waits = chance.random(), chance.random() < 0.85
        if kind < 0.7:
            args = ["--gpus-needed", str(chance.choice((1, 1, 1, 2, 2, 3, 4, 6, 8, 12)))]
        else:
            host = chance.randrange(len(GPUS))
            gpus = sorted(chance.sample(range(GPUS[host]), chance.randrange(1, GPUS[host])))
            part = f":{','.join(map(str, gpus))}" if kind < 0.85 else ""
            args = ["--include", f"gpu{host + 1:02}{part}"]
        if waits:
            args += ["--wait"]
        dies = chance.uniform(0.5, 6) if chance.random() < 0.12 else None
        yield Job(f"j{number}", tuple(args), chance.uniform(0.1, 1.5), waits, dies)


@pytest.fixture
def accounts() -> Iterator[list[str]]:
    """Yield three accounts, of this process that runs tests."""
    names = [f"rack{os.getpid()}{letter}" for letter in "abc"]
    for name in names:
        subprocess.run(["useradd", "--no-create-home", "--home-dir", "/", name], check=True)
        subprocess.run(["usermod", "--password", "*", "--shell", "/bin/bash", name], check=True)
    yield names
    for name in names:
        subprocess.run(["userdel", name], check=True, stderr=subprocess.DEVNULL)


class Campaign:
    """Jobs of accounts on a rack, with an observer."""

    def __init__(self, lab: Lab, accounts: list[str], gpus_of_hosts: Sequence[int]) -> None:
        self.rack, self.lab = PlantedRack(lab, gpus_of_hosts), lab
        self.observed = lab.folder / "observed"
        self.observed.mkdir()
        self.observed.chmod(0o777)
        for name, gpus in zip(self.rack.names, gpus_of_hosts, strict=True):
            for gpu in range(gpus):
                (self.observed / f"{name}-{gpu}").touch()
                (self.observed / f"{name}-{gpu}").chmod(0o666)
        self.python = self._python()
        self.hosts = [self._hosts_of(account) for account in accounts]
        self.planted = {path for lock in self._locks() for path in planted_beside(lock)}

    def _locks(self) -> list[str]:
        """Return the path of each host's lock."""
        return [f"/tmp/rackrun-{host.address}-{host.port}.lock" for host in self.lab.hosts]

    def _python(self) -> Path:
        """Write an interpreter that every account can run, with a stand-in for torchrun."""
        fake = self.lab.folder / "fake_torchrun.py"
        shutil.copy(Path(__file__).parents[2] / "lab" / "fake_torchrun.py", fake)
        self.rack.python.write_text(
            self.rack.python.read_text()
            .replace(sys.executable, "/usr/bin/python3")
            .replace(str(Path(__file__).parents[2] / "lab" / "fake_torchrun.py"), str(fake))
        )
        return self.rack.python

    def _hosts_of(self, account: str) -> Path:
        work = self.lab.folder / account
        work.mkdir()
        shutil.chown(work, account)
        path = self.lab.folder / f"{account}.txt"
        settings = f"python={self.python} workdir={work}"
        path.write_text(
            "".join(
                f"{account}@{name} {settings} env=OBSERVED_HOST={name}\n"
                for name in self.rack.names
            )
        )
        return path

    def start(self, job: Job, account: int) -> None:
        """Start the launch of a job."""
        job.log = self.lab.folder / f"{job.name}.log"
        config = ("--ssh-config", str(self.lab.config), "--plain", "--name", job.name)
        limits = ("--lease-seconds", "5")
        rank = ("/usr/bin/python3", "-c", RANK, str(job.seconds), str(self.observed))
        args = (*config, *limits, *job.args, str(self.hosts[account]), "--", *rank)
        home = {"HOME": str(self.lab.home), "PYTHONPATH": str(ROOT)}
        with job.log.open("wb") as log:
            job.typed_at = time.time()
            job.process = warm.Launcher(
                *("-c", LAUNCH, *args),
                cwd=self.lab.folder,
                env={**os.environ, **home},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def run(self, all_jobs: Sequence[Job]) -> None:
        """Run all jobs, a few at a time."""
        waiting, running = list(all_jobs), list[Job]()
        deadline = time.monotonic() + 60 + 12 * len(all_jobs)
        while waiting or running:
            assert time.monotonic() < deadline, [job.name for job in running]
            if waiting and len(running) < AT_ONCE:
                job = waiting.pop(0)
                self.start(job, len(waiting) % len(self.hosts))
                running.append(job)
            for job in list(running):
                assert job.process is not None
                job.look()
                if job.kill_after and time.time() - job.typed_at > job.kill_after:
                    job.process.send_signal(signal.SIGKILL)
                if job.process.poll() is not None:
                    job.look()
                    running.remove(job)
            time.sleep(0.1)

    def leftovers(self) -> set[Path]:
        """Return the tickets, and the locks that are held, that are left on the hosts."""
        left = {path for lock in self._locks() for path in Path("/tmp").glob(f"{lock[5:]}*")}
        return {
            path
            for path in left - self.planted
            if ".wait-" in path.name or locks.holder_in(str(path))
        }

    def close(self, jobs: Sequence[Job]) -> None:
        """End what still runs, wait until the hosts are clean, and remove what was planted."""
        for job in jobs:
            if job.process and job.process.poll() is None:
                job.process.kill()
        end = time.monotonic() + 20
        while (left := self.leftovers()) and time.monotonic() < end:
            time.sleep(0.2)
        for path in self.planted:
            path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink()
        assert left == set()


def planted_beside(lock: str) -> Iterator[Path]:
    """Leave files of an account that has no run: a lock, and tickets that are none."""
    (file := Path(f"{lock}.gpu0")).touch()
    file.chmod(0o666)
    (ticket := Path(f"{lock}.wait-0000000001")).touch()
    (pipe := Path(f"{lock}.wait-0000000002.000000-00000001")).unlink(missing_ok=True)
    os.mkfifo(pipe)
    (folder := Path(f"{lock}.wait-0000000003.000000-00000001")).mkdir()
    (link := Path(f"{lock}.wait-0000000004.000000-00000001")).symlink_to("/etc/passwd")
    for path in (file, ticket, pipe, folder, link):
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        yield path


def overtaken(all_jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """Return launches for any GPUs that waited already when another was typed that got them first.

    When their ranks start says nothing: on busy cores a start takes longer than the turn.
    """
    fair = [
        job for job in all_jobs if job.granted_at and {"--gpus-needed", "--wait"} <= set(job.args)
    ]
    return [
        (first.name, later.name)
        for first in fair
        for later in fair
        if first.waited_at is not None
        and first.waited_at < later.typed_at
        and (later.granted_at or 0) < (first.granted_at or 0)
    ]


@pytest.mark.security("PROC-4")
def test_a_rack_is_shared_fairly_whoever_dies(passable, accounts):
    """All who wait are served, in the order of arrival; no GPU is used twice; nothing is left."""
    play(Campaign(passable, accounts, (2, 2)), few_jobs())


@pytest.mark.timeout(3600)
@pytest.mark.long  # 10 s a job, beside other work
def test_a_rack_campaign_of_random_jobs(passable, accounts):
    """The same of 300 jobs, or of some of them."""
    variables = {"RACK_SEED": 28, "RACK_FIRST": 0, "RACK_JOBS": JOBS}
    seed, first, count = (int(os.environ.get(*default)) for default in variables.items())
    jobs = list(random_jobs(seed))[first : first + count]
    sys.stdout.write(f"seed {seed}, jobs from {first} on: ")
    play(Campaign(passable, accounts, GPUS), jobs)


def play(campaign: Campaign, jobs: Sequence[Job]) -> None:
    """Run jobs, and check what holds for all."""
    try:
        campaign.run(jobs)
    finally:
        campaign.close(jobs)
    twice = campaign.observed / "twice"
    assert not twice.exists(), twice.read_text()
    for job in jobs:
        check(job)
    assert overtaken(jobs) == []
    codes = Counter(job.process.returncode for job in jobs if job.process)
    waits = [job.started_at - job.typed_at for job in jobs if job.started_at and job.waits]
    sys.stdout.write(f"{len(jobs)} jobs: {dict(codes)}; longest wait {max(waits):.0f} s\n")


def check(job: Job) -> None:
    """Check that a job has ended well, was killed, or did not want to wait."""
    assert job.process is not None
    code, text = job.process.returncode, job.log.read_text(errors="replace")
    assert "Traceback" not in text, text
    may_be_killed = job.kill_after is not None and code == -signal.SIGKILL
    may_be_refused = not job.waits and code == 78
    assert code == 0 or may_be_killed or may_be_refused, (job, text)
