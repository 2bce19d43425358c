"""`@on_ranks(2)`: a test whose own body runs in every rank; and ranks that train exactly."""

import base64
import contextlib
import importlib
import inspect
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from tests.lab import warm


def on_ranks(world: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test's body in each of so many ranks, which know one another as under torchrun.

    The body gets fixtures that can be pickled; an exception in any rank fails the test.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        def test(**fixtures: Any) -> None:
            given = base64.b85encode(pickle.dumps(fixtures)).decode()
            output_of_ranks(world, "-m", __name__, body.__module__, body.__name__, given)

        test.__signature__ = inspect.signature(body)
        test.__name__, test.__doc__, test.__module__ = body.__name__, body.__doc__, body.__module__
        test.body = body
        return test

    return decorate


def output_of_ranks(world: int, *args: object) -> str:
    """Return what the ranks of a program print; AssertionError unless all of them end with 0."""
    job = warm.ranks(
        world,
        *args,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(warm.ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )

    def output(rank: warm.Python) -> str:
        out, _ = rank.communicate()
        for other in job if rank.returncode else ():
            other.kill()  # it would wait for this one
        return str(out)

    with ThreadPoolExecutor() as pool:
        outputs = list(pool.map(output, job))
    printed = "".join(map(without_gloo, outputs))
    assert [rank.returncode for rank in job] == [0] * world, printed
    return printed


def exact_ranks(data: Path, runs: Sequence[Path], **options: Any) -> list[warm.Python]:
    """Start training of tests/lab/exact_task.py: a rank on a host of its own for each run folder.

    It works in the folder above. Of options that are lists, each rank gets its own.
    """
    task = ("-m", "rackrun.training", warm.ROOT / "tests" / "lab" / "exact_task.py")
    world = {
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(warm.free_port(""))},
        **{"WORLD_SIZE": str(len(runs)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"RACKRUN_NOTE_ROWS": "1", "PYTHONPATH": str(warm.ROOT), "OMP_NUM_THREADS": "1"},
    }
    ranks = []
    for rank, run in enumerate(runs):
        words = ["--data", data, "--run-folder", run]
        for name, value in options.items():
            own = value[rank] if isinstance(value, list) else value
            words += [f"--{name.replace('_', '-')}", *([] if own is True else [own])]
        ranks.append(
            warm.Python(
                *(*task, *words),
                cwd=run.parent,
                env={**os.environ, **world, "RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return ranks


def codes(ranks: list[warm.Python], seconds: float = 240) -> list[int]:
    """Wait for all ranks; return their exit codes, and show what they printed if a test fails."""
    with contextlib.ExitStack() as running:
        for rank in ranks:
            running.enter_context(rank)
        try:
            for rank in ranks:
                sys.stdout.write(rank.communicate(timeout=seconds)[0])
        except subprocess.TimeoutExpired:
            for rank in ranks:
                rank.kill()
            raise
    return [rank.wait() for rank in ranks]


def without_gloo(printed: str) -> str:
    """Return what a rank prints without the line that gloo of torch 2.10 adds."""
    lines = printed.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("[Gloo] Rank "))


def play(module: str, name: str, given: str) -> NoReturn:
    """Run the body of a test as the rank that this process is."""
    fixtures = pickle.loads(base64.b85decode(given))
    getattr(importlib.import_module(module), name).body(**fixtures)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    play(*sys.argv[1:])
