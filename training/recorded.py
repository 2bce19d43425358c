"""Settings as earlier runs have recorded them: by the names of their time, and compared with now.

Old names are read for one release: command lines that use them keep working, and so do config.json,
checkpoints and final.pt of runs that an earlier version trained.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rackrun.terminal import clean

NEW_NAMES = {
    "autocast": "precision",
    "rate": "lr",
    "scale_rate": "scale_lr",
    "schedule": "lr_schedule",
    "clip": "clip_grad",
    "ema": "ema_decay",
    "accumulate": "grad_accum_steps",
    "gradients": "grad_compression",
    "average_steps": "local_sgd_steps",
    "size": "image_size",
    "first_size": "start_image_size",
    "shuffle": "shuffle_buffer",
    "first_samples": "max_train_samples",
    "mix": "extra_data",
    "repeats": "aug_repeats",
    "erase": "random_erasing",
    "evaluate_epochs": "eval_every_epochs",
    "save_epochs": "save_every_epochs",
    "log_steps": "log_every_steps",
    "waits_steps": "straggler_steps",
    "keep": "keep_checkpoints",
}
AUTOCAST = {"on": "bf16", "off": "tf32"}
"""The values of --autocast, as those of --precision."""
REMOVED_OPTIMIZERS = ("lars",)
OTHER_NAMES = {
    "learning_rate": "lr",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "num_workers": "workers",
    "wd": "weight_decay",
    "opt": "optimizer",
    "arch": "model",
    "splitshards": "exact_epochs",
}
"""Names that other programs have for options; they stay."""

THERE = "in the checkpoint"
SELECTION = ("only_classes", "class_weights", "max_train_samples", "extra_data")

OPTION = re.compile(r"--(no[-_])?([a-z][a-z_-]*)(=.*)?", re.DOTALL)


def with_new_options(args: Sequence[str]) -> list[str]:
    """Return a command line with old spellings of options replaced by today's."""
    return [
        _with_new_name(AUTOCAST.get(arg, arg) if before == "--autocast" else arg)
        for before, arg in zip(["", *args], args, strict=False)
    ]


def _with_new_name(arg: str) -> str:
    match = OPTION.fullmatch(arg)
    names = {**NEW_NAMES, **OTHER_NAMES}
    name = names.get(match[2].replace("-", "_")) if match else None
    if not match or not name:
        return arg
    value = match[3] or ""
    if match[2] == "autocast" and value:
        value = f"={AUTOCAST.get(value[1:], value[1:])}"
    return f"--{match[1] or ''}{name.replace('_', '-')}{value}"


def with_new_names(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return recorded settings by today's names.

    An optimizer that is gone is left out: the weights it trained are of use without it.
    """
    found = {NEW_NAMES.get(name, name): value for name, value in settings.items()}
    if "autocast" in settings:
        found["precision"] = AUTOCAST.get(settings["autocast"], settings["autocast"])
    if found.get("optimizer") in REMOVED_OPTIMIZERS:
        del found["optimizer"]
    return found


def settings_of(config: object) -> dict[str, Any]:
    """Return recorded settings by today's names; none where nothing like settings is recorded."""
    return with_new_names(config) if isinstance(config, Mapping) else {}


def differences(
    here: Mapping[str, Any], there: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    """Yield the settings among these that differ, as options."""
    for name in names:
        if name in here and name in there and here[name] != there[name]:
            yield f"{_option(name, here[name])} here, {_value(name, there[name])} {THERE}"


def short(value: object) -> str:
    """Return a recorded value as it may stand in a message."""
    return clean(str(value))[:200]


def _option(name: str, value: object) -> str:
    """Return a setting as it is typed."""
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return f"--{option}" if value else f"--no-{option}"
    return f"no --{option}" if value == "" else f"--{option} {short(value)}"


def _value(name: str, value: object) -> str:
    """Return what means another value of the same option."""
    return _option(name, value) if isinstance(value, bool) or value == "" else short(value)
