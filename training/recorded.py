"""What a run or a file has recorded, compared with what is here: settings, and tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rackrun.terminal import clean

IN_CHECKPOINT = "in the checkpoint"
SELECTION = ("only_classes", "class_weights", "max_train_samples", "extra_data")
STEPS = ("steps_per_epoch", "exact_epochs")
"""Settings that decide how many steps an epoch has."""


def settings_of(config: object) -> Mapping[str, Any]:
    """Return recorded settings; none where nothing like settings is recorded."""
    return config if isinstance(config, Mapping) else {}


def differences(
    settings: Mapping[str, Any], recorded_settings: Mapping[str, Any], names: Sequence[str]
) -> Iterator[str]:
    """Yield the settings among these that differ, as options."""
    for name in names:
        if (
            name in settings
            and name in recorded_settings
            and settings[name] != recorded_settings[name]
        ):
            recorded = _value(name, recorded_settings[name])
            yield f"{_option(name, settings[name])} here, {recorded} {IN_CHECKPOINT}"


def table_differences(
    expected: Mapping[str, object], actual: Mapping[str, object], most: int = 6
) -> list[str]:
    """Return the differences of two tables, in a few words each."""
    lines = [
        f"{short(name)} is {short(actual.get(name, 'missing'))} there and"
        f" {short(expected.get(name, 'missing'))} here"
        for name in {**expected, **actual}
        if expected.get(name) != actual.get(name)
    ]
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


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
