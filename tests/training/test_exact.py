"""Exact epochs on real ranks: every sample once, with the same result at any number of them."""

import gc
import json
import multiprocessing
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.contract.variables import NOTE_ROWS
from rackrun.run_folder import RunFolder
from rackrun.training import checkpoint
from rackrun.training import train as loop
from rackrun.training.config import from_command_line
from rackrun.training.data.choice import chosen
from rackrun.training.data.open import Exact, open_data
from rackrun.training.data.pool import SamplePool
from rackrun.training.data.samples import StoredSample
from rackrun.training.ranks import Ranks
from tests.lab import warm
from tests.lab.oracles import exact_epochs

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SIZES = {49: (1, 30, 18), 52: (50, 1, 1), 61: (20, 20, 21), 2: (2,)}


@pytest.fixture(scope="module")
def folder(make_shards: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return shard folders named by their samples, with the most uneven shards."""
    folder = tmp_path_factory.mktemp("exact")
    for samples, shards in SIZES.items():
        (folder / str(samples)).symlink_to(make_shards(train=shards, val=(3, 2)))
    damaged = {f"train_{number:05d}": b"no picture" for number in range(0, 49, 2)}
    broken = make_shards(train=SIZES[49], val=(3, 2), broken=damaged)
    (folder / "broken").symlink_to(broken)
    return folder


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def started(
    ranks: int, folder: Path, *args: str, nodes: tuple[str, ...] = ()
) -> list[subprocess.Popen[str]]:
    """Start the ranks of a job as torchrun would, without importing torch in each of them.

    With nodes, each rank is a node of its own, and these end their commands.
    """
    common = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
    }
    return [
        warm.Python(
            *(HERE / "exact_ranks.py", folder, *args, *nodes[rank : rank + 1]),
            env={**common, "RANK": str(rank), "LOCAL_RANK": "0" if nodes else str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        for rank in range(ranks)
    ]


def ended(job: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Wait for all ranks; return exit code and output of each."""
    results = []
    for rank in job:
        output, _ = rank.communicate(timeout=240)
        results.append((rank.returncode, output))
    return results


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (
            2,
            (
                "float16_skips_the_same_steps",
                "each_rank_keeps_its_statistics",
                "norms_go_on_as_if_never_saved",
            ),
        ),
        (
            3,
            (
                "like_one_process",
                "in_parts_like_one_process",
                "damaged_images_leave_no_rank_waiting",
                "batch_norms_and_autocast_end_equal",
                "norms_go_on_as_if_never_saved",
                "wrong_ways_are_seen",
            ),
        ),
        pytest.param(
            2,
            ("like_one_process",),
            marks=pytest.mark.long,
        ),
        pytest.param(5, ("like_one_process",), marks=pytest.mark.long),
        pytest.param(3, ("a_compiled_model_ends_equal",), marks=pytest.mark.long),
    ],
    ids=["2 ranks", "3 ranks", "what 3 ranks show", "5 ranks", "compiled"],
)
def test_ranks_train_like_one_process(ranks, cases, folder):
    """On data that divide by nothing, N ranks end with one process's weights (in float64), all of
    them with the same bits in every tensor of the state; known mistakes are seen as such."""
    results = ended(started(ranks, folder, *cases))
    assert [code for code, _ in results] == [0] * ranks, "\n".join(args for _, args in results)
    _, output = results[0]
    assert [f"holds: {case}" in output for case in cases] == [True] * len(cases), output


def test_loader_workers_end_with_data_that_nobody_has_any_more(folder):
    """They need no close, and no garbage collection: an error may have left the data behind."""

    def workers_reading() -> int:
        config = CatDog(
            data=str(folder / "61"), batch_size=8, workers=1, image_size=32, exact_epochs=True
        )
        ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
        data = Exact(config, ranks, partial(TASK.transforms, config))
        batches = data.training(0)
        next(batches)
        return len(multiprocessing.active_children())

    gc.disable()
    try:
        assert workers_reading() == 1
        assert not multiprocessing.active_children()
    finally:
        gc.enable()


@pytest.mark.parametrize("case", ["a_stray_collective_does_not_pass", "an_error_in_the_tail"])
def test_what_goes_wrong_in_the_tail_ends_all_ranks(case, folder):
    """No rank waits in the last step for one that failed, or that exchanges something else."""
    results = ended(started(3, folder, case))
    assert all(code != 0 for code, _ in results), results
    assert not any(f"holds: {case}" in output for _, output in results)


def options(name: str, **changed: Any) -> str:
    values = {"samples": 61, "name": name, "epochs": 3, "global_batch": 6, "batch_size": 6}
    return json.dumps({**values, **changed})


def far(run: Path, other: Path) -> float:
    first, second = (checkpoint.read(RunFolder(path).final)["model"] for path in (run, other))
    return max(float((first[name] - second[name]).abs().max()) for name in first)


def test_a_new_node_gets_what_the_others_have(folder):
    """Three nodes with disks of their own: the first is new, the second has an older checkpoint
    (its newest is damaged), the third the newest. All go on from that one, and each of them
    could go on alone afterwards: it has the checkpoints."""
    runs = [folder / "runs" / name for name in ("new", "older", "newest")]
    for name, epochs in (("older", 1), ("newest", 2)):
        (code, output), *_ = ended(
            started(
                1,
                folder,
                "train",
                options(name, epochs=epochs, save_minutes=1e-9, keep_checkpoints=99),
            )
        )
        assert code == 0, output
    damaged = RunFolder(runs[1]).checkpoint(11)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    nodes = tuple(options(run.name, resume=str(run)) for run in runs)
    results = ended(started(3, folder, "train", nodes=nodes))
    assert [code for code, _ in results] == [0, 0, 0], results
    assert "resumed after step 22" in results[0][1]
    for run in runs:
        assert {22, 33} <= {int(path.stem[5:]) for path in run.glob("checkpoints/step-*.pt")}
    assert exact_epochs(*runs) == [[1], [1], [3]]
    states = [checkpoint.read(RunFolder(run).checkpoint(33))["state"]["model"] for run in runs]
    assert same(states[0], states[1]) and same(states[0], states[2])
    none = ended(started(1, folder, "train", options("none", resume=str(folder / "nowhere"))))
    assert none[0][0] == 64 and "no such file or run folder" in none[0][1]


def trained_alone(data: Path, run: Path, *args: str) -> dict[str, torch.Tensor]:
    """Train a small run of cats and dogs in this process; return its weights."""
    from rackrun.catdog.model import TASK
    from rackrun.catdog.recipes import RECIPES

    arguments = [
        "--data", str(data), "--run-folder", str(run), "--image-size", "16", "--width", "4",
        "--batch-size", "9", "--device", "cpu", "--no-tensorboard", "--ema-decay", "0.9", *args,
    ]  # fmt: skip
    for option, value in (("--epochs", "2"), ("--workers", "0")):
        if option not in args:
            arguments += [option, value]
    assert loop.run(TASK, from_command_line(RECIPES, "test", arguments)[0]) == 0
    weights: dict[str, torch.Tensor] = checkpoint.read(RunFolder(run).final)["model"]
    return weights


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


def test_any_step_and_any_number_of_workers_give_the_same_bits(folder, tmp_path, monkeypatch):
    """A run that goes on from any step, and one with other loader workers, ends with the weights
    of the run that did neither, bit for bit; --splitshards is another name of all this."""
    data = folder / "61"
    monkeypatch.setenv(NOTE_ROWS, "1")
    every_step = ("--save-minutes", "1e-9", "--keep-checkpoints", "99")
    whole = trained_alone(data, tmp_path / "whole", "--exact-epochs", *every_step)
    assert same(whole, trained_alone(data, tmp_path / "three", "--splitshards", "--workers", "3"))
    for step in (1, 6, 7, 8, 13):  # 7 steps make an epoch
        origin = RunFolder(tmp_path / "whole").checkpoint(step)
        run = tmp_path / f"from-{step}"
        went_on = trained_alone(data, run, "--exact-epochs", "--resume", str(origin))
        assert same(whole, went_on), step
        assert exact_epochs(tmp_path / "whole", run) == [[1], [1]]


def test_folders_are_joined_and_classes_come_as_often_as_their_weights(
    make_shards, tmp_path, monkeypatch
):
    """Of two folders, one class twice, one every other epoch; validation is joined, too."""
    monkeypatch.setenv(NOTE_ROWS, "1")
    first, further = make_shards(train=(11, 2), val=(2, 2)), make_shards(train=(7,), val=(3,))
    options = ("--data", str(further), "--class-weights", "disc=2,box=0.5", "--epochs", "4")
    trained_alone(first, tmp_path / "run", "--exact-epochs", *options)
    labels = np.r_[np.arange(13) % 2, np.arange(7) % 2]
    config = CatDog(
        data=f"{first}::{further}", class_weights="disc=2,box=0.5", workers=0, device="cpu"
    )
    choice = chosen(config, labels, ("disc", "box"))
    times = {epoch: np.bincount(choice.rows(epoch), minlength=20) for epoch in range(4)}
    assert exact_epochs(tmp_path / "run", due=times) == [[1]] * 4
    assert times[0][labels == 0].tolist() == [2] * 11
    assert sorted((times[0] + times[1])[labels == 1]) == [0, *[1] * 8]
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    data = open_data(config, alone, partial(TASK.transforms, config), "t", 2)
    assert sum(len(batch.labels) for batch in data.evaluation()) == 7
    grid = data.grid(3, (6, 0, 5))
    assert grid and grid.rows is not None and grid.rows.tolist() == [6, 0, 5]


def test_chosen_samples_are_all_that_is_trained_on(folder, tmp_path, monkeypatch):
    """A class, and the first samples of it: nothing else is even read, and a run goes on in the
    middle of an epoch with the same bits."""
    args = ["--only-classes", "box", "--max-train-samples", "20", "--save-minutes", "1e-9"]
    args += ["--keep-checkpoints", "99"]
    read: list[int] = []

    def noted(pool: SamplePool, rows: np.ndarray) -> Iterator[StoredSample]:
        if pool.split == "train":
            read.extend(rows.tolist())
        return whole_read(pool, rows)

    whole_read = SamplePool.samples
    monkeypatch.setattr(SamplePool, "samples", noted)
    whole = trained_alone(folder / "61", tmp_path / "whole", *args)
    assert set(read) == set(range(1, 41, 2))
    origin = RunFolder(tmp_path / "whole").checkpoint(1)
    went_on = trained_alone(folder / "61", tmp_path / "on", *args, "--resume", str(origin))
    assert same(whole, went_on)
