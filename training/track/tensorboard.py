"""TensorBoard: curves while a run trains; settings and judged images when it is done."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from rackrun.run_folder import RunFolder
from rackrun.run_report.folder import read_predictions
from training.track.scalars import Line, scalars, summary


class TensorBoard:
    """Writes the event files of a run."""

    def __init__(self, folder: Path, settings: dict[str, Any], earlier: list[Line]) -> None:
        """Begin with the lines of an earlier run, in place of what there is of them already."""
        self._run = folder.parent
        self._settings = settings
        self._evaluations: list[Line] = []
        self._events = SummaryWriter(str(folder), purge_step=0 if earlier else None)
        for line in earlier:
            self.log(line)

    def log(self, line: Line) -> None:
        """Add a point to each curve."""
        for name, value in scalars(line).items():
            self._events.add_scalar(name, value, line["step"], walltime=line.get("time"))
        if line["kind"] == "evaluate":
            self._evaluations.append(line)

    def end(self, verdict: str) -> None:
        """Add settings and images, and bring everything to the files."""
        result = {f"hparam/{name}": value for name, value in summary(self._evaluations, {}).items()}
        assert self._events.file_writer
        for part in hparams(self._settings, result):
            self._events.file_writer.add_summary(part)
        for name, value in result.items():
            self._events.add_scalar(name, value)
        if verdict == "finished" and (
            predictions := read_predictions(RunFolder(self._run).predictions)
        ):
            self._events.add_images("predictions", predictions.images, dataformats="NHWC")
        self._events.close()
