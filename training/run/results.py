"""The results of a run: final.pt, images with predictions, and the report that shows them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line
from training import checkpoint
from training.checkpoint import Content
from training.state import TrainingState


class Results:
    """What the newest evaluation leaves for the report, and what a run writes at its end."""

    def __init__(self, folder: RunFolder, described: Content) -> None:
        """Take what goes into every file of weights: task, classes, settings."""
        self._folder = folder
        self._described = described
        self._confusion: NDArray[np.int64] | None = None
        self.hardest_rows: list[int] = []
        """Rows of the validation images with the highest loss."""

    def evaluated(self, confusion: torch.Tensor, classes: int, hardest_rows: list[int]) -> None:
        """Keep the counts of images by label and prediction, if there are some, and these rows."""
        self.hardest_rows = hardest_rows
        if classes:
            self._confusion = confusion.long().reshape(classes, classes).cpu().numpy()

    def write_first_batch(self, grid: Content) -> None:
        """Write training images of the first step."""
        _write_grid(self._folder.first_batch, grid)

    def write(
        self,
        state: TrainingState,
        grid: Content | None,
        hardest: Content | None,
        say: Callable[[str], None],
    ) -> str:
        """Write final.pt, the grids of predictions and the report; return the report's path."""
        final = {
            "model": state.evaluated.state_dict(),
            "accuracy": state.accuracy,
            **self._described,
        }
        checkpoint.write(self._folder.final, final)
        if grid and self._confusion is not None:
            grid = {**grid, "confusion": self._confusion}
        for path, content in ((self._folder.predictions, grid), (self._folder.hardest, hardest)):
            if content:
                _write_grid(path, content)
        return _draw(self._folder, say)


def _write_grid(path: Path, grid: Content) -> None:
    """Write images and what belongs to them, which the report reads."""
    with atomic_write(path) as file, translated_os_errors(path):
        np.savez_compressed(file, **grid)


def _draw(folder: RunFolder, say: Callable[[str], None]) -> str:
    """Draw the report and return its path; nothing if that fails, as the run has ended."""
    from rackrun.run_report.page import write  # nothing else here needs what that imports

    try:
        return str(write(folder.path))
    except Exception as error:  # whatever it is, the run is done
        say(f"no report: {one_line(str(error))[:300]}")
        return ""
