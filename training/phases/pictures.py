"""Images for the report: of the first batch as the model sees it, and of the validation set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import interpolate

from training.data.samples import Batch
from training.device import seed_step
from training.phases.start import TrainingRun
from training.phases.step import parts_of
from training.state import TrainingState

FIRST_IMAGES, LONGEST_SIDE = 16, 224  # of the first batch: at most 2.4 MB
LONGEST_NAME = 100
GRID_IMAGES = 24
"""Validation images in each grid of the report."""

Pictures = dict[str, Any]
"""Arrays of uint8 images (N, size, size, channels), and what belongs to each."""


def training_pictures(run: TrainingRun, step: int, batch: Batch) -> Pictures:
    """Return images of a step's first part as the model sees them, augmented and mixed."""
    # The step itself still needs the batch, which a task may mix in place.
    images, labels = (tensor.clone() for tensor in next(parts_of(run, step, batch)))
    seed_step(run.config, run.ranks, step)  # as the step does: so the same images are mixed
    mixed, targets = run.task.mix(run.config, images, labels, len(run.data.classes))
    shown = mixed[:FIRST_IMAGES].float()
    if max(shown.shape[2:]) > LONGEST_SIDE:
        shown = interpolate(shown, (LONGEST_SIDE, LONGEST_SIDE), mode="area")
    return {
        "images": shown.round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy(),
        "captions": [_caption(target, run.data.classes) for target in targets[:FIRST_IMAGES]],
    }


def _caption(target: torch.Tensor, classes: Sequence[str]) -> str:
    """Return the class of a training image, or the classes of a mixed one with their shares."""
    if target.ndim == 0:
        return classes[int(target)][:LONGEST_NAME]
    shares, numbers = target.topk(min(2, len(target)))
    pairs = [
        (share, classes[n]) for share, n in zip(shares.tolist(), numbers.tolist(), strict=True)
    ]
    return ", ".join(f"{name[:LONGEST_NAME]} {share:.0%}" for share, name in pairs if share > 0.005)


@torch.no_grad()
def predictions(
    run: TrainingRun, state: TrainingState, rows: Sequence[int] = ()
) -> Pictures | None:
    """Return validation images and the model's predictions: those of these rows, or some."""
    batch = run.data.grid(GRID_IMAGES, rows)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    logits = run.compute.logits(state.evaluated.eval(), transforms.normalised, images)
    probability, predicted = logits.softmax(1).max(1)
    return {
        "images": batch.images.permute(0, 2, 3, 1).numpy(),  # uint8 (N, size, size, channels)
        "labels": batch.labels.numpy(),
        "predicted": predicted.cpu().numpy(),
        "keys": [key for _, key in batch.keys],
        "probability": probability.cpu().numpy(),
        "classes": list(run.data.classes),
    }
