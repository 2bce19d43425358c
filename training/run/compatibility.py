"""Compare a recorded run with the one that resumes from it: what must be equal, and what differs.

Settings that may change are reported, others refused; both as options. The launcher looks at the
config.json of a run on its machine before it contacts a host (`check_settings`, without torch),
ranks at the checkpoint (`check`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.contract.files import LATEST
from rackrun.contract.tasks import TASKS
from rackrun.errors import SaveError, UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import run_folder
from rackrun.shapes import LARGEST_NUMBER, Misshapen, parsed_file
from rackrun.shards.open import open_source
from rackrun.training.config import Config
from rackrun.training.differences import short, table_differences
from rackrun.training.run.data_version import chosen, is_local_folder
from rackrun.training.run.folder import newest_run, runs_folder
from rackrun.training.settings.data import SELECTION
from rackrun.training.settings.run import OutputSettings, RunSettings
from rackrun.training.weights_file import why_no_weights
from rackrun.units import plural
from rackrun.user_code.tasks import TaskSource

if TYPE_CHECKING:
    from torch import nn

    from rackrun.training.checkpoint import Content

FORMAT = 1
IN_CHECKPOINT = "in the checkpoint"
MOST_BYTES = 1 << 20  # of config.json
STEPS = ("steps_per_epoch", "exact_epochs")
"""Settings that decide how many steps an epoch has."""
FIXED = ("seed", "optimizer")  # of a run, from its beginning to its end
OF_THE_MODEL = ("recipe", "model", "model_args")
FREE = {
    *(field.name for field in fields(OutputSettings)),
    *(field.name for field in fields(RunSettings) if field.name not in OF_THE_MODEL),
    *("data", "cache", "cache_size", "prefetch", "workers"),
    *("global_batch", "numa_binding"),
}
"""Settings that change neither the model nor what it learns, or that the identity covers."""
NOT_OF_MODELS = {field.name for field in fields(Config)} - {"model", "model_args"}


def identity(
    described: Content, model: nn.Module, data: str, batch: int, epoch_steps: int
) -> Content:
    """Return the values that must be equal in a checkpoint and in the run that resumes from it."""
    return {
        "format": FORMAT,
        "task": described["task"],
        "data": data,
        "seed": described["config"]["seed"],
        "global batch": batch,
        "steps per epoch": epoch_steps,
        "tensors": {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in model.state_dict().items()
        },
    }


def check(expected: Content, described: Content, content: Content, path: Path) -> None:
    """Raise SaveError with all reasons why the `described` run cannot resume from a checkpoint."""
    recorded = content.get("identity")
    if not isinstance(recorded, dict):
        raise SaveError(f"{path}: no checkpoint of a run (weights alone: type --weights {path})")
    if problems := list(_problems(expected, described, recorded, content)):
        raise SaveError(f"{path}: not a checkpoint of this run: {'; '.join(problems)}")


def changes(config: Mapping[str, Any], content: Content) -> str:
    """Return the settings that differ from those of a checkpoint, or ""."""
    names = [name for name in config if name not in FREE]
    recorded = _table(content.get("config"))
    changed = list(differences(config, recorded, names))
    if config["global_batch"] and any(differences(config, recorded, ["batch_size"])):
        changed.append(f"the run keeps its {config['global_batch']} images per step")
    return "; ".join(changed)


def _problems(
    expected: Content, described: Content, identity: Content, content: Content
) -> Iterator[str]:
    # What follows from another reason is left out: other classes make another last layer.
    settings, recorded = described["config"], _table(content.get("config"))
    differs = {name for name in expected if expected[name] != identity.get(name)}
    for name in ("format", "task"):
        if name in differs:
            yield f"{name} {short(expected[name])} here, {_there(identity.get(name))}"
    if "data" in differs:
        yield from (selected := list(differences(settings, recorded, SELECTION)))
        if not selected or described.get("dataset") != content.get("dataset"):
            yield f"data: {_data(described, expected)} here, {_there(_data(content, identity))}"
    yield from differences(settings, recorded, FIXED)
    if "global batch" in differs:
        yield from differences(settings, recorded, ["batch_size"])
        yield _batch(expected["global batch"], identity.get("global batch"), settings)
    elif "steps per epoch" in differs and "data" not in differs:
        yield from differences(settings, recorded, STEPS)
        steps = f"{expected['steps per epoch']} steps per epoch here"
        yield f"{steps}, {_there(identity.get('steps per epoch'))}"
    if "tensors" in differs and "task" not in differs:
        of_model = [name for name in settings if name not in NOT_OF_MODELS]
        options = list(differences(settings, recorded, of_model))
        if options or "data" not in differs:
            tensors = _table(identity.get("tensors"))
            yield from options or table_differences(expected["tensors"], tensors)


def _there(value: object) -> str:
    return f"{short(value)} {IN_CHECKPOINT}"


def _table(recorded: object) -> Mapping[str, Any]:
    # None where nothing like settings is recorded: a file may hold anything.
    return recorded if isinstance(recorded, Mapping) else {}


def _data(described: Content, identity: Content) -> str:
    config = _table(described.get("config"))
    parts = (
        described.get("dataset", ""),
        plural(len(described.get("classes", ())), "class", "classes"),
        config.get("data", "") or ("synthetic images" if config.get("synthetic") else ""),
        f"SHA-256 {str(identity.get('data'))[:8]}…",
    )
    return ", ".join(short(part) for part in parts if part)


def _batch(batch: int, recorded_batch: Any, config: Mapping[str, Any]) -> str:
    text = f"{batch} images per step here, {_there(recorded_batch)}"
    ranks = max(batch // config["batch_size"], 1)
    is_free = isinstance(recorded_batch, int) and not config.get("global_batch")
    if is_free and recorded_batch % ranks == 0:
        text += f" (with {plural(ranks, 'rank')}: --batch-size {recorded_batch // ranks})"
    return text


def check_settings(source: TaskSource, config: Config, is_here: bool) -> int:
    """Raise UsageError if a run on this machine shows that it cannot be continued so.

    Return the images per step that it must go on with; 0 if any, or not known. The ranks check the
    contents of checkpoints, and runs on hosts.
    """
    path = _run_to_resume(source, config, is_here)
    if path is None:
        return 0
    if is_here:
        _check_checkpoints(config.resume, path)
    folder = path.parent.parent if path.suffix == ".pt" else path
    try:
        recorded = parsed_file(RunFolder(folder).config, dict[str, Any], MOST_BYTES)
    except (OSError, Misshapen):
        return 0
    settings = asdict(config)
    batch = _table(recorded.get("resolved")).get("batch")
    batch = batch if isinstance(batch, int) and 0 < batch < LARGEST_NUMBER else 0
    names = [*SELECTION, *FIXED, *_of_the_model(source, settings, recorded), "steps_per_epoch"]
    if 1 in (settings["layer_decay"], recorded.get("layer_decay", 1)):  # 1: no groups of layers
        names.append("layer_decay")
    problems = list(differences(settings, recorded, names))
    if not problems and is_local_folder(config.data) and not config.chooses:
        digest = str(recorded.get("data_sha256"))
        if open_source(chosen(config.data, digest)[0]).manifest.digest != digest:
            problems.append(f"--data {config.data} here, {_there(recorded.get('data'))}")
    if config.global_batch and batch not in (0, config.global_batch):
        text = f"--global-batch {config.global_batch} here, {_there(batch)}"
        problems.append(f"{text}, which is taken where none is typed")
    if problems:
        raise UsageError(f"--resume {config.resume}: not a run to resume: {'; '.join(problems)}")
    return 0 if config.exact_epochs else batch


def _run_to_resume(source: TaskSource, config: Config, is_here: bool) -> Path | None:
    if config.resume == LATEST:  # elsewhere, only the ranks know which it is
        return newest_run(source.name) if is_here and source.name in TASKS else None
    return run_folder(config.resume, runs_folder()) if config.resume else None


def _check_checkpoints(resume: str, path: Path) -> None:
    files = [path] if path.is_file() else sorted(RunFolder(path).checkpoints.glob("step-*.pt"))
    if not files:
        raise UsageError(f"--resume {resume}: {RunFolder(path).checkpoints} has no checkpoint")
    with suppress(OSError):  # which the ranks report
        if all(map(why_no_weights, files)):
            raise UsageError(
                f"--resume {resume}: {files[-1]}: cut short, or not a checkpoint; type a run"
                " folder, its final.pt, or a file of its checkpoints/"
            )


def _of_the_model(
    source: TaskSource, settings: Mapping[str, Any], recorded: Mapping[str, Any]
) -> Iterator[str]:
    models = f"{settings.get('model')}{recorded.get('model')}"
    if ":" not in models:  # else two names may mean the same
        yield "model"
    if settings.get("model") in (own_models(source) or ()):
        yield from getattr(import_module(source.recipes), "OF_THE_MODEL", ())


def own_models(source: TaskSource) -> tuple[str, ...] | None:
    """Return the names of a task's own models, or None where its recipes do not list them."""
    models: tuple[str, ...] | None = getattr(import_module(source.recipes), "OWN_MODELS", None)
    return models


def differences(
    settings: Mapping[str, Any], recorded: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    """Yield the settings among these that differ, as options."""
    for name in names:
        if name in settings and name in recorded and settings[name] != recorded[name]:
            there = recorded[name]
            shown = _option(name, there) if isinstance(there, bool) or there == "" else short(there)
            yield f"{_option(name, settings[name])} here, {shown} {IN_CHECKPOINT}"


def _option(name: str, value: object) -> str:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"no --{option}" if value == "" else f"--{option} {short(value)}"
