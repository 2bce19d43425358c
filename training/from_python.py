"""What programs call: train in this process, and read a checkpoint."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.data_location import are_plain_tars, joined, parts_of
from rackrun.errors import SaveError
from rackrun.run_folder import RUNS, RunFolder, new_run_folder
from rackrun.runs import final_weights
from rackrun.shapes import Misshapen, between, shaped
from rackrun.shards.open import open_source
from rackrun.terminal import one_line
from rackrun.training import checkpoint, entry
from rackrun.training.conditions import refuse_ineffective
from rackrun.training.models.weights import are_weights
from rackrun.training.precheck import needs_of
from rackrun.training.tasks.definition import require_task, task_of
from rackrun.training.trained import ClassNames


def train(task: str, **settings: object) -> RunFolder:
    """Train a task in this process: `train("catdog", data="data/shards", epochs=2)`.

    The settings are the task's options with underscores; lists are joined by commas, and False
    turns an option off. Returns the run folder, a new one under runs/ unless `run_folder` names
    one. In a function that `launch` calls on every rank, they all train together. Ctrl-C saves a
    checkpoint and raises KeyboardInterrupt; a Problem says what is wrong.
    """
    source = require_task(task)
    words = [word for name, value in settings.items() for word in _words(name, value)]
    config, typed = entry.settings_of(source, f"{called('local')} {task}", words)
    needs_of(source, config, typed, is_here=True)
    refuse_ineffective(config, typed)
    if not config.synthetic and not are_plain_tars(config.data):
        for location in parts_of(config.data):  # refused before there is a folder
            _ = open_source(location).manifest
    given = config.run_folder or os.environ.get(variables.RUN_FOLDER)
    folder = RunFolder(Path(given)) if given else new_run_folder(RUNS, task_of(source).name)
    code = entry.run(source, replace(config, run_folder=str(folder.path)))
    if code == 130:
        raise KeyboardInterrupt
    if code:
        raise SystemExit(code)  # SIGTERM has asked this process to end
    return RunFolder(folder.path.resolve())


def _words(name: str, value: object) -> Iterator[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        yield f"--{option}" if value else f"--no-{option}"
    elif isinstance(value, (list, tuple)):
        values = map(str, value)
        yield f"--{option}={joined(values) if name == 'data' else ','.join(values)}"
    else:
        yield f"--{option}={value}"


@dataclass(frozen=True)
class _Told:
    task: str
    classes: ClassNames
    config: dict[str, Any]
    """The settings that it was trained with, as in config.json."""
    step: Annotated[int, between(0, 2**53)] | None
    """The steps that were done; None in final.pt."""


@dataclass(frozen=True)
class Checkpoint(_Told):
    """What a checkpoint or final.pt holds, on the CPU."""

    weights: Mapping[str, torch.Tensor]
    """As they were trained; in final.pt those that were evaluated."""
    average: Mapping[str, torch.Tensor] | None
    """The average of weights of --ema-decay; None without it, and in final.pt."""


def load_checkpoint(run_or_file: str | os.PathLike[str]) -> Checkpoint:
    """Return the content of a checkpoint, or of final.pt of a run; SaveError if it is not whole.

    The checksums are verified, and no code in the file is run.
    """
    path = final_weights(run_or_file)
    content = checkpoint.read(path)
    state = content.get("state", content)  # final.pt has weights alone
    try:
        weights, average = state["model"], state.get("average")
        if not are_weights(weights) or not (average is None or are_weights(average)):
            raise Misshapen("it holds no named weights")
        described = {name: content.get(name) for name in ("task", "classes", "config")}
        told = shaped({**described, "step": state.get("step")}, _Told, "checkpoint")
    except (Misshapen, KeyError, TypeError, AttributeError) as error:
        raise SaveError(f"{path}: not a checkpoint of rackrun: {one_line(str(error))}") from None
    return Checkpoint(**vars(told), weights=weights, average=average)
