"""Find mistakes in a task's settings on this machine, without torch.

The launcher does this before it contacts a host. The ranks check what this machine cannot, such as
data that only hosts have.
"""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.contract.files import PUBLISHED
from rackrun.contract.task_needs import TaskNeeds
from rackrun.data_location import PIPE, WEB, are_plain_tars, expanded, parts_of
from rackrun.errors import UsageError
from rackrun.machine import why_no_compiler
from rackrun.shard_folder import why_no_splits
from rackrun.shards.open import open_source
from rackrun.terminal import one_line
from rackrun.training.conditions import refuse_evaluations
from rackrun.training.config import Config
from rackrun.training.data.choice import BALANCED, class_number, class_weights_in
from rackrun.training.models.registered import TIMM, refuse_unknown, refuse_unpublished, registered
from rackrun.training.run.compatibility import check_settings, own_models
from rackrun.training.run.data_version import is_local_folder
from rackrun.training.schedule import most_ranks
from rackrun.training.tasks.definition import task_of
from rackrun.training.weights_file import why_no_weights
from rackrun.user_code.imports import imported, is_import_path
from rackrun.user_code.sources import refuse_absent
from rackrun.user_code.tasks import TaskSource

TRAIN = "train"
SOME_CLASSES = 10


def needs_of(
    source: TaskSource, config: Config, typed: Collection[str] = (), is_here: bool = False
) -> TaskNeeds:
    """Return what the settings need of the machines that run them; raise UsageError for the rest.

    That is a model, weights or parts of the user's that do not exist, classes or a split that the
    data do not have, and a run to resume that these settings cannot continue. Parts of the user's
    are tried out where what they need is here. `typed`: the settings that the command line names;
    `is_here`: the ranks run on this machine, as those of a launch do whose folder is here.
    """
    config.require_data(source.name)
    is_here = is_here or variables.RUN_FOLDER in os.environ
    if config.model != type(config).model:
        refuse_unknown(config.model, config.image_size, own_models(source))
    weights_file = _weights_file(config, is_here)
    step_images = check_settings(source, config, is_here)
    for part in _parts(config):
        refuse_absent(*part)
    if is_here and config.compile and (why := why_no_compiler()):
        raise UsageError(why)
    splits = (TRAIN, *([config.eval_split] if "eval_split" in typed else ()))
    is_plain = are_plain_tars(config.data)
    # Data may lack the split of a default.
    needed = () if config.synthetic or is_plain else splits
    if is_plain:
        _check_plain(config, typed, is_here)
    else:
        _check_data(config, needed, typed)
    most, why_not_more = most_ranks(config)
    needs_timm = config.model.startswith(TIMM) or config.optimizer == "lamb"
    modules = tuple(dict.fromkeys(_elsewhere((config.model, config.optimizer, config.lr_schedule))))
    if why_alone := _tried(source, config, can_build=not modules):
        most, why_not_more = 1, why_alone
    return TaskNeeds(
        packages=(*(["timm"] if needs_timm else []), "click", "msgspec"),  # as no torch has
        trackers=tuple(config.trackers),
        modules=modules,
        weights=weights_file,
        cache=config.cache,
        splits=needed,
        batch_size=config.batch_size,
        resume=config.resume,
        step_images=step_images,
        most_ranks=most,
        why_not_more=why_not_more,
        own_options=tuple(sorted(_names(type(config)) - _names(Config))),
        keeps_ranks=not (config.exact_epochs or config.global_batch),
    )


def _parts(config: Config) -> list[tuple[str, str, str, str, str]]:
    # The user's own: option, import path, an example of a name, and the arguments of its call.
    parts = (
        ("--optimizer", config.optimizer, "Lion", "params", "lr"),
        ("--lr-schedule", config.lr_schedule, "triangle", "step", "steps"),
    )
    return [part for part in parts if is_import_path(part[1])]


def _tried(source: TaskSource, config: Config, can_build: bool) -> str:
    # Imports the user's parts, and runs a step of their model on zeros, where all that it needs is
    # here, too. Returns why not more than one rank can train it, or "".
    for option, name, *form in _parts(config):
        if find_spec(name.partition(":")[0].partition(".")[0]):
            imported(option, name, *form)
    is_own_model = ":" in config.model and not config.model.startswith(TIMM)
    has_torch = find_spec("torch") is not None and find_spec("torchvision") is not None
    if not (can_build and has_torch and (is_own_model or source.file)):
        return ""
    from rackrun.training.dry_step import dry_step

    try:
        task = task_of(source)
    except (ImportError, UsageError):  # of what only hosts have; or no Task: its ranks say so
        return ""
    return dry_step(task, config, _class_count(config))


def _names(settings: type[Config]) -> set[str]:
    return {field.name.replace("_", "-") for field in fields(settings)}


def _class_count(config: Config) -> int:
    """Return the number of classes of the data, or of some where only hosts can read them."""
    if config.num_classes:
        return config.num_classes
    first = parts_of(config.data)[0] if config.data else ""
    is_here = is_local_folder(first)
    return len(open_source(first).manifest.classes) if is_here else SOME_CLASSES


def _check_plain(config: Config, typed: Collection[str], is_here: bool) -> None:
    # Where tars lie on hosts, or this machine lacks what expands their names, ranks say it.
    if config.loss_weights == BALANCED:
        raise UsageError(
            "--loss-weights balanced: tars without an index do not say how many images a class has;"
            f" type {called('convert')} index, or CLASS=WEIGHT"
        )
    if not config.eval_data:
        refuse_evaluations(config, typed)
    if not is_here or find_spec("braceexpand") is None:
        return
    for option, location in (("--data", config.data), ("--eval-data", config.eval_data)):
        for tar in expanded(location):
            if not tar.startswith((PIPE, *WEB)) and not Path(tar).is_file():
                advice = "; name tars with braces, as in s-{000..127}.tar" if "*" in tar else ""
                where = f"{option} {one_line(location)[:80]}"
                raise UsageError(f"{where}: no file {one_line(tar)}{advice}")
    if config.classes and not Path(config.classes).is_file():
        raise UsageError(f"--classes {config.classes}: no such file")


def _check_data(config: Config, needed: Sequence[str], typed: Collection[str]) -> None:
    # Data that only the hosts have cannot be read here: then only the form of options is checked.
    named = {
        "--only-classes": list(filter(None, config.only_classes.split(","))),
        "--class-weights": list(class_weights_in("--class-weights", config.class_weights)),
        "--loss-weights": list(class_weights_in("--loss-weights", config.loss_weights)),
    }
    locations = parts_of(config.data)
    if not (locations and all(map(is_local_folder, locations))):
        return
    manifests = [open_source(location).manifest for location in locations]
    for option, names in named.items():
        for name in names:
            class_number(option, name, manifests[0].classes)
    splits = [split.name for each in manifests for split in each.splits if split.samples]
    if why := why_no_splits(config.data, needed, splits):
        raise UsageError(why)
    if config.eval_split not in splits:
        refuse_evaluations(config, typed)


def _weights_file(config: Config, is_here: bool) -> str:
    if not config.weights or config.resume or config.synthetic:  # which load none
        return ""
    if config.weights == PUBLISHED:
        # Ranks find out themselves which of timm's weights their host has in its cache.
        if not config.model.startswith(TIMM) and (names := registered("torchvision")):
            refuse_unpublished(config.model, names)
        return ""
    if "://" in config.weights:
        return ""
    if is_here:
        try:
            why = why_no_weights(Path(config.weights))
        except OSError as error:
            why = str(error.strerror)
        if why:
            raise UsageError(f"--weights {config.weights}: {why}")
    return config.weights


def _elsewhere(parts: Iterable[str]) -> Iterator[str]:
    # The top modules of import paths that are not in the current folder, which hosts get.
    for part in parts:
        if is_import_path(part) and not part.startswith(TIMM):
            top = part.partition(":")[0].partition(".")[0]
            if not any(Path(name).exists() for name in (f"{top}.py", top)):
                yield top
