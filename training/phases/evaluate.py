"""The evaluation at the end of an epoch, by all ranks together; predictions for the report."""

from collections.abc import Sequence
from typing import Any

import torch

from rackrun.contract import phases
from rackrun.training.counts import (
    Confusion,
    Counter,
    Counts,
    HighestLosses,
    NoAnswers,
    answered,
    evaluation_sums,
)
from rackrun.training.phases.start import TrainingRun
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.state import TrainingState

GRID_IMAGES = 24  # in each grid of predictions in the report


@torch.no_grad()
def evaluate(run: TrainingRun, state: TrainingState, log: RunRecorder) -> Counts:
    """Return the counts of all ranks over the validation set; incomplete if a rank is to stop."""
    log.progress.phase(phases.EVALUATE)
    transforms = run.task.transforms(run.config, state.epoch)
    model = state.evaluated
    model.eval()
    counter = Counter(run.ranks.device)
    confusion = Confusion(len(run.data.classes), run.ranks.device)
    losses, no_answers = HighestLosses(), NoAnswers()
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            flip = run.config.eval_flip
            logits = run.compute.logits(model, transforms.normalised, batch.images, flip)
            counter.add([evaluation_sums(logits, batch.labels)], len(batch.labels), batch.skipped)
            confusion.add(logits, batch.labels)
            losses.add(logits, batch.labels, batch.rows)
            no_answers.add(logits, batch.keys)
        log.progress.evaluated(number)
        if run.requests.ending:  # a stop does not wait for the rest of the validation set
            break
    state.train()
    log.remark(no_answers.of_all(run.ranks))
    log.results.evaluated(
        run.ranks.all_reduce_sum(confusion.counts),
        confusion.classes,
        losses.rows_of_all(run.ranks, GRID_IMAGES),
    )
    return run.sum_over_ranks(counter.sums)


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
