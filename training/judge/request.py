"""What an evaluation is asked for."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from rackrun.commandline.options import Examples, Positional


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a trained model on every sample of a split."""

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest data/shards", "on the validation split"),
        ("{prog} runs/latest data/shards --split test --csv images.csv", "a row for each image"),
    )

    checkpoint: Positional[Path]
    """The weights: a run folder, its final.pt, or a checkpoint."""
    data: Positional[str]
    """Folder or URL of shards with the classes of the model."""
    split: Literal["val", "test", "train"] = "val"
    """Split of the data to evaluate on."""
    model: str = ""
    """The model that the weights were trained with, if it is your own: `my_models:Net`."""
    task: str = ""
    """The task that the weights were trained for, if it is your own: `./my_task.py`."""
    flip: bool = False
    """Evaluate the mean of the outputs for an image and for its mirror image."""
    csv: str = ""
    """Write the prediction for every sample to this file, with shard and key of the sample."""
    json: bool = False
    """Print JSON instead of tables."""
    batch_size: int = 64
    """Images at a time on each rank."""
    workers: int = -1
    """Processes per rank that read and decode; -1: depends on the number of cores; 0: none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to evaluate on; auto: a GPU if there is one."""
    bad_samples: Literal["fail", "quarantine"] = "fail"
    """Fail on an image that cannot be decoded, or leave it out and count it."""
    bad_samples_limit: int = 100
    """Images per rank that quarantine leaves out before the evaluation fails."""
