"""Where training cannot go on: a loss, outputs or weights that are no finite numbers."""

import math

import torch

from rackrun.errors import Problem
from rackrun.training.counts import Counts
from rackrun.training.data.ring import Batch
from rackrun.training.device import Compute, Normalize
from rackrun.training.differences import short
from rackrun.training.scores import MOST_NAMED, answers
from rackrun.training.state import TrainingState
from rackrun.units import first_few, plural

SMALLEST_SCALE = 2.0**-16
"""Of the loss in float16. At less, gradients that overflow are of no use: 32 steps in a row were
skipped since the start."""


class Diverged(Problem):
    """The loss, the outputs or the weights are no finite numbers."""

    exit_code = 76


def check_finite(step: int, counts: Counts, loss_scale: float) -> None:
    """Raise Diverged unless training can go on; without float16 the scale of the loss is 0."""
    if counts.samples and not math.isfinite(counts.loss):
        symptom = f"the loss is {counts.loss}"
    elif 0 < loss_scale < SMALLEST_SCALE:
        symptom = "gradients overflow float16 at any scale of the loss"
    else:
        return
    raise diverged(symptom, step, ", or --precision fp32" if loss_scale else "")


def diverged(symptom: str, step: int, other: str = "") -> Diverged:
    """Return the error for a symptom of a rate that is too high."""
    return Diverged(f"{symptom} at step {step}: type a lower --lr or --clip-grad 1{other}")


def not_finite(
    compute: Compute, state: TrainingState, batch: Batch, normalize: Normalize
) -> Diverged:
    """Return the error for a loss that is not finite, with the images that make it so.

    The weights have not changed by this step yet. Images are tried one by one, as a batch norm
    spreads what is not finite in one of them to all.
    """
    model = state.model.eval()
    with torch.no_grad():
        for buffer in model.buffers():  # a batch norm has taken up what is not finite already
            if buffer.is_floating_point():
                buffer.nan_to_num_(0.0, 0.0, 0.0)
        bad = [
            f"{shard}: {key}"
            for (shard, key), image in zip(batch.keys, torch.split(batch.images, 1), strict=False)
            if not answers(compute.logits(model, normalize, image)).are_finite.all()
        ]
    step, images = state.step + 1, len(batch.labels)
    if not bad or len(bad) == images > 1:  # it is the weights
        return diverged(f"the loss of {plural(images, 'image')} is not finite", step)
    return Diverged(
        f"the model's output is not finite for {first_few([*map(short, bad)], MOST_NAMED)} (step"
        f" {step}): fix the model, or remove these images; a model that standardizes each image"
        " divides by 0 for an image of a single color"
    )
