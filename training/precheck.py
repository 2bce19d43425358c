"""Find mistakes in a task's settings on this machine, without torch.

The launcher does this before it contacts a host. The ranks check what this machine cannot, such as
data that only hosts have.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from rackrun.contract.files import LATEST, MANIFEST_NAME, PUBLISHED
from rackrun.errors import UsageError
from rackrun.run_report.called import run_called
from rackrun.shapes import Misshapen, parsed_file
from rackrun.user_code.imports import is_import_path
from rackrun.user_code.sources import refuse_absent
from rackrun.user_code.tasks import TaskSource
from shards.open import open_source
from training.config import Config, as_plain
from training.data.mixture import class_number, class_weights_in, weights_in
from training.models.registered import (
    TIMM,
    other_models,
    refuse_size,
    refuse_unpublished,
    registered,
)
from training.recorded import SELECTION, THERE, differences, settings_of, short

MOST_BYTES = 1 << 20  # of config.json
FIXED = ("seed", "optimizer")  # of a run, from its beginning to its end


def precheck(source: TaskSource, config: Config) -> None:
    """Raise UsageError for a model, weights or parts of one's own that do not exist, for classes
    that the data do not have, and for a run to resume that these settings cannot continue.
    """
    if config.model != type(config).model:
        _check_model(source, config)
    _check_weights(config)
    _check_resumed(source, config)
    for option, name, example in (
        ("--optimizer", config.optimizer, "Lion"),
        ("--lr-schedule", config.lr_schedule, "triangle"),
    ):
        if is_import_path(name):
            refuse_absent(option, name, example)
    further = weights_in("--extra-data", config.extra_data)
    named = [
        *filter(None, config.only_classes.split(",")),
        *class_weights_in("--class-weights", config.class_weights),
        *class_weights_in("--loss-weights", config.loss_weights),
    ]
    if not (further or named) or not _is_here(config.data):
        return
    classes = open_source(config.data).manifest.classes
    for name in named:
        class_number(name, classes)
    for location in filter(_is_here, further):
        if open_source(location).manifest.classes != classes:
            raise UsageError(
                f"--extra-data {location}: has other classes than {config.data}: only folders with"
                " the same classes can be mixed"
            )


def _check_model(source: TaskSource, config: Config) -> None:
    """Raise UsageError for a name that neither the task nor an installed library has.

    Raise it, too, for an image size that the model does not support.
    """
    name, own = config.model, _own_models(source)
    if name.startswith(TIMM):
        known = [f"{TIMM}{each}" for each in registered("timm")]
        if known and name.partition(".")[0] not in known:
            raise UsageError(f"--model {name}: no such model; {other_models(name, (), known)}")
    elif own is None:
        return
    elif ":" in name:
        refuse_absent("--model", name, "Net")
    else:
        refuse_size(name, config.image_size)
        known = registered("torchvision")
        if known and name not in (*own, *known):
            raise UsageError(f"--model {name}: no such model; {other_models(name, own, known)}")


def _check_weights(config: Config) -> None:
    """Raise UsageError for published weights that the model does not have.

    A resumed run and --synthetic load none.
    """
    loaded = config.weights == PUBLISHED and not (config.resume or config.synthetic)
    if config.model.startswith(TIMM):
        return  # which weights are in the cache of each host, its ranks find out
    if loaded and (known := registered("torchvision")):
        refuse_unpublished(config.model, known)


def _check_resumed(source: TaskSource, config: Config) -> None:
    """Raise UsageError if config.json of a run on this machine shows that it cannot be continued.

    The ranks check the contents of checkpoints, `latest`, and runs on hosts.
    """
    if not config.resume or config.resume == LATEST:
        return
    path = run_called(config.resume)
    folder = path.parent.parent if path.suffix == ".pt" else path
    try:
        recorded = parsed_file(folder / "config.json", dict[str, Any], MOST_BYTES)
    except (OSError, Misshapen):
        return
    here, there = settings_of(as_plain(config)), settings_of(recorded)
    found = list(
        differences(here, there, (*SELECTION, *FIXED, *_of_the_model(source, here, there)))
    )
    if not found and _is_here(config.data) and not config.chooses:
        manifest = open_source(config.data).manifest
        if there.get("data_sha256") not in (None, manifest.digest):
            found.append(f"--data {config.data} here, {short(there.get('data'))} {THERE}")
    if found:
        raise UsageError(f"--resume {config.resume}: not a run to resume: {'; '.join(found)}")


def _of_the_model(
    source: TaskSource, here: Mapping[str, Any], there: Mapping[str, Any]
) -> Iterator[str]:
    """Yield the settings without which a checkpoint does not fit the model, as far as is known."""
    if ":" not in f"{here.get('model')}{there.get('model')}":  # else two names may mean the same
        yield "model"
    if here.get("model") in (_own_models(source) or ()):
        yield from getattr(import_module(source.recipes), "OF_THE_MODEL", ())


def _own_models(source: TaskSource) -> tuple[str, ...] | None:
    """Return the names of a task's own models, or None where its recipes do not list them."""
    found: tuple[str, ...] | None = getattr(import_module(source.recipes), "OWN_MODELS", None)
    return found


def _is_here(location: str) -> bool:
    return location != "" and "://" not in location and (Path(location) / MANIFEST_NAME).is_file()
