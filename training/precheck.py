"""Find mistakes in a task's settings on this machine, without torch.

The launcher does this before it contacts a host. The ranks check what this machine cannot, such as
data that only hosts have.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from rackrun.contract import variables
from rackrun.contract.files import LATEST, MANIFEST_NAME, PUBLISHED
from rackrun.contract.task_needs import TaskNeeds
from rackrun.contract.tasks import TASKS
from rackrun.errors import UsageError
from rackrun.machine import why_no_compiler
from rackrun.run_folder import RunFolder
from rackrun.runs import run_folder
from rackrun.shapes import LARGEST_NUMBER, Misshapen, parsed_file
from rackrun.shard_folder import folder_and_version, why_no_splits
from rackrun.user_code.imports import is_import_path
from rackrun.user_code.sources import refuse_absent
from rackrun.user_code.tasks import TaskSource
from shards.open import open_source
from training.conditions import refuse_evaluations
from training.config import Config, as_plain
from training.data.mixture import class_number, class_weights_in, weights_in
from training.models.registered import (
    TIMM,
    other_models,
    refuse_size,
    refuse_unpublished,
    registered,
)
from training.recorded import IN_CHECKPOINT, SELECTION, STEPS, differences, settings_of, short
from training.run.data_version import chosen
from training.run.folder import newest_run, run_name, runs_folder
from training.schedule import SCALED_BATCH, SCALED_LR
from training.weights_file import is_whole, why_no_weights

MOST_BYTES = 1 << 20  # of config.json
TRAIN = "train"
FIXED = ("seed", "optimizer")  # of a run, from its beginning to its end


def precheck(source: TaskSource, config: Config, typed: Collection[str] = ()) -> TaskNeeds:
    """Return what the settings need of the machines that run them; raise UsageError for the rest.

    That is a model, weights or parts of one's own that do not exist, classes or a split that the
    data do not have, and a run to resume that these settings cannot continue. `typed`: the settings
    that the command line names.
    """
    is_here = variables.RUN_FOLDER in os.environ  # the ranks will run on this machine
    if config.model != type(config).model:
        _check_model(source, config)
    _check_weights(config, is_here)
    step_images = _check_resumed(source, config, is_here)
    parts = (config.model, config.optimizer, config.lr_schedule)
    for option, name, example, *arguments in (
        ("--optimizer", config.optimizer, "Lion", "params", "lr"),
        ("--lr-schedule", config.lr_schedule, "triangle", "step", "steps"),
    ):
        if is_import_path(name):
            refuse_absent(option, name, example, *arguments)
    if is_here and config.compile and (why := why_no_compiler()):
        raise UsageError(why)
    splits = (TRAIN, *([config.eval_split] if "eval_split" in typed else ()))
    needed = () if config.synthetic else splits  # data may lack the split of a default
    _check_data(config, needed, typed)
    most_ranks, why_not_more = _most_ranks(config)
    return TaskNeeds(
        packages=("timm",) if config.model.startswith(TIMM) else (),
        trackers=tuple(config.trackers),
        modules=tuple(dict.fromkeys(_elsewhere(parts))),
        weights=_weights_file(config),
        splits=needed,
        batch_size=config.batch_size,
        global_batch=config.global_batch,
        resume=config.resume,
        step_images=step_images,
        most_ranks=most_ranks,
        why_not_more=why_not_more,
    )


def _check_data(config: Config, needed: Sequence[str], typed: Collection[str]) -> None:
    """Raise UsageError for classes and splits that the data on this machine do not have.

    Raise it, too, for typed options that need a split to evaluate.
    """
    further = weights_in("--extra-data", config.extra_data)
    named = [
        *filter(None, config.only_classes.split(",")),
        *class_weights_in("--class-weights", config.class_weights),
        *class_weights_in("--loss-weights", config.loss_weights),
    ]
    if not _is_here(config.data):
        return
    manifest = open_source(config.data).manifest
    for name in named:
        class_number(name, manifest.classes)
    splits = [split.name for split in manifest.splits if split.samples]
    if why := why_no_splits(config.data, needed, splits):
        raise UsageError(why)
    if config.eval_split not in splits:
        refuse_evaluations(config, typed)
    for location in filter(_is_here, further):
        if open_source(location).manifest.classes != manifest.classes:
            raise UsageError(
                f"--extra-data {location}: has other classes than {config.data}: only folders with"
                " the same classes can be mixed"
            )


def _most_ranks(config: Config) -> tuple[int, str]:
    """Return the ranks that these settings are for at most, 0 for any number, and why not more."""
    if config.global_batch:
        text = f"--global-batch {config.global_batch} has not a sample for each of them"
        return config.global_batch, text
    if not config.scale_lr or config.optimizer != "sgd" or config.synthetic:
        return 0, ""
    by_rate = int(SCALED_LR * 1.001 / config.lr) if config.lr else SCALED_BATCH
    return max(1, min(SCALED_BATCH // config.batch_size, by_rate)), (
        f"--scale-lr is known to hold up to lr {SCALED_LR:g} and {SCALED_BATCH:,} images per step;"
        " type a smaller --batch-size and --lr, or --no-scale-lr --lr"
        f" {SCALED_LR:g}, or what you have tried"
    )


def _check_model(source: TaskSource, config: Config) -> None:
    """Raise UsageError for a name that neither the task nor an installed library has.

    Raise it, too, for an image size that the model does not support.
    """
    name, task_models = config.model, _own_models(source)
    if name.startswith(TIMM):
        library_models = [f"{TIMM}{each}" for each in registered("timm")]
        if library_models and name.partition(".")[0] not in library_models:
            raise UsageError(
                f"--model {name}: no such model; {other_models(name, (), library_models)}"
            )
    elif task_models is None:
        return
    elif ":" in name:
        refuse_absent("--model", name, "Net", "num_classes")
    else:
        refuse_size(name, config.image_size)
        library_models = registered("torchvision")
        if library_models and name not in (*task_models, *library_models):
            raise UsageError(
                f"--model {name}: no such model; {other_models(name, task_models, library_models)}"
            )


def _check_weights(config: Config, is_here: bool) -> None:
    """Raise UsageError for published weights that the model does not have, or a file of none.

    A resumed run and --synthetic load none.
    """
    if not config.weights or config.resume or config.synthetic:
        return
    if is_here and (file := _weights_file(config)):
        try:
            why = why_no_weights(Path(file))
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise UsageError(f"--weights {config.weights}: {why}")
    if config.model.startswith(TIMM):
        return  # which weights are in the cache of each host, its ranks find out
    if config.weights == PUBLISHED and (torchvision_names := registered("torchvision")):
        refuse_unpublished(config.model, torchvision_names)


def _weights_file(config: Config) -> str:
    """Return the file that is loaded; empty for published weights, a URL or none.

    A resumed run and --synthetic load none.
    """
    is_loaded = not (config.resume or config.synthetic or config.weights == PUBLISHED)
    return config.weights if is_loaded and "://" not in config.weights else ""


def _elsewhere(parts: Iterable[str]) -> Iterator[str]:
    """Yield the top modules of import paths that are not in the current folder, which hosts get."""
    for part in parts:
        if is_import_path(part) and not part.startswith(TIMM):
            top = part.partition(":")[0].partition(".")[0]
            if not any(Path(name).exists() for name in (f"{top}.py", top)):
                yield top


def _check_resumed(source: TaskSource, config: Config, is_here: bool) -> int:
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
    settings, recorded_settings = settings_of(as_plain(config)), settings_of(recorded)
    problems = list(
        differences(
            settings,
            recorded_settings,
            (*SELECTION, *FIXED, *_of_the_model(source, settings, recorded_settings)),
        )
    )
    if not problems and _is_here(config.data) and not config.chooses:
        digest = str(recorded_settings.get("data_sha256"))
        location = chosen(config.data, digest, config.newer_data)
        if not location.moves and open_source(location.location).manifest.digest != digest:
            problems.append(
                f"--data {config.data} here, {short(recorded_settings.get('data'))} {IN_CHECKPOINT}"
            )
    resolved = _counts(recorded.get("resolved"))
    problems += _other_steps(settings, recorded_settings, resolved)
    if (settings["layer_decay"] == 1) != (recorded_settings.get("layer_decay", 1) == 1):
        problems += differences(settings, recorded_settings, ("layer_decay",))
    if config.global_batch and resolved["batch"] not in (0, config.global_batch):
        text = f"--global-batch {config.global_batch} here, {resolved['batch']} {IN_CHECKPOINT}"
        problems.append(f"{text}, which is taken where none is typed")
    if problems:
        raise UsageError(f"--resume {config.resume}: not a run to resume: {'; '.join(problems)}")
    return 0 if config.exact_epochs else resolved["batch"]


def _run_to_resume(source: TaskSource, config: Config, is_here: bool) -> Path | None:
    """Return the run or checkpoint of --resume; None where only the ranks know which it is."""
    if config.resume != LATEST:
        if not config.resume:
            return None
        return run_folder(config.resume, runs_folder(), must_be_here=False)
    if not is_here or source.name not in TASKS:
        return None
    run = newest_run(source.name)
    if run is None:
        named = f"no run {run_name(source.name)} of {source.name} in {runs_folder()}"
        raise UsageError(f"--resume latest: {named} has a checkpoint")
    return run


def _check_checkpoints(resume: str, path: Path) -> None:
    """Raise UsageError for a run on this machine without a checkpoint, or without a whole one."""
    files = [path] if path.is_file() else sorted(RunFolder(path).checkpoints.glob("step-*.pt"))
    if not files:
        raise UsageError(f"--resume {resume}: {RunFolder(path).checkpoints} has no checkpoint")
    with suppress(OSError):  # which the ranks report
        if not any(map(is_whole, files)):
            raise UsageError(
                f"--resume {resume}: {files[-1]}: cut short, or not a checkpoint; type a run"
                " folder, its final.pt, or a file of its checkpoints/"
            )


def _counts(resolved: object) -> dict[str, int]:
    """Return images per step and images of a recorded run; 0 for what is not known."""
    recorded_counts = resolved if isinstance(resolved, Mapping) else {}
    counts = {name: recorded_counts.get(name) for name in ("batch", "images")}
    return {
        name: n if isinstance(n, int) and 0 < n < LARGEST_NUMBER else 0
        for name, n in counts.items()
    }


def _other_steps(
    settings: Mapping[str, Any], recorded_settings: Mapping[str, Any], resolved: Mapping[str, int]
) -> Iterator[str]:
    """Yield the settings by which an epoch would have other steps than in the recorded run."""
    images, batch = resolved["images"], resolved["batch"]
    chosen = any(each.get(name) for each in (settings, recorded_settings) for name in SELECTION)
    if (
        images
        and batch
        and not chosen
        and _steps(settings, images, batch) != _steps(recorded_settings, images, batch)
    ):
        yield from differences(settings, recorded_settings, STEPS)


def _steps(settings: Mapping[str, Any], images: int, batch: int) -> int:
    """Return the steps of an epoch with these settings, as training.data does."""
    if settings.get("exact_epochs"):
        return -(-images // batch)
    given = settings.get("steps_per_epoch")
    return given if isinstance(given, int) and given else max(images // batch, 1)


def _of_the_model(
    source: TaskSource, settings: Mapping[str, Any], recorded_settings: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings without which a checkpoint does not fit the model, as far as is known."""
    if (
        ":" not in f"{settings.get('model')}{recorded_settings.get('model')}"
    ):  # else two names may mean the same
        yield "model"
    if settings.get("model") in (_own_models(source) or ()):
        yield from getattr(import_module(source.recipes), "OF_THE_MODEL", ())


def _own_models(source: TaskSource) -> tuple[str, ...] | None:
    """Return the names of a task's own models, or None where its recipes do not list them."""
    models: tuple[str, ...] | None = getattr(import_module(source.recipes), "OWN_MODELS", None)
    return models


def _is_here(location: str) -> bool:
    folder = Path(folder_and_version(location)[0])
    return location != "" and "://" not in location and (folder / MANIFEST_NAME).is_file()
