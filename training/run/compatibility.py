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
from training.config import Config, OutputSettings, RunSettings
from training.recorded import SELECTION, THERE, differences, settings_of, short
from training.run.checkpoint import Content, compare

FORMAT = 1
FREE = {
    *(field.name for field in fields(OutputSettings)),
    *(field.name for field in fields(RunSettings) if field.name not in ("recipe", "model")),
    *("data", "cache", "cache_size", "workers", "first_batch_seconds", "ledger", "global_batch"),
    *("collective_timeout_seconds", "numa_binding", "gpu_decode"),
}
"""Settings that change neither the model nor what it learns, or that the identity covers."""
STEPS = ("steps_per_epoch", "exact_epochs")
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
        "tensors": {
            name: f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            for name, tensor in model.state_dict().items()
        },
    }


def check(expected: Content, described: Content, content: Content, path: Path) -> None:
    """Raise SaveError with all reasons why the `described` run cannot resume from a checkpoint."""
    found = content.get("identity")
    if not isinstance(found, dict):
        raise SaveError(f"{path}: no checkpoint of a run (weights alone: type --weights {path})")
    if problems := list(_problems(expected, described, found, content)):
        raise SaveError(f"{path}: not a checkpoint of this run: {'; '.join(problems)}")


def changes(config: Mapping[str, Any], content: Content) -> str:
    """Return the settings that differ from those of a checkpoint, or ""."""
    here, there = settings_of(config), settings_of(content.get("config", {}))
    return "; ".join(differences(here, there, [name for name in here if name not in FREE]))


def order(lanes: int, content: Content) -> str:
    """Return a remark if samples are drawn in another order than the checkpoint's, or "".

    `lanes`: one for each loader worker; 0 if the order follows from the seed alone.
    """
    there = content.get("lanes")
    if not lanes or not there or lanes == there:
        return ""
    here = plural(lanes, "loader worker")
    return (
        f"other images are drawn than without the interruption: {here} here, {short(there)}"
        f" {THERE}; to draw the same, type --workers {short(there)}"
    )


def _problems(
    expected: Content, described: Content, found: Content, content: Content
) -> Iterator[str]:
    """Yield the reasons why a run cannot be continued, without consequences of other reasons."""
    differs = {name for name in expected if expected[name] != found.get(name)}
    here, there = settings_of(described["config"]), settings_of(content.get("config", {}))
    for name in ("format", "task"):
        if name in differs:
            yield f"{name} {short(expected[name])} here, {short(found.get(name))} {THERE}"
    if "data" in differs:
        yield from (chosen := list(differences(here, there, SELECTION)))
        if not chosen or described.get("dataset") != content.get("dataset"):
            yield f"data: {_data(described, expected)} here, {_data(content, found)} {THERE}"
    yield from differences(here, there, ["seed", "optimizer"])
    if "global batch" in differs:
        yield from differences(here, there, ["batch_size"])
        yield _batch(expected["global batch"], found.get("global batch"), here)
    elif "steps per epoch" in differs and "data" not in differs:
        yield from differences(here, there, STEPS)
        steps = f"{expected['steps per epoch']} steps per epoch here"
        yield f"{steps}, {short(found.get('steps per epoch'))} {THERE}"
    if "tensors" in differs and "task" not in differs:
        own = [name for name in here if name not in NOT_OF_MODELS]
        options = list(differences(here, there, own))
        if options or "data" not in differs:
            yield from options or compare(expected["tensors"], found.get("tensors") or {})


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


def _batch(here: int, there: object, config: Mapping[str, Any]) -> str:
    """Return the images per step, and what to type for as many as the checkpoint has."""
    text = f"{here} images per step here, {short(there)} {THERE}"
    ranks = max(here // config["batch_size"], 1)
    if isinstance(there, int) and there % ranks == 0 and not config.get("global_batch"):
        text += f" (with {plural(ranks, 'rank')}: --batch-size {there // ranks})"
    return text
