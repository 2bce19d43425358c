"""python -m rackrun.training evaluate: evaluate a trained model on a split of a data set.

torch is imported once there is something to evaluate, so that `--help` answers at once.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from rackrun.atomic import write_whole
from rackrun.commandline.options import Examples, Positional, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.runs import final_weights
from rackrun.tables import require_folder, require_replaceable
from rackrun.training.data.worker_server import start_worker_server
from rackrun.training.settings.model import ModelOptions, with_weights_first


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
    """Folder or URL of shards; their classes must be some or all of the model's, by name."""
    split: Literal["val", "test", "train"] = "val"
    """Split of the data to evaluate on."""
    model: ModelOptions = field(default_factory=ModelOptions)
    flip: bool = False
    """Evaluate the mean of the outputs for each image and its mirror image."""
    csv: Annotated[str, Values("FILE")] = ""
    """Write the prediction for every sample to this file, with shard and key of the sample."""
    json: bool = False
    """Print JSON instead of tables."""
    batch_size: int = 64
    """Images at a time on each rank."""
    workers: int = -1
    """Processes per rank that read and decode; -1: by the number of cores; 0: none."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to evaluate on; auto: a GPU if there is one."""
    bad_samples: Literal["fail", "quarantine"] = "fail"
    """fail: end at a damaged image; quarantine: leave such images out and count them."""
    bad_samples_limit: int = 100
    """With `quarantine`: images that each rank may leave out; one more is an error."""


def main(args: Sequence[str]) -> int:
    """Evaluate as a rank of torchrun, or alone; rank 0 writes for all."""
    hint = (
        f"leave it out: {called('evaluate')} RUN SHARDS; images become shards by"
        f" {called('convert')} folder IMAGES SHARDS"
    )
    given = parse(Evaluate, called("evaluate"), with_weights_first(args), hints={"--data": hint})
    require_folder(given.csv)
    given.model.check()
    final_weights(given.checkpoint)  # what is not there is refused before torch is imported
    if given.workers:
        start_worker_server("rackrun.training.data.validation")
    from rackrun.training.judge.evaluation import COLUMNS, evaluate, settings
    from rackrun.training.trained import load

    require_replaceable(given.csv, COLUMNS)
    trained = load(given.checkpoint, given.model)
    config = settings(
        trained,
        data=given.data,
        eval_split=given.split,
        batch_size=given.batch_size,
        workers=given.workers,
        device=given.device,
        bad_samples=given.bad_samples,
        bad_samples_limit=given.bad_samples_limit,
    )
    result = evaluate(trained, config, given.flip, with_rows=bool(given.csv))
    if result.first:
        if given.csv:
            write_whole(Path(given.csv), result.table)
        if given.json:
            sys.stdout.write(json.dumps(result.plain(), indent=1, allow_nan=False) + "\n")
        else:
            from rackrun.training.judge.output import print_evaluation

            print_evaluation(result)
    return 0
