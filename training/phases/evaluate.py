"""The evaluation at the end of an epoch, by all ranks together; predictions for the report."""

from collections.abc import Sequence
from typing import Any

import torch

from rackrun.contract import phases
from rackrun.training.evaluation import Scores, Table, answered
from rackrun.training.phases.start import TrainingRun
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.state import TrainingState

GRID_IMAGES = 24  # in each grid of predictions in the report


@torch.no_grad()
def evaluate(run: TrainingRun, state: TrainingState, log: RunRecorder) -> Scores:
    """Return the scores of the validation set; incomplete if a rank is to stop."""
    log.progress.phase(phases.EVALUATE)
    transforms = run.task.transforms(run.config, state.epoch)
    model, table = state.evaluated.eval(), Table(len(run.data.classes))
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            flip = run.config.eval_flip
            logits = run.compute.logits(model, transforms.normalised, batch.images, flip)
            table.add(logits, batch)
        else:
            table.skip(batch)
        log.progress.evaluated(number)
        if run.requests.ending:  # a stop does not wait for the rest of the validation set
            break
    state.train()
    scores = table.scores(run.ranks)
    log.remark(scores.remark)
    log.results.evaluated(scores.confusion, scores.hardest(GRID_IMAGES))
    return scores


@torch.no_grad()
def predictions(
    run: TrainingRun, state: TrainingState, rows: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Return validation images and the model's predictions: those of these rows, or some.

    "images": uint8 (N, size, size, channels); with them, arrays and lists of N.
    """
    batch = run.data.grid(GRID_IMAGES, rows)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    logits = run.compute.logits(state.evaluated.eval(), transforms.normalised, images)
    probability, predicted = logits.softmax(1).max(1)
    probability = probability.where(answered(logits), 0)
    return {
        "images": batch.images.permute(0, 2, 3, 1).numpy(),
        "labels": batch.labels.numpy(),
        "predicted": predicted.cpu().numpy(),
        "keys": [key for _, key in batch.keys],
        "probability": probability.cpu().numpy(),
        "classes": list(run.data.classes),
    }
