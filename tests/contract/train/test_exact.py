"""Exact epochs on real ranks: every sample once, with the same result at any number of them."""

import json
import signal
import socket
from collections import Counter
from pathlib import Path

import pytest
import torch

import rackrun
from tests.lab.data import drawn
from tests.lab.oracles import NOTED, exact_epochs, trained_rows
from tests.lab.ranks import codes, exact_ranks
from tests.lab.run import run, write
from tests.lab.sources import made_by
from tests.lab.warm import ROOT

SMALL = "--image-size 16 --width 4 --batch-size 9 --device cpu --no-tensorboard --ema-decay 0.9"


@pytest.fixture
def shards(tmp_path):
    """Return `shards(49)`, which makes so many training images of two classes, in three shards."""

    def make(count: int, *names: str) -> Path:
        folder = tmp_path / f"shards-{count}"
        images = {
            f"images/{split}/{'ab'[n % 2]}/{n}.jpg": drawn(f"{split}{n}", (40, 40))
            for split, number in (("train", count), ("val", 5))
            for n in range(number)
        }
        line = f"rackrun convert folder images shards --shards {min(3, count // 2)} --workers 1"
        if not folder.exists():
            write(tmp_path, {folder.name: made_by(line, name="shards", **images)})
        return folder

    return make


def train(data: Path, *runs: Path, **options: object) -> list[rackrun.RunFolder]:
    """Train a rank for each folder, to the end; all of them have the same bits then."""
    ranks = exact_ranks(data, runs, **options)
    assert codes(ranks) == [0] * len(runs)
    first, *others = (final(run) for run in runs)
    assert all(far(first, other) == 0 for other in others)
    return [rackrun.RunFolder(run) for run in runs]


def final(run: Path) -> dict[str, torch.Tensor]:
    """Return the weights and their average in the newest checkpoint, which every node has."""
    newest = rackrun.load_checkpoint(max(run.glob("checkpoints/step-*.pt")))
    average = {f"average {name}": each for name, each in (newest.average or {}).items()}
    return {**newest.weights, **average}


def far(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> float:
    """Return the largest difference, relative to its tensor's largest number."""
    assert first.keys() == second.keys()
    assert all(tensor.isfinite().all() for tensor in first.values())
    return max(
        float((first[name] - second[name]).abs().max()) / max(float(first[name].abs().max()), 1e-12)
        for name in first
        if first[name].is_floating_point()
    )


def folders(root: Path, name: str, count: int = 3) -> list[Path]:
    return [root / f"{name}-{rank}" for rank in range(count)]


@pytest.mark.parametrize(
    ("samples", "options", "tolerance"),
    [
        (49, {}, 1e-9),  # a last step of one sample
        (2, {}, 1e-9),
        (61, {"batch_size": 2, "grad_accum_steps": 2}, 1e-7),  # more than fit at once
    ],
    ids=str,
)
def test_three_ranks_train_like_one_process(samples, options, tolerance, shards, tmp_path):
    """In float64 they end with its weights, all of them with the same bits; epochs are exact."""
    many = folders(tmp_path, "many")
    train(shards(samples), *many, **options)
    train(shards(samples), tmp_path / "one", **options | {"batch_size": 16, "grad_accum_steps": 1})
    assert far(final(many[0]), final(tmp_path / "one")) < tolerance
    assert exact_epochs(*reversed(many)) == [[3], [3]]  # the first has the settings


def test_damaged_images_leave_no_rank_waiting(shards, tmp_path):
    """A rank whose only image of a step is damaged takes part all the same."""
    data = shards(49)
    for path in data.glob("*train*.tar"):
        content = path.read_bytes()
        for number in range(0, 49, 2):
            image = drawn(f"train{number}", (40, 40))
            content = content.replace(image, image[:-300] + bytes(300))
        assert content != path.read_bytes()
        path.write_bytes(content)
    options = {"global_batch": 3, "bad_samples": "quarantine"}
    many = folders(tmp_path, "many")
    train(data, *many, **options)
    train(data, tmp_path / "one", **options)
    assert far(final(many[0]), final(tmp_path / "one")) < 1e-9


@pytest.mark.parametrize(
    "options", [{"precision": "bf16"}, {"grad_compression": "bfloat16"}], ids=str
)
def test_norms_and_short_sums_end_with_the_same_bits_on_all_ranks(options, shards, tmp_path):
    """They differ from one process's, but not from rank to rank."""
    train(shards(52), *folders(tmp_path, "run"), norm=True, **options)


@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.long), 3])
def test_norms_go_on_as_if_never_saved(world, shards, tmp_path):
    """Also where a rank has a single image in some steps, or the last one has fewer than ranks."""
    data, options = shards(52), {"norm": True, "global_batch": 25, "batch_size": 25}
    whole, saved, again = (folders(tmp_path, name, world) for name in ("whole", "saved", "again"))
    train(data, *whole, **options)
    runs = train(data, *saved, save_steps=2, keep_checkpoints=99, **options)
    train(data, *again, resume=str(runs[0].checkpoint(2)), **options)
    assert far(final(whole[0]), final(saved[0])) == 0
    # DDP regroups gradients after its first step: from 3 ranks on the last bit may differ.
    assert far(final(whole[0]), final(again[0])) <= (0 if world == 2 else 1e-13)


def test_ranks_judge_with_the_mean_of_their_statistics(shards, tmp_path):
    """What they measure at the end of an epoch is what one process measures of final.pt."""
    data = shards(52)
    (whole, *_) = train(data, *folders(tmp_path, "run"), norm=True)
    lines = [json.loads(line) for line in whole.metrics.read_text().splitlines()]
    *_, judged = (line["loss"] for line in lines if line["kind"] == "evaluate")
    options = f"--task {ROOT}/tests/lab/exact_task.py --workers 0 --device cpu --json"
    alone = run(f"python -m rackrun.training evaluate {whole.path} {data} {options}", tmp_path)
    assert json.loads(alone.out)["loss"] == pytest.approx(judged, rel=1e-5), alone


def test_a_signal_to_one_rank_stops_all_of_them_after_one_step(shards, tmp_path):
    """They save that step; what goes on from it ends with the bits of a run without the signal."""
    data = shards(49)
    whole, stopped, again = (folders(tmp_path, name, 2) for name in ("whole", "stopped", "again"))
    train(data, *whole)
    assert codes(exact_ranks(data, stopped, misdeed=f"1,2,{int(signal.SIGTERM)}")) == [143, 143]
    train(data, *again, resume=str(stopped[0]))
    assert far(final(whole[0]), final(again[0])) == 0
    assert exact_epochs(*reversed(stopped), *reversed(again)) == [[2], [2]]


SPEEDS = {"balance": "auto", "seconds": "0.008,0.004,0.002"}
LARGE = {"global_batch": 28, "batch_size": 10, "epochs": 8}


def counts(*runs: Path) -> list[list[int]]:
    """Return how many samples each rank had, by step."""
    return [[len(rows) for rows in ranks] for ranks in trained_rows(*runs).values()]


def test_ranks_of_unlike_speed_share_steps_by_it_with_the_weights_of_an_even_cut(shards, tmp_path):
    """Epochs stay exact although workers read ahead; a run that goes on begins with the cut that
    was saved."""
    data = shards(281)  # 11 steps an epoch, the last one of a single sample
    auto, even, again = (folders(tmp_path, name) for name in ("auto", "even", "again"))
    (first, *_) = train(data, *auto, keep_checkpoints=99, workers=[0, 2, 0], **SPEEDS, **LARGE)
    train(data, *even, **LARGE)
    assert sorted(counts(*auto)[0]) == [9, 9, 10]
    assert counts(*auto)[-2] == pytest.approx([4, 8, 16], abs=3)
    assert far(final(auto[0]), final(even[0])) < 1e-9
    assert exact_epochs(*reversed(auto)) == [[3]] * 8
    train(data, *again, resume=str(first.checkpoint(77)), balance="auto", **LARGE)
    assert counts(*again)[0] == counts(*auto)[77]
    assert far(final(auto[0]), final(again[0])) < 1e-9


def test_norms_of_ranks_of_unlike_speed_end_with_the_same_bits(shards, tmp_path):
    options = {**SPEEDS, **LARGE, "grad_accum_steps": 2, "norm": True}
    train(shards(281), *folders(tmp_path, "run"), **options)


def test_the_rank_that_computes_longest_is_named(shards, tmp_path, capsys):
    (run, _) = train(shards(281), *folders(tmp_path, "run", 2), seconds="0,0.01", log_every_steps=1)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    waits = [line for line in lines if line["kind"] == "waits"]
    assert waits and {(line["rank"], line["why"]) for line in waits} == {(1, "compute")}
    assert f"wait for rank 1 on {socket.gethostname()} " in capsys.readouterr().out


def test_an_error_in_the_last_step_ends_all_ranks(shards, tmp_path):
    """No rank waits there for the one that failed, which alone has a sample."""
    ranks = exact_ranks(shards(49), folders(tmp_path, "run"), misdeed="any,4,error")
    assert 0 not in codes(ranks)


def test_a_new_node_gets_what_the_others_have(shards, tmp_path):
    """Three nodes with disks of their own: the first is new, the second has an older checkpoint
    (its newest is damaged), the third the newest. All go on from that one, and each of them
    could go on alone afterwards: it has the checkpoints."""
    new, older, newest = runs = folders(tmp_path, "run")
    options = {"global_batch": 6, "batch_size": 6, "save_minutes": 1e-9, "keep_checkpoints": 99}
    for run_folder, epochs in ((older, 1), (newest, 2)):
        (made,) = train(shards(61), run_folder, epochs=epochs, **options)
    damaged = rackrun.RunFolder(older).checkpoint(11)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert made.checkpoint(22).exists()
    train(shards(61), *runs, epochs=3, resume=list(runs), **options)
    for run_folder in runs:
        kept = {int(path.stem[5:]) for path in run_folder.glob("checkpoints/step-*.pt")}
        assert {22, 33} <= kept
    assert exact_epochs(*runs) == [[1], [1], [3]]
    (none,) = exact_ranks(shards(61), [new], resume=tmp_path / "nowhere")
    out, _ = none.communicate()
    assert none.returncode == 64 and "no such file or run folder" in out


def catdog(data: Path, run_folder: Path, options: str) -> dict[str, torch.Tensor]:
    """Train a small run of cats and dogs on one rank; return its weights."""
    line = f"python -m rackrun.training catdog --data {data} --run-folder {run_folder} {SMALL}"
    result = run(f"{line} {options}", data.parent, env=NOTED)
    assert result.code == 0, result
    return final(run_folder)


def test_any_step_and_any_number_of_workers_give_the_same_bits(shards, tmp_path):
    """A run that goes on from any step, and one with other loader workers, ends with the weights
    of the run that did neither, bit for bit; --splitshards is another name of all this."""
    data, two = shards(61), "--epochs 2 --workers"
    every_step = "--exact-epochs --save-minutes 1e-9 --keep-checkpoints 99"
    whole = catdog(data, tmp_path / "whole", f"{two} 0 {every_step}")
    assert far(whole, catdog(data, tmp_path / "three", f"{two} 3 --splitshards")) == 0
    for step in (1, 7, 13):  # 7 steps make an epoch
        origin = rackrun.RunFolder(tmp_path / "whole").checkpoint(step)
        went_on = tmp_path / f"from-{step}"
        options = f"{two} 0 --exact-epochs --resume {origin}"
        assert far(whole, catdog(data, went_on, options)) == 0, step
        assert exact_epochs(tmp_path / "whole", went_on) == [[1], [1]]


def rows_by_epoch(run_folder: Path, epoch_steps: int) -> list[Counter[int]]:
    """Return how often each row was trained on, by epoch."""
    counts: dict[int, Counter[int]] = {}
    for step, ranks in trained_rows(run_folder).items():
        counts.setdefault(step // epoch_steps, Counter()).update(
            row for rows in ranks for row in rows
        )
    return list(counts.values())


def test_folders_are_joined_and_classes_come_as_often_as_their_weights(shards, tmp_path):
    """Of two folders, one class twice, one every other epoch; validation is joined, too."""
    first, second = shards(12), shards(8)
    options = f"--data {second} --exact-epochs --class-weights a=2,b=0.5 --epochs 4 --workers 0"
    catdog(first, tmp_path / "run", options)
    labels = [
        int(label)
        for data in (first, second)
        for label in rackrun.open_source(str(data)).index("train")["label"]
    ]
    batch, due = 9, 2 * labels.count(0) + labels.count(1) // 2
    epochs = rows_by_epoch(tmp_path / "run", -(-due // batch))
    assert len(epochs) == 4
    for pair in (epochs[:2], epochs[2:]):
        for row, label in enumerate(labels):
            times = [epoch[row] for epoch in pair]
            assert times == [2, 2] if label == 0 else sum(times) == 1, (row, times)


def test_chosen_samples_are_all_that_is_trained_on(shards, tmp_path):
    """A class, and the first samples of it; a run goes on within an epoch with the same bits."""
    data = shards(61)
    args = "--exact-epochs --only-classes b --max-train-samples 20 --save-minutes 1e-9 --workers 0"
    whole = catdog(data, tmp_path / "whole", f"{args} --epochs 2")
    of_class = rackrun.open_source(str(data)).index("train")["label"].nonzero()[0].tolist()
    epochs = rows_by_epoch(tmp_path / "whole", 3)
    assert epochs == [Counter(of_class[:20])] * 2
    origin = rackrun.RunFolder(tmp_path / "whole").checkpoint(4)
    assert far(whole, catdog(data, tmp_path / "on", f"{args} --epochs 2 --resume {origin}")) == 0
