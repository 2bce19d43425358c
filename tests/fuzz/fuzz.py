"""Every decoder under a coverage-guided fuzzer: `python -m tests.fuzz.fuzz --inputs 10_000_000`.

Each runs in a process of its own, forked from one that has imported all of them, with an equal
share of the inputs. An input that ends in a traceback, takes more than a minute (by the clock:
others use the machine as well), or more than 4 GiB of memory, is kept as a file and fails the
decoder. One whose share would take longer than `--minutes` hands the rest to the faster ones.
"""

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

from tests.fuzz.decoders import Decoder, decoders

ROOT = Path(__file__).parents[2]
HANG_SECONDS = 60
MEMORY_MB = 4096
INPUT_BYTES = 4096
FIRST_ROUND = 2_000
PACKAGES = ["rackrun", "launcher", "shards", "convert", "nginx", "training"]


class Result(NamedTuple):
    """What one process did with its inputs."""

    inputs: int
    seconds: float
    failure: str


def imported() -> list[Decoder]:
    """Import all decoders, and what they call with the fuzzer's counters in it."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES, enable_loader_override=False):
        return decoders()


def fuzz(decoder: Decoder, inputs: int, seconds: int, seed: int, corpus: Path) -> Result:
    """Run one decoder in a process of its own; return how far it came."""
    corpus.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(decoder.seeds):
        (corpus / f"seed-{number}").write_bytes(data)
    limits = {
        "runs": inputs,
        "max_total_time": seconds,
        "timeout": HANG_SECONDS,
        "rss_limit_mb": MEMORY_MB,
        "max_len": INPUT_BYTES,
        "seed": seed,
        "artifact_prefix": f"{corpus}-",
    }
    options = [f"-{name}={value}" for name, value in limits.items()]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        pid = os.fork()
        if pid == 0:
            child(decoder.function, [*options, str(corpus)], output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    counts = re.findall(r"^(?:Done|#)\s?(\d+)", printed, re.MULTILINE)
    failure = "" if status == 0 else printed[-3000:] or f"ended with status {status}"
    return Result(max(map(int, counts), default=0), time.monotonic() - began, failure)


def child(function: Callable[[bytes], None], options: Sequence[str], output: int) -> NoReturn:
    """Be the process of one decoder."""
    import atheris

    try:
        os.dup2(output, sys.stdout.fileno())
        os.dup2(output, sys.stderr.fileno())
        atheris.Setup([sys.argv[0], *options], function)
        atheris.Fuzz()
        os._exit(0)
    finally:
        os._exit(1)


def main() -> int:
    """Fuzz all decoders and print a Markdown table; 1 when any input broke one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="for all targets together")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most, for each decoder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="decoders with this in their name")
    options = parser.parse_args()
    corpus = Path(tempfile.mkdtemp(prefix="rackrun-fuzz-"))
    chosen = [decoder for decoder in imported() if options.only in decoder.name]
    print("| decoder | inputs | seconds | broken |\n|---|--:|--:|--:|", flush=True)
    total, broken = 0, 0
    rates = {}
    for decoder in chosen:  # a first round measures how fast each of them is
        first = fuzz(decoder, FIRST_ROUND, HANG_SECONDS, options.seed, corpus / decoder.name)
        rates[decoder] = first.inputs / max(first.seconds, 0.1)
    for number, decoder in enumerate(sorted(chosen, key=rates.__getitem__)):
        share = max(1, (options.inputs - total) // (len(chosen) - number))
        seconds = int(options.minutes * 60)
        result = fuzz(decoder, share, seconds, options.seed, corpus / decoder.name)
        total, broken = total + result.inputs, broken + bool(result.failure)
        print(
            f"| {decoder.name} | {result.inputs:,} | {result.seconds:.0f} |"
            f" {'yes' if result.failure else ''} |",
            flush=True,
        )
        if result.failure:
            print(result.failure, file=sys.stderr, flush=True)
    print(f"\n{total:,} inputs, seed {options.seed}; inputs that broke a decoder: {corpus}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
