"""The loop, in this process: it learns, it can be interrupted, and it leaves what it promises."""

import gzip
import json
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from rackrun.atomic import partials
from rackrun.catdog.model import TASK
from rackrun.errors import Problem, SaveError
from rackrun.run_folder import RunFolder
from rackrun.run_report.folder import mean_speed, read
from rackrun.training import checkpoint
from rackrun.training import train as loop
from rackrun.training.checkpoint import pack
from rackrun.training.data.open import Exact
from rackrun.training.data.ring import Batch
from rackrun.training.state import TrainingState
from tests.training.conftest import same_weights, settings


@pytest.fixture(scope="module")
def whole(shapes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an uninterrupted run of four epochs."""
    folder = tmp_path_factory.mktemp("runs") / "20260101-000000-catdog"
    assert loop.run(TASK, settings(shapes, folder, tensorboard=True)) == 0
    return folder


def test_the_images_with_the_highest_loss_are_kept_in_order(whole):
    """The label's probability rises from image to image; all others have a higher one."""

    def of_label(grid: Mapping[str, npt.NDArray[Any]]) -> dict[str, float]:
        is_right = grid["labels"] == grid["predicted"]
        shares = np.where(is_right, grid["probability"], 1 - grid["probability"])
        return dict(zip(grid["keys"].tolist(), shares.tolist(), strict=True))

    folder = RunFolder(whole)
    hardest, some = of_label(np.load(folder.hardest)), of_label(np.load(folder.predictions))
    ascending = list(hardest.values())
    assert len(hardest) == 24 and ascending == sorted(ascending)
    others = [share for key, share in some.items() if key not in hardest]
    assert others and min(others) >= ascending[-1]
    page = folder.report.read_text()
    assert "24 validation images with the highest loss" in page
    assert page.count(f"<code>{next(iter(hardest))}</code>") == 1


def test_resume_at_an_epoch_goes_on_bit_for_bit(shapes, whole, tmp_path):
    """Weights, optimiser, schedule, average and data: as if nothing had happened."""
    origin = RunFolder(whole).checkpoint(20)
    assert loop.run(TASK, settings(shapes, tmp_path, resume=str(origin))) == 0
    assert same_weights(whole, tmp_path)
    old, new = (
        [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (whole, tmp_path)
    )
    for line in old + new:
        for measured in ("images_per_second", "data_share", "time"):
            line.pop(measured, None)
    new.remove({"kind": "start", "step": 20, "epoch": 2.0})
    assert new == old
    assert [(part.step, part.train[-1]["step"]) for part in read(tmp_path).parts] == [
        (0, 20),
        (20, 40),
    ]


def test_an_attempt_goes_on_from_an_earlier_one_or_begins_anew(shapes, whole, tmp_path, capsys):
    """The newest attempt may have failed before it saved anything, even all of them; where all
    that was saved is damaged, starting from scratch stays the user's decision."""
    config = settings(shapes, tmp_path / "on", earlier_attempts=str(whole))
    assert loop.run(TASK, config) == 0
    assert f"resumed after step 40 of {whole}" in capsys.readouterr().out
    assert same_weights(whole, tmp_path / "on")
    options = {"earlier_attempts": str(tmp_path / "never"), "epochs": 1}
    assert loop.run(TASK, settings(shapes, tmp_path / "anew", **options)) == 0
    assert "no checkpoint from earlier attempts; starting from scratch" in capsys.readouterr().out
    weights = {**options, "weights": str(whole / "final.pt"), "lr": 0.0}
    assert loop.run(TASK, settings(shapes, tmp_path / "weights", **weights)) == 0
    begun, ended = (
        checkpoint.read(folder / "final.pt")["model"] for folder in (whole, tmp_path / "weights")
    )
    for name in begun:  # the average begins with the weights that were loaded
        assert "running" in name or "tracked" in name or torch.equal(begun[name], ended[name])
    for path in checkpoint.steps_in(tmp_path / "anew" / "checkpoints"):
        path.write_bytes(path.read_bytes()[:-1])
    options["earlier_attempts"] = str(tmp_path / "anew")
    with pytest.raises(SaveError, match="no checkpoint of an earlier attempt is whole"):
        loop.run(TASK, settings(shapes, tmp_path / "damaged", **options))


class Interrupting:
    """Walks through the data as Exact does; a signal comes with one of the batches."""

    def __init__(self, number: int, step: int, monkeypatch: pytest.MonkeyPatch) -> None:
        walk = Exact.training

        def training(data: Exact, start: int) -> Iterator[Batch]:
            for index, batch in enumerate(walk(data, start), start=start):
                if index == step:
                    os.kill(os.getpid(), number)
                yield batch

        monkeypatch.setattr(Exact, "training", training)


def test_an_epoch_that_was_trained_before_a_resume_shows_no_numbers(
    shapes, whole, tmp_path, capsys
):
    """A run that went down between an epoch's last step and its evaluation is resumed with that
    evaluation: the epoch's line has its numbers and no zeros, and so has the result when there was
    no step left; the weights are those of a run that never stopped."""
    with pytest.MonkeyPatch.context() as patch:
        Interrupting(signal.SIGTERM, 39, patch)
        assert loop.run(TASK, settings(shapes, tmp_path / "stopped")) == 143
    capsys.readouterr()
    config = settings(shapes, tmp_path / "went-on", resume=str(tmp_path / "stopped"))
    assert loop.run(TASK, config) == 0
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("epoch 4/4")]
    evaluations = r"validation loss \d\.\d{4}  validation accuracy \d+\.\d\d%"
    assert re.fullmatch(rf"epoch 4/4  trained before the resume  {evaluations}", line), line
    (result,) = [line for line in lines if line.startswith("validation accuracy")]
    assert re.fullmatch(r"validation accuracy \S+%  no step was left to train", result), result
    assert "0 images/s" not in "\n".join(lines)
    assert same_weights(whole, tmp_path / "went-on")


@pytest.mark.parametrize(
    ("signals", "code"), [((signal.SIGINT,), 130), ((signal.SIGTERM, signal.SIGTERM), 143)]
)
def test_a_signal_in_the_midst_of_a_save_waits_for_the_new_checkpoint(
    shapes, tmp_path, monkeypatch, signals, code
):
    """After one Ctrl-C or any TERM the save is finished; nothing else is left."""
    real = os.fsync

    def fsync(descriptor: int) -> None:
        real(descriptor)
        if threading.current_thread() is not threading.main_thread():  # the one that saves
            monkeypatch.setattr(os, "fsync", real)
            for number in signals:
                os.kill(os.getpid(), number)

    monkeypatch.setattr(os, "fsync", fsync)
    config = settings(shapes, tmp_path, epochs=1, save_steps=4)
    assert loop.run(TASK, config) == code
    path, _ = checkpoint.newest_valid(RunFolder(tmp_path).checkpoints)
    # Steps more, where training went on while the thread saved.
    assert checkpoint.read(path)["state"]["step"] >= 4
    assert not partials(RunFolder(tmp_path).checkpoints)


def test_a_checkpoint_is_of_its_step_though_training_goes_on(shapes, tmp_path, monkeypatch):
    """A save that lasts for three steps has the bits of one after which the run was stopped."""
    with pytest.MonkeyPatch.context() as patch:
        Interrupting(signal.SIGTERM, 3, patch)
        assert loop.run(TASK, settings(shapes, tmp_path / "stopped")) == 143
    save, advance, later = checkpoint.save, TrainingState.advance, threading.Event()

    def saved(folder: RunFolder, content: checkpoint.Content, keep: int, best: bool) -> Path:
        assert later.wait(60)
        return save(folder, content, keep, best)

    def advanced(state: TrainingState) -> None:
        advance(state)
        if state.step == 7:  # at 8 the next one is due, and waits
            later.set()

    monkeypatch.setattr(checkpoint, "save", saved)
    monkeypatch.setattr(TrainingState, "advance", advanced)
    config = settings(shapes, tmp_path / "on", save_steps=4, keep_checkpoints=100)
    assert loop.run(TASK, config) == 0
    files = [RunFolder(tmp_path / name).checkpoint(4) for name in ("stopped", "on")]
    stopped, on = (checkpoint.read(file)["state"] for file in files)
    assert pack(stopped) == pack(on)


def test_steps_bring_checkpoints_within_an_epoch(shapes, tmp_path):
    """--save-steps counts through all epochs; an epoch's end has its checkpoint as ever."""
    config = settings(
        shapes, tmp_path, epochs=2, save_steps=4, save_minutes=0, keep_checkpoints=100
    )
    assert loop.run(TASK, config) == 0
    steps = [int(path.stem[5:]) for path in checkpoint.steps_in(tmp_path / "checkpoints")]
    assert steps == [4, 8, 10, 12, 16, 20]


def test_a_trace_of_chosen_steps_is_written(shapes, tmp_path, capfd):
    """--profile-steps: torch.profiler's events of these steps, whose file the last lines name."""
    config = settings(shapes, tmp_path / "a", epochs=1, profile_steps="3,4")
    assert loop.run(TASK, config) == 0
    trace = RunFolder(tmp_path / "a").trace
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    steps = [event for event in events if event.get("name") == "Optimizer.step#AdamW.step"]
    assert len(steps) == 2
    assert f"trace: {trace}" in capfd.readouterr().out
    assert loop.run(TASK, settings(shapes, tmp_path / "b", epochs=1, profile_steps="99,99")) == 0
    assert "no trace: this run took no step 99" in capfd.readouterr().out


def test_weights_that_are_no_numbers_are_never_saved(shapes, tmp_path):
    """--resume goes on from before, also where saves come more often than lines of the log."""
    options = {"save_steps": 1, "keep_checkpoints": 99, "log_every_steps": 1000}
    growing = {"lr": 1e6, "weight_decay": 1e6, "warmup_epochs": 0.0}
    with pytest.raises(Problem, match="not finite at step [0-9]+: type a lower --lr"):
        loop.run(TASK, settings(shapes, tmp_path, **growing, **options))
    saved = checkpoint.steps_in(tmp_path / "checkpoints")
    assert saved
    for path in saved:
        weights = checkpoint.read(path)["state"]["model"].values()
        assert all(weight.isfinite().all() for weight in weights)


def test_speeds_and_rates_are_those_of_what_they_stand_beside(shapes, tmp_path, capsys):
    """An epoch's end has the speed of this epoch, the last line and the report that of the run;
    a rate that differs from the option is never a surprise."""
    options = {"epochs": 3, "log_every_steps": 1000, "lr": 0.01, "scale_lr": True}
    assert loop.run(TASK, settings(shapes, tmp_path, **options)) == 0
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    measured = [line["images_per_second"] for line in lines if line["kind"] == "train"]
    out = capsys.readouterr().out
    (whole,) = re.findall(r"([\d,]+) images/s  training took", out)
    said = re.findall(r"validation accuracy \S+  (\S+) images/s\n", out)
    assert len(said) == len(measured) == 3
    # The metrics have tenths, which may round a half the other way.
    expected = [mean_speed(read(tmp_path).train), *measured]
    for text, number in zip([whole, *said], expected, strict=True):
        assert abs(int(text.replace(",", "")) - number) <= 1
    assert "lr 0.01 for 20 images, 0.01 for 20 (--scale-lr)" in out


def test_the_report_shows_the_first_batch_as_the_model_saw_it(shapes, tmp_path):
    """Augmented and mixed: the very numbers that the first step computed with."""
    steps: list[tuple[torch.Tensor, torch.Tensor]] = []

    def blend(config: Any, images: torch.Tensor, labels: torch.Tensor, classes: int) -> Any:
        share = torch.rand(())
        mixed = torch.lerp(images.roll(1, 0).float(), images.float(), share)
        ones = torch.nn.functional.one_hot(labels, classes).float()
        steps.append((mixed, torch.lerp(ones.roll(1, 0), ones, share)))
        return steps[-1]

    task = replace(TASK, mix=blend)
    assert (
        loop.run(task, settings(shapes, tmp_path, epochs=1, exact_epochs=False, steps_per_epoch=2))
        == 0
    )
    shown, (computed, targets), _ = read(tmp_path).first_batch, *steps
    assert shown is not None and len(shown.images) == 16
    assert np.array_equal(shown.images, computed[:16].round().byte().permute(0, 2, 3, 1).numpy())
    assert shown.captions[0] == ", ".join(
        f"{('disc', 'box')[number]} {share:.0%}"
        for share, number in sorted(
            ((share, number) for number, share in enumerate(targets[0].tolist()) if share > 0.005),
            reverse=True,
        )
    )
    assert "Training images as the model sees them" in (tmp_path / "report.html").read_text()


def test_a_report_that_cannot_be_drawn_fails_no_run(shapes, tmp_path, capsys):
    """After hours of training final.pt is there; that the page is not is a line."""
    (tmp_path / "report.html").mkdir()
    assert loop.run(TASK, settings(shapes, tmp_path, epochs=1)) == 0
    errors = capsys.readouterr().out
    assert f"no report: {tmp_path}/report.html: cannot be written" in errors
    assert f"weights: {tmp_path}/final.pt\n" in errors and "\nreport: " not in errors
    assert "model" in checkpoint.read(tmp_path / "final.pt")


@pytest.mark.parametrize("options", [{"exact_epochs": False}, {}], ids=["drawn", "exact"])
def test_a_set_without_validation_trains_without_evaluation(make_shards, tmp_path, capsys, options):
    """train/ and nothing else is a data set, too; that nothing is judged is said in a line."""
    data = make_shards(train=(40,), val=())
    assert loop.run(TASK, settings(data, tmp_path, epochs=2, **options)) == 0
    errors = capsys.readouterr().out
    assert f"{data} has no split 'val': trains without evaluation; ./run-local convert" in errors
    assert "validation accuracy" not in errors and "2/2  loss" in errors
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert {line["kind"] for line in lines} == {"start", "train"}
    assert (tmp_path / "report.html").exists() and not (tmp_path / "predictions.npz").exists()
    resumed = settings(data, tmp_path / "more", epochs=3, resume=str(tmp_path), **options)
    assert loop.run(TASK, resumed) == 0


def test_without_the_best_checkpoint_the_last_weights_are_final(shapes, tmp_path, capsys):
    """A resumed run that finds the best one on no host says so."""
    assert loop.run(TASK, settings(shapes, tmp_path / "first", epochs=2)) == 0
    path = checkpoint.steps_in(tmp_path / "first" / "checkpoints")[-1]
    content = checkpoint.read(path)
    content["state"]["improvement"] |= {"accuracy": 1.5, "epoch": 1}
    checkpoint.write(path, content)
    RunFolder(tmp_path / "first").best.unlink(missing_ok=True)
    options = {"resume": str(path), "final": "best"}
    assert loop.run(TASK, settings(shapes, tmp_path / "second", epochs=3, **options)) == 0
    said = "no host has the best checkpoint (epoch 1): final.pt is the last"
    assert said in capsys.readouterr().out
    final = checkpoint.read(tmp_path / "second" / "final.pt")
    last = checkpoint.read(RunFolder(tmp_path / "second").checkpoint(30))["state"]
    assert final["accuracy"] == last["accuracy"]
    assert all(torch.equal(final["model"][name], each) for name, each in last["average"].items())
