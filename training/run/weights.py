"""Models by name, and weights from a file into a model."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeGuard

import torch
from torch import nn

from rackrun.errors import SaveError, UsageError
from training.config import nearest
from training.run import checkpoint

PREFIXES = ("module.", "_orig_mod.")


def torchvision_model(name: str, classes: int, size: int, own: Sequence[str] = ()) -> nn.Module:
    """A classification model of torchvision by its name in the registry, without weights."""
    import torchvision  # it takes as long as torch to import, and a task may have its own models

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise UsageError(f"--model {name}: no such model; {nearest(name, [*own, *known])}")
    builder = torchvision.models.get_model_builder(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        options["image_size"] = size
    model = builder(weights=None, **options)
    assert isinstance(model, nn.Module)
    return model


def load_weights(model: nn.Module, path: Path) -> str:
    """Take up the weights in a file; says what was done.

    The last layer may have another number of classes and then starts afresh. Anything else that
    does not fit is a SaveError.
    """
    state = state_in(path)
    own = model.state_dict()
    head = head_of(model)
    fresh = [name for name in head if name in state and state[name].shape != own[name].shape]
    needed, found = (
        {name: tuple(tensor.shape) for name, tensor in table.items() if name not in fresh}
        for table in (own, state)
    )
    differences = checkpoint.compare(needed, found)
    if differences:
        raise SaveError(f"--weights {path}: not of this model: {'; '.join(differences)}")
    try:
        model.load_state_dict({**state, **{name: own[name] for name in fresh}})
    except RuntimeError:  # of the right shapes, but of a kind that cannot be copied
        raise SaveError(f"--weights {path}: tensors of another kind than this model's") from None
    if not fresh:
        return f"weights from {path}"
    return (
        f"weights from {path}; the last layer ({', '.join(fresh)}) has"
        f" {len(own[fresh[0]])} classes instead of {len(state[fresh[0]])} and starts afresh"
    )


def state_in(path: Path) -> dict[str, torch.Tensor]:
    """The weights in a final.pt, a checkpoint, or a file with nothing but weights."""
    try:
        content = checkpoint.parse(path.read_bytes(), path)
    except OSError as error:
        raise SaveError(f"--weights {path}: cannot be read: {error.strerror}") from None
    state = content.get("state", content)
    if isinstance(state, dict):
        state = state.get("average") or state.get("model", state)
    if not are_weights(state):
        raise SaveError(f"--weights {path}: holds no named weights")
    return {plain_name(name): tensor for name, tensor in state.items()}


def are_weights(state: object) -> TypeGuard[dict[str, torch.Tensor]]:
    """Return True for a non-empty table of tensors by name."""
    return (
        isinstance(state, dict)
        and bool(state)
        and all(
            isinstance(name, str) and isinstance(value, torch.Tensor)
            for name, value in state.items()
        )
    )


def plain_name(name: str) -> str:
    """A weight's name without what DDP and torch.compile put before it."""
    for prefix in PREFIXES:
        name = name.removeprefix(prefix)
    return name


def head_of(model: nn.Module) -> list[str]:
    """The names of the last layer's weights."""
    layers = [
        name for name, layer in model.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)
    ]
    last = model.get_submodule(layers[-1])
    return [f"{layers[-1]}.{name}" for name, _ in last.named_parameters()]
