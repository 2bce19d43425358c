"""Lose hosts of a run at random, let them return, and compare it with one that loses none.

    python -m bench.regrouping [--losses 30] [--seed 1]

Four ranks with gloo on three hosts of this machine, each with files of its own, train exact epochs.
A loss is, by turns at random, a rank killed, all ranks of a host killed, or a host that is silent,
is given up after a second, and wakes up later. A lost host starts again at once and joins. The
orders come from tests/training/membership_server.py, so that the figures are those of the ranks:
what the launcher takes to see a loss comes on top.

Printed: seconds from each loss (of a silent host: from giving it up) to the end of the next step,
whether the ledger is exact and the states were equal after every change, and how far the weights
are from those of a run of one process.
"""

import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rackrun.atomic import write_whole
from rackrun.commandline.parser import parse
from rackrun.contract.files import MANIFEST_NAME
from rackrun.run_folder import RunFolder
from shards.index import Manifest
from tests import warm
from tests.training.conftest import SHAPES, pack
from tests.training.membership_server import ROOT, SCRIPT, MembershipServer
from training import checkpoint
from training.run import ledger

HOSTS = (2, 1, 1)
EPOCHS = 3


@dataclass(frozen=True)
class Bench:
    """Lose hosts of a run at random, and measure how it goes on."""

    losses: int = 30
    """How often a host is lost."""
    seed: int = 1
    """Seed of what is lost, and when."""
    pause: float = 0.1
    """Seconds that every step lasts longer."""


def main() -> None:
    """Train with losses and without, and print what differs."""
    bench = parse(Bench, "python -m bench.regrouping", sys.argv[1:])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # A loss and a return take some 20 steps of the run.
        data = shards(folder, 12 * 8 * bench.losses // EPOCHS + 2)
        options = {
            "data": str(data), "epochs": EPOCHS, "exact_epochs": True, "global_batch": 12,
            "batch_size": 3, "workers": 0, "lr": 0.01, "image_size": 8, "ledger": True,
            "tensorboard": False,
        }  # fmt: skip
        server = MembershipServer(folder, HOSTS, pause=bench.pause, **options)
        try:
            losses = lose(server, bench)
        finally:
            server.close()
        report(server, losses, weights(alone(folder / "alone", options)))


def shards(folder: Path, samples: int) -> Path:
    """Return a folder with that many training samples."""
    data = folder / "data"
    data.mkdir()
    sizes = (("train", (samples // 2, samples - samples // 2)), ("val", (8, 5)))
    splits = tuple(pack(data, split, counts, (0, 1), {}) for split, counts in sizes)
    manifest = Manifest(dataset="shapes", classes=SHAPES[:2], splits=splits)
    write_whole(data / MANIFEST_NAME, manifest.serialise())
    return data


def lose(server: MembershipServer, bench: Bench) -> list[tuple[str, float, int]]:
    """Train, and lose hosts meanwhile; return what was lost, when, and from which group."""
    chance, losses = random.Random(bench.seed), list[tuple[str, float, int]]()
    for host in range(len(HOSTS)):
        server.start(host)
    while len(losses) < bench.losses:
        server.run(lambda: whole(server) or not server.alive(), 300)
        wait(server, chance.uniform(0, 0.6))
        if server.left or not server.alive():
            break
        host, kind = chance.randrange(len(HOSTS)), chance.choice(("rank", "host", "silent"))
        group = server.number
        if kind == "silent":
            server.kill(host, signal.SIGSTOP)
            wait(server, 1.0)
            losses.append((kind, time.time(), group))
            server.give_up(host)
            wait(server, 0.2)
            server.kill(host, signal.SIGCONT)
        else:
            losses.append((kind, time.time(), group))
            for process in server.hosts[host].processes[: 1 if kind == "rank" else None]:
                os.kill(process.pid, signal.SIGKILL)
        this = server.hosts[host]
        server.run(lambda this=this: all(p.returncode is not None for p in this.processes), 60)
        if not server.left:
            server.start(host)
    server.run_to_the_end(600)
    return losses


def whole(server: MembershipServer) -> bool:
    """Return whether every rank of every host is in the newest group, which trains."""
    formed = server.formed.get(server.number, ())
    return len(server.members) == sum(HOSTS) == len(formed)


def wait(server: MembershipServer, seconds: float) -> None:
    """Go on for some seconds."""
    until = time.monotonic() + seconds
    server.run(lambda: time.monotonic() > until)


def alone(folder: Path, options: dict[str, Any]) -> Path:
    """Train the same in one process; return the run's folder."""
    settings = json.dumps({**options, "run_folder": str(folder), "batch_size": 12})
    env = {**os.environ, "PYTHONPATH": str(ROOT), "STEPS": os.devnull}
    run = warm.run(SCRIPT, settings, "{}", env=env)
    assert run.returncode == 0, run.stderr
    return folder


def weights(folder: Path) -> dict[str, Any]:
    """Return the weights that a run ended with."""
    final: dict[str, Any] = checkpoint.read(RunFolder(folder).final)["model"]
    return final


def report(
    server: MembershipServer, losses: list[tuple[str, float, int]], expected: dict[str, Any]
) -> None:
    """Print how the run went on after losses, and what became of it."""
    if not server.members:
        sys.exit(f"no rank was left:\n{server.outputs()}")
    steps = [
        (float(at), int(group))
        for path in server.folder.glob("host*/steps-*")
        for at, group, _ in map(str.split, path.read_text().splitlines())
    ]
    seconds: dict[str, list[float]] = {}
    for kind, at, group in losses:
        following = [time - at for time, number in steps if number > group and time > at]
        seconds.setdefault(kind, []).append(min(following, default=float("inf")))
    for kind, each in sorted(seconds.items()):
        ordered = sorted(each)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * len(ordered)))]
        print(f"{kind:7} {len(each):3} lost: to the next step {statistics.median(each):.2f} s"
              f" (median), {p95:.2f} s (p95), {ordered[-1]:.2f} s (most)")  # fmt: skip
    folder = next(h.folder for h in server.hosts if h.first == server.members[0]) / "run"
    verdicts = ledger.verdicts(ledger.read(RunFolder(folder).ledger))
    print(f"groups {server.number}; load {os.getloadavg()[0]:.0f}")
    for verdict in verdicts:
        print(f"{'exact' if verdict.exact else 'NOT EXACT'}: {str(verdict)[:200]}")
    equal = all(
        len({(each["step"], each["digest"]) for each in formed.values()}) == 1
        for formed in server.formed.values()
    )
    print(f"states equal after every change: {equal}")
    final = weights(folder)
    print("weights differ by", max(float((final[n] - expected[n]).abs().max()) for n in expected))
    wrong = {m: codes for m, codes in server.codes.items() if set(codes) - {0, -9, 75}}
    print(f"ranks that ended otherwise: {wrong or 'none'}")
    for host in server.hosts if wrong else ():
        print((host.folder / "printed").read_text()[-3000:])


if __name__ == "__main__":
    main()
