"""The event files of TensorBoard: curves, settings, and validation images with predictions."""

from collections.abc import Sequence
from dataclasses import asdict

from rackrun.run_folder import RunFolder
from rackrun.training.config import Config
from rackrun.training.track.tracker import Line, scalars


class TensorBoard:
    """Writes the event files of a run."""

    def __init__(self, folder: RunFolder, config: Config, earlier: Sequence[Line]) -> None:
        """Begin with the lines of an earlier run, in place of what there is of them already."""
        from torch.utils.tensorboard import SummaryWriter  # a second of imports

        self._folder, self._config = folder, config
        self._events = SummaryWriter(str(folder.tensorboard), purge_step=0 if earlier else None)
        for line in earlier:
            self.log(line)

    def log(self, line: Line) -> None:
        """Add a point to each curve."""
        for name, value in scalars(line).items():
            self._events.add_scalar(name, value, line["step"], walltime=line.get("time"))

    def end(self, verdict: str, result: dict[str, float]) -> None:
        """Add settings and images, and bring everything to the files."""
        from torch.utils.tensorboard.summary import hparams

        from rackrun.run_report.grids import read_predictions

        of_result = {f"hparam/{name}": value for name, value in result.items()}
        assert self._events.file_writer
        for part in hparams(asdict(self._config), of_result):
            self._events.file_writer.add_summary(part)
        for name, value in of_result.items():
            self._events.add_scalar(name, value)
        if verdict == "finished" and (predictions := read_predictions(self._folder.predictions)):
            self._events.add_images("predictions", predictions.images, dataformats="NHWC")
        self._events.close()
