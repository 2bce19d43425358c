"""Ranks of unlike speed: what --balance auto gains over an even cut, and what it costs.

    python -m bench.balance [--delays 0.008,0.004,0.002] [--batch 112] [--steps 260]

A rank with gloo for each delay, a known time for each image, trains exact epochs on this machine:
with the even cut and with --balance auto. Printed: images/s of all ranks from step 200 on, as a
share of the sum of the speeds that the delays allow, and what a step takes beyond the delays;
whether epochs are exact; how far the weights are from those of the even cut; the steps after
which the cut moved; what ranks of equal speed, whose times vary by a tenth, do; and milliseconds a
step that it costs.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rackrun.atomic import write_whole
from rackrun.commandline.parser import parse
from rackrun.contract.files import MANIFEST_NAME
from rackrun.run_folder import RunFolder
from rackrun.shards.index import Manifest
from rackrun.training import checkpoint
from rackrun.training.ranks import Ranks
from tests import warm
from tests.training.conftest import SHAPES, pack
from tests.training.torchrun import output_of
from tests.training.trained_rows import exact_epochs, trained_rows

EPOCHS = 4
REACHED = 200  # steps in which the cut must have been found
EXCHANGES = 1000
EXCHANGE = "exchange"
"""Of a rank that this program starts: measure exchanges."""


@dataclass(frozen=True)
class Bench:
    """Compare an even cut with one by speed, on ranks of known speed."""

    delays: str = "0.008,0.004,0.002"
    """Seconds that each rank takes for an image."""
    batch: int = 112
    """Images per step over all ranks."""
    steps: int = 260
    """Steps of the run, more than 200."""


def main() -> None:
    """Train with both cuts, and print what differs."""
    if sys.argv[1:] == [EXCHANGE]:
        exchange()
        return
    bench = parse(Bench, "python -m bench.balance", sys.argv[1:])
    delays = [float(each) for each in bench.delays.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # An epoch ends with a step of one sample.
        samples = (bench.steps // EPOCHS - 1) * bench.batch + 1
        (folder / str(samples)).symlink_to(shards(folder, samples))
        common = {
            "samples": samples, "delays": delays, "noise": 0.0, "norm": False, "workers": 1,
            "global_batch": bench.batch, "batch_size": -(-bench.batch // len(delays)),
            "epochs": EPOCHS, "balance": "auto",
        }  # fmt: skip
        still, equal = [0.0] * len(delays), [statistics.harmonic_mean(delays)] * len(delays)
        runs = [
            {**common, "name": "auto"},
            {**common, "name": "even", "balance": "even", "epochs": 1},
            {**common, "name": "weights", "balance": "even", "delays": still},
            {**common, "name": "noise", "delays": equal, "noise": 0.1},
        ]
        output_of("balance_ranks.py", folder, json.dumps(runs), ranks=len(delays))
        report(folder, delays)
    job = warm.ranks(len(delays), "-m", "bench.balance", EXCHANGE, env=dict(os.environ))
    sys.exit(max(process.wait() for process in job))


def shards(folder: Path, samples: int) -> Path:
    """Return a folder with that many training samples."""
    data = folder / "data"
    data.mkdir()
    counts = {"train": samples, "val": 13}
    splits = tuple(pack(data, name, (count,), (0, 1), {}) for name, count in counts.items())
    manifest = Manifest(dataset="shapes", classes=SHAPES[:2], splits=splits)
    write_whole(data / MANIFEST_NAME, manifest.serialise())
    return data


def report(folder: Path, delays: list[float]) -> None:
    """Print speed, cuts, weights and costs."""
    possible = sum(1 / delay for delay in delays)
    print(f"delays {delays}: {possible:,.0f} images/s in sum; load {os.getloadavg()[0]:.1f}")
    for name, first in (("even", 10), ("auto", REACHED)):
        images, seconds = full_step(folder, name, first)
        share = images / seconds / possible
        cut = shares(folder, name)[-1]["images"].values() if name == "auto" else ()
        counts = list(cut) or [-(-images // len(delays))] * len(delays)
        slowest = max(count * delay for count, delay in zip(counts, delays, strict=True))
        beyond = f"{1e3 * (seconds - slowest):.0f} ms beyond its {1e3 * slowest:.0f} of delays"
        print(f"{name:5} from step {first}: {share:.1%} of the sum, a step takes {beyond}")
    for name in ("auto", "noise"):
        cuts = [(line["step"], list(line["images"].values())) for line in shares(folder, name)]
        print(f"{name}: images of each rank after steps {', '.join(map(str, cuts))}")
        exact_epochs(folder / "runs" / name)
    auto, even = (
        checkpoint.read(RunFolder(folder / "runs" / name).final)["model"]
        for name in ("auto", "weights")
    )
    print("weights differ by", max(float((auto[n] - even[n]).abs().max()) for n in even))
    first = left(folder, "auto")
    each = first["seconds"] / len(first["ends"])
    print(f"{each * 1e3:.3f} ms a step to send times and look for a better cut")
    ends = first["ends"]
    steps = [after - before for before, after in zip(ends, ends[1:], strict=False)]
    for line in shares(folder, "auto")[1:]:
        longest = max(steps[line["step"] - 1 : line["step"] + 3], default=0.0)
        print(f"longest of the three steps after {line['step']}: {longest * 1e3:.0f} ms")


def full_step(folder: Path, name: str, first: int) -> tuple[int, float]:
    """Return the images of a full step, and the seconds of such steps from one on."""
    steps = trained_rows(folder / "runs" / name).values()
    by_step = [sum(map(len, of_ranks)) for of_ranks in steps]
    ends = left(folder, name)["ends"]
    full = [
        (count, after - before)
        for count, before, after in zip(by_step[1:], ends, ends[1:], strict=False)
        if count == max(by_step)
    ][first - 1 :]
    # The median: at the end of an epoch, ranks evaluate and save between two steps.
    return max(by_step), statistics.median(seconds for _, seconds in full)


def left(folder: Path, name: str) -> dict[str, Any]:
    """Return what the first rank of a run left."""
    result: dict[str, Any] = json.loads((folder / f"{name}-0.json").read_text())
    return result


def shares(folder: Path, name: str) -> list[dict[str, Any]]:
    """Return the lines about shares."""
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["kind"] == "shares"]


def exchange() -> None:
    """Print, as one of several ranks, what it takes to exchange times beside a request."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"))
    for numbers in (2, 4 + ranks.world, 4 + 64):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(EXCHANGES):
            ranks.all_reduce_max_later(*[0] * numbers).wait()
        seconds = (time.perf_counter() - begun) / EXCHANGES
        if ranks.first:
            print(f"exchange of {numbers:2} numbers: {seconds * 1e3:.3f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
