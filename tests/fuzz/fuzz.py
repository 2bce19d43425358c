"""Every decoder under a coverage-guided fuzzer: `python -m tests.fuzz.fuzz --inputs 10_000_000`.

The targets are the functions `fuzz_*` of the files `targets_*.py` beside this one. Each runs in a
process of its own, forked from one that has imported all of them, with an equal share of the
inputs. An input that ends in a traceback, takes more than a minute (by the clock: others use the
machine as well), or more than 4 GiB of memory, is kept as a file and fails the target. A target
whose share would take longer than `--minutes` hands the rest to the faster ones.
"""

import argparse
import ast
import importlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
Function = Callable[[bytes], None]
HANG_SECONDS = 60
MEMORY_MB = 4096
INPUT_BYTES = 4096
FIRST_ROUND = 2_000
PACKAGES = ["rackrun", "launcher", "shards", "convert", "nginx", "training"]


class Target(NamedTuple):
    """A function that takes bytes and raises nothing."""

    module: str
    name: str

    @property
    def place(self) -> str:
        """Return the name of its folder: files of targets may have functions of one name."""
        return f"{self.module.rpartition('_')[2]}-{self.name}"


class Result(NamedTuple):
    """What one process did with its inputs."""

    inputs: int
    seconds: float
    failure: str


def targets() -> Iterator[Target]:
    """Yield all targets, read from the sources: nothing is imported for it."""
    for path in sorted(HERE.glob("targets_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("fuzz_"):
                yield Target(f"tests.fuzz.{path.stem}", node.name)


def imported(result: Sequence[Target]) -> dict[Target, Function]:
    """Import the targets, and all that they call with the fuzzer's counters in it."""
    import atheris

    with atheris.instrument_imports(include=PACKAGES, enable_loader_override=False):
        modules = {target: importlib.import_module(target.module) for target in result}
    return {target: getattr(module, target.name) for target, module in modules.items()}


def fuzz(function: Function, inputs: int, seconds: int, seed: int, corpus: Path) -> Result:
    """Run one target in a process of its own; return how far it came."""
    corpus.mkdir(parents=True, exist_ok=True)
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
            child(function, [*options, str(corpus)], output.fileno())
        _, status = os.waitpid(pid, 0)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    counts = re.findall(r"^(?:Done|#)\s?(\d+)", printed, re.MULTILINE)
    failure = "" if status == 0 else printed[-3000:] or f"ended with status {status}"
    return Result(max(map(int, counts), default=0), time.monotonic() - began, failure)


def child(function: Function, options: Sequence[str], output: int) -> NoReturn:
    """Be the process of one target."""
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
    """Fuzz all targets and print a Markdown table; 1 when any input broke one."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--inputs", type=int, default=10_000_000, help="for all targets together")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most, for each target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="targets with this in their name")
    options = parser.parse_args()
    actual = [target for target in targets() if options.only in target.name]
    corpus = Path(tempfile.mkdtemp(prefix="rackrun-fuzz-"))
    functions = imported(actual)
    print("| target | inputs | seconds | broken |\n|---|--:|--:|--:|", flush=True)
    total, broken = 0, 0
    rates = {}
    for target in actual:  # a first round measures how fast each of them is
        corpus_of = corpus / target.place
        result = fuzz(functions[target], FIRST_ROUND, HANG_SECONDS, options.seed, corpus_of)
        rates[target] = result.inputs / max(result.seconds, 0.1)
    for number, target in enumerate(sorted(actual, key=rates.__getitem__)):
        share = max(1, (options.inputs - total) // (len(actual) - number))
        seconds = int(options.minutes * 60)
        result = fuzz(functions[target], share, seconds, options.seed, corpus / target.place)
        total, broken = total + result.inputs, broken + bool(result.failure)
        print(
            f"| {target.name} | {result.inputs:,} | {result.seconds:.0f} |"
            f" {'yes' if result.failure else ''} |",
            flush=True,
        )
        if result.failure:
            print(result.failure, file=sys.stderr, flush=True)
    print(f"\n{total:,} inputs, seed {options.seed}; inputs that broke a target: {corpus}")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
