"""Weights from a file, in any published layout, into a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
from torch import nn

from rackrun.errors import SaveError
from rackrun.terminal import one_line
from rackrun.units import plural
from training import checkpoint
from training.layers import grown_tensors, heads_of
from training.models.layouts import Tensors, adapted
from training.recorded import table_differences

PREFIXES = ("module.", "_orig_mod.")
WRAPPERS = (  # keys below which files hold weights, averages first
    *("state", "average", "model_ema", "state_dict_ema", "ema_state_dict"),
    *("model", "state_dict"),
)


def load_weights(model: nn.Module, path: Path, classes: Sequence[str]) -> str:
    """Load the weights in a file; return a line about what was loaded, adapted and left as it is.

    The last layer may be missing or have other than these classes, and then starts afresh. If the
    file's classes are the first ones of these, it keeps them and gets the others. SaveError for
    anything else that does not fit.
    """
    model_tensors = model.state_dict()
    saved, saved_classes = _content_of(path)
    state, notes = adapted(saved, model_tensors)
    heads = heads_of(model, len(classes))[-1:]
    head = tuple(f"{name}." for name in heads)
    if 0 < len(saved_classes) < len(classes) and saved_classes == [*classes[: len(saved_classes)]]:
        state = grown_tensors(state, model_tensors, heads)
        more = plural(len(classes) - len(saved_classes), "class", "classes")
        notes = [*notes, f"the last layer keeps its {len(saved_classes):,} and gets {more} more"]
    fresh = [
        name
        for name in model_tensors
        if name.startswith(head)
        and (name not in state or state[name].shape != model_tensors[name].shape)
    ]
    model_shapes, loaded_shapes = (
        {name: tuple(tensor.shape) for name, tensor in table.items() if name not in fresh}
        for table in (model_tensors, state)
    )
    differences = table_differences(model_shapes, loaded_shapes)
    if differences:
        raise SaveError(
            f"--weights {path}: not of this model: {'; '.join(differences)}; type --model with the"
            " model that was saved there"
        )
    line = f"weights from {path}" + "".join(f"; {note}" for note in notes)
    if fresh:
        why = _classes(state, model_tensors, fresh[0])
        line += f"; the last layer ({', '.join(fresh)}) {why} starts afresh"
    try:
        model.load_state_dict({**state, **{name: model_tensors[name] for name in fresh}})
    except RuntimeError:  # of the right shapes, but of a kind that cannot be copied
        raise SaveError(f"--weights {path}: tensors of another kind than this model's") from None
    return line


def _classes(state: Tensors, model_tensors: Tensors, name: str) -> str:
    if name not in state:
        return "is not there and"
    return f"has {len(model_tensors[name])} classes instead of {len(state[name])} and"


def _content_of(path: Path) -> tuple[Tensors, list[str]]:
    """Return the weights in a file, and its class names if it has any.

    It may be a checkpoint, torch.save's or safetensors', wrapped or not.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SaveError(f"--weights {path}: cannot be read: {error.strerror}") from None
    content = _safetensors(data, path) if data[8:9] == b"{" else checkpoint.parse(data, path)
    classes = content.get("classes") if isinstance(content, dict) else None
    for _ in WRAPPERS:  # a table may hold itself
        if are_weights(content) or not isinstance(content, dict):
            break
        content = next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), 0)
    if not are_weights(content):
        raise SaveError(f"--weights {path}: holds no named weights")
    weights = {_plain_name(name): tensor for name, tensor in content.items()}
    return weights, classes if isinstance(classes, list) else []


def _safetensors(data: bytes, path: Path) -> Any:
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        reason = one_line(str(error))[:200]
        raise SaveError(f"--weights {path}: not whole, as safetensors: {reason}") from None
    except KeyError as error:  # a type of numbers that this library knows, and not for torch
        kind = one_line(str(error))[:40]
        raise SaveError(f"--weights {path}: numbers of type {kind}, which torch has not") from None


def are_weights(state: object) -> TypeGuard[Tensors]:
    """Return True for a non-empty table of tensors by name."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in state.items()
        )
    )


def _plain_name(name: str) -> str:
    """Return a weight's name without what DDP and torch.compile put before it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name
