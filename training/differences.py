"""How the settings of two runs differ, in the words of options."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rackrun.terminal import clean
from training.old_names import with_new_names

THERE = "in the checkpoint"
SELECTION = ("only_classes", "class_weights", "max_train_samples", "extra_data")


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
