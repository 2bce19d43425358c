"""From a tar of tars to a class name: convert, serve, train on two ranks, go on, predict."""

import json
import os
import time
from pathlib import Path

from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from tests.lab import warm
from tests.lab.data import twenty_classes

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SMALL = (
    "--image-size", "32", "--batch-size", "16", "--optimizer", "adamw", "--lr-schedule", "cosine",
    "--warmup-epochs", "1", "--crop-area", "0.5",
    "--workers", "0", "--device", "cpu", "--no-tensorboard",
)  # fmt: skip


def command(*args: str) -> str:
    """Run one of our commands; return its output when it exits with 0."""
    done = warm.run("-m", f"rackrun.{args[0]}", *args[1:], cwd=ROOT, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def two_ranks(log: Path, *options: str) -> list[warm.Python]:
    """Train on two ranks of this machine."""
    with log.open("wb") as output:
        streams = {"stdout": output, "stderr": output}
        return warm.ranks(
            2, "-m", "rackrun.imagenet", *SMALL, *options, env=ENVIRONMENT, cwd=ROOT, **streams
        )


def stopped_after_an_epoch(run: Path, *options: str) -> None:
    """Train until the first epoch is evaluated, then ask the ranks to stop."""
    log = run.with_suffix(".log")
    training = two_ranks(log, "--run-folder", str(run), *options)
    metrics = run / "metrics.jsonl"
    while not (metrics.exists() and '"evaluate"' in metrics.read_text()):
        assert [rank.poll() for rank in training] == [None, None], log.read_text()
        time.sleep(0.1)
    for rank in training:
        rank.terminate()
    assert [rank.wait() for rank in training] == [143, 143], log.read_text()
    assert list((run / "checkpoints").iterdir()), log.read_text()
    assert not (run / "final.pt").exists()


MODEL = ("--model", "tests.lab.small_net:SmallNet")


def test_twenty_classes_from_archives_to_predictions(tmp_path):
    """Over 80 % on unseen images after an interrupted run, and the names that belong to them."""
    small = twenty_classes(train=30, val=10)
    raw = small.archives(tmp_path / "raw", "gnu")
    command("convert", "imagenet", str(raw), str(tmp_path / "shards"), "--subset", "--shards", "4")
    with serving(Site(tmp_path / "shards", port=0, native=True)) as server:
        first, second = tmp_path / "first", tmp_path / "second"
        options = (*MODEL, "--lr", "0.01", "--epochs", "4", "--data", server.url)
        stopped_after_an_epoch(first, *options)
        log = tmp_path / "second.log"
        training = two_ranks(log, *options, "--run-folder", str(second), "--resume", str(first))
        assert [rank.wait() for rank in training] == [0, 0], log.read_text()
    evaluations = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in evaluations if line["kind"] == "evaluate"][-1]
    assert last["samples"] == 200
    assert last["top1"] > 0.8, log.read_text()

    unseen = small.val[:20]
    for image in unseen:
        (tmp_path / f"{image.stem}.jpg").write_bytes(image.data)
    names = [str(tmp_path / f"{image.stem}.jpg") for image in unseen]
    predict = ("imagenet", "predict", str(second / "final.pt"), *names, "--json", *MODEL)
    predictions = json.loads(command(*predict))
    right = [
        prediction["class"] == f"{image.wnid} {small.words(image.wnid)}"
        for image, prediction in zip(unseen, predictions, strict=True)
    ]
    assert sum(right) >= 16
