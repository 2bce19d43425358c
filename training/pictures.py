"""Images for the report: of the first batch, and of validation with predictions."""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import interpolate

from rackrun.training.evaluation import answered
from rackrun.training.setup import TrainingRun

GRID_IMAGES = 24  # in each grid of predictions in the report
FIRST_IMAGES, LONGEST_SIDE = 16, 224  # of the first batch, in the report: at most 2.4 MB
LONGEST_NAME = 100


def training_pictures(
    mixed: torch.Tensor, targets: torch.Tensor, classes: Sequence[str]
) -> dict[str, Any]:
    """Return images as the model sees them, augmented and mixed.

    "images": uint8 (N, size, size, channels); "captions": the class of each, or classes and shares.
    """
    shown = mixed[:FIRST_IMAGES].float()
    if max(shown.shape[2:]) > LONGEST_SIDE:
        shown = interpolate(shown, (LONGEST_SIDE, LONGEST_SIDE), mode="area")
    names = [name[:LONGEST_NAME] for name in classes]
    captions = []
    for target in targets[:FIRST_IMAGES]:
        if target.ndim == 0:
            captions.append(names[int(target)])
            continue
        shares, numbers = (top.tolist() for top in target.topk(min(2, len(target))))
        pairs = [pair for pair in zip(shares, numbers, strict=True) if pair[0] > 0.005]
        captions.append(", ".join(f"{names[number]} {share:.0%}" for share, number in pairs))
    pixels = shown.round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    return {"images": pixels, "captions": captions}


@torch.no_grad()
def predictions(run: TrainingRun, rows: Sequence[int] = ()) -> dict[str, Any] | None:
    """Return validation images and the model's predictions: those of these rows, or some.

    "images": uint8 (N, size, size, channels); with them, arrays and lists of N.
    """
    batch = run.data.grid(GRID_IMAGES, rows)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    logits = run.compute.logits(run.state.evaluated.eval(), transforms.normalised, images)
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
