"""The results of a finished run: weights, predictions on validation images, and the report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rackrun.atomic import atomic_write, translated_os_errors
from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line
from training import checkpoint

Content = dict[str, Any]


def write_results(
    folder: RunFolder,
    final: Content,
    grid: Content | None,
    hardest: Content | None,
    say: Callable[[str], None],
) -> str:
    """Write final.pt, the grids of predictions and the report; return the path of the report."""
    checkpoint.write(folder.final, final)
    for path, content in ((folder.predictions, grid), (folder.hardest, hardest)):
        if content:
            write_grid(path, content)
    return _draw(folder, say)


def write_grid(path: Path, grid: Content) -> None:
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
