"""Compare a checkpoint with the run that resumes from it: what must be equal, and what differs.

Settings that may change are reported, others refused; both as options.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from rackrun.errors import SaveError
from rackrun.units import plural
from training.checkpoint import Content
from training.config import Config
from training.recorded import (
    IN_CHECKPOINT,
    SELECTION,
    STEPS,
    differences,
    settings_of,
    short,
    table_differences,
)
from training.run.data_version import described_tensors
from training.settings.run import OutputSettings, RunSettings

FORMAT = 1
FREE = {
    *(field.name for field in fields(OutputSettings)),
    *(field.name for field in fields(RunSettings) if field.name not in ("recipe", "model")),
    *("data", "cache", "cache_size", "cache_peers", "prefetch", "workers", "first_batch_seconds"),
    *("ledger", "global_batch", "collective_timeout_seconds", "numa_binding", "gpu_decode"),
}
"""Settings that change neither the model nor what it learns, or that the identity covers."""
NOT_OF_MODELS = {field.name for field in fields(Config)} - {"model"}


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
        "tensors": described_tensors(model.state_dict()),
    }


def check(expected: Content, described: Content, content: Content, path: Path) -> None:
    """Raise SaveError with all reasons why the `described` run cannot resume from a checkpoint."""
    recorded_identity = content.get("identity")
    if not isinstance(recorded_identity, dict):
        raise SaveError(f"{path}: no checkpoint of a run (weights alone: type --weights {path})")
    if problems := list(_problems(expected, described, recorded_identity, content)):
        raise SaveError(f"{path}: not a checkpoint of this run: {'; '.join(problems)}")


def changes(config: Mapping[str, Any], content: Content) -> str:
    """Return the settings that differ from those of a checkpoint, or ""."""
    settings, recorded = settings_of(config), settings_of(content.get("config", {}))
    return "; ".join(
        differences(settings, recorded, [name for name in settings if name not in FREE])
    )


def order(lanes: int, content: Content) -> str:
    """Return a remark if samples are drawn in another order than the checkpoint's, or "".

    `lanes`: one for each loader worker; 0 if the order follows from the seed alone.
    """
    recorded_lanes = content.get("lanes")
    if not lanes or not recorded_lanes or lanes == recorded_lanes:
        return ""
    workers, recorded = plural(lanes, "loader worker"), short(recorded_lanes)
    return (
        f"other images are drawn than without the interruption: {workers} here,"
        f" {recorded} {IN_CHECKPOINT}; to draw the same, type --workers {recorded}"
    )


def _problems(
    expected: Content, described: Content, recorded_identity: Content, content: Content
) -> Iterator[str]:
    """Yield the reasons why a run cannot be continued, without consequences of other reasons."""
    differs = {name for name in expected if expected[name] != recorded_identity.get(name)}
    settings, recorded = settings_of(described["config"]), settings_of(content.get("config", {}))
    for name in ("format", "task"):
        if name in differs:
            recorded_value = short(recorded_identity.get(name))
            yield f"{name} {short(expected[name])} here, {recorded_value} {IN_CHECKPOINT}"
    if "data" in differs:
        yield from (chosen := list(differences(settings, recorded, SELECTION)))
        if not chosen or described.get("dataset") != content.get("dataset"):
            recorded_data = _data(content, recorded_identity)
            yield f"data: {_data(described, expected)} here, {recorded_data} {IN_CHECKPOINT}"
    yield from differences(settings, recorded, ["seed", "optimizer"])
    if "global batch" in differs:
        yield from differences(settings, recorded, ["batch_size"])
        yield _batch(expected["global batch"], recorded_identity.get("global batch"), settings)
    elif "steps per epoch" in differs and "data" not in differs:
        yield from differences(settings, recorded, STEPS)
        steps = f"{expected['steps per epoch']} steps per epoch here"
        yield f"{steps}, {short(recorded_identity.get('steps per epoch'))} {IN_CHECKPOINT}"
    if "tensors" in differs and "task" not in differs:
        of_model = [name for name in settings if name not in NOT_OF_MODELS]
        options = list(differences(settings, recorded, of_model))
        if options or "data" not in differs:
            yield from options or table_differences(
                expected["tensors"], recorded_identity.get("tensors") or {}
            )


def _data(described: Content, identity: Content) -> str:
    """Return a data set by name, size, place and digest, as far as they are known."""
    config = described.get("config", {})
    parts = (
        described.get("dataset", ""),
        plural(len(described.get("classes", ())), "class", "classes"),
        config.get("data", "") or ("synthetic images" if config.get("synthetic") else ""),
        f"SHA-256 {str(identity.get('data'))[:8]}…",
    )
    return ", ".join(short(part) for part in parts if part)


def _batch(batch: int, recorded_batch: object, config: Mapping[str, Any]) -> str:
    """Return the images per step, and what to type for as many as the checkpoint has."""
    text = f"{batch} images per step here, {short(recorded_batch)} {IN_CHECKPOINT}"
    ranks = max(batch // config["batch_size"], 1)
    if (
        isinstance(recorded_batch, int)
        and recorded_batch % ranks == 0
        and not config.get("global_batch")
    ):
        text += f" (with {plural(ranks, 'rank')}: --batch-size {recorded_batch // ranks})"
    return text
