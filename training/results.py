"""What a run writes at its end: final.pt, grids of images, the report."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.errors import Problem
from rackrun.terminal import one_line
from rackrun.training import checkpoint
from rackrun.training.scores import answers
from rackrun.training.training_run import TrainingRun

GRID_IMAGES = 24  # in each grid of predictions in the report
FIRST_IMAGES, LONGEST_SIDE = 16, 224  # of the first batch, in the report: at most 2.4 MB
LONGEST_NAME = 100

Grid = dict[str, Any]
"""Images, uint8 (N, size, size, channels), with arrays and lists of N."""


def write_results(run: TrainingRun) -> str:
    """Write final.pt, the grids of predictions and the report.

    Returns the path of the report, or "" where none can be drawn.
    """
    folder, state, scores = run.log.folder, run.state, run.scores
    model = state.evaluated.state_dict()
    checkpoint.write(folder.final, {"model": model, "accuracy": state.accuracy, **run.described})
    from rackrun.run_report.page import write  # nothing else here needs what that imports

    try:
        if grid := predictions(run):
            if scores and scores.confusion is not None:
                grid["confusion"] = scores.confusion
            write_grid(folder.predictions, grid)
        rows = scores.hardest(GRID_IMAGES) if scores else []
        if hardest := predictions(run, rows) if rows else None:
            write_grid(folder.hardest, hardest)
        return str(write(folder.path))
    except (Problem, OSError) as error:  # as of a server that is gone: the run is done
        run.log.say(f"no report: {one_line(str(error))[:300]}")
        return ""


@torch.no_grad()
def predictions(run: TrainingRun, rows: Sequence[int] = ()) -> Grid | None:
    """Return validation images and the model's predictions: those of these rows, or some."""
    batch = run.data.grid(GRID_IMAGES, rows)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    logits = run.compute.logits(run.state.evaluated.eval(), transforms.normalized, images)
    best = answers(logits)
    return {
        "images": batch.images.permute(0, 2, 3, 1).numpy(),
        "labels": batch.labels.numpy(),
        "predicted": best.classes[:, 0].cpu().numpy(),
        "keys": [key for _, key in batch.keys],
        "probability": best.shares[:, 0].where(best.are_finite, 0).cpu().numpy(),
        "classes": list(run.data.classes),
    }


def training_pictures(mixed: torch.Tensor, targets: torch.Tensor, classes: Sequence[str]) -> Grid:
    """Return images as the model sees them, augmented and mixed, with "captions".

    A caption is the class of an image, or the classes and their shares.
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


def write_grid(path: Path, grid: Grid) -> None:
    """Write a grid for the report."""
    with atomic_write(path) as file, translated_os_errors(path):
        np.savez_compressed(file, **grid)
