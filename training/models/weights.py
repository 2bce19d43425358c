"""Weights from a file, in any published layout, into a model."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeGuard

import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import interpolate

from rackrun.errors import SaveError
from rackrun.terminal import one_line
from rackrun.units import plural
from training import checkpoint
from training.differences import table_differences
from training.layers import grown_tensors, heads_of

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors], tuple[Tensors, str]]

PREFIXES = ("module.", "_orig_mod.")  # what DDP and torch.compile put before a name
WRAPPERS = (  # keys below which files hold weights, averages first
    *("state", "average", "model_ema", "state_dict_ema", "ema_state_dict"),
    *("model", "state_dict"),
)
OLD_NAMES = (  # of torchvision's files -> of its models
    (re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12])\."), r"\1\2."),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_1\."), r"\1.0."),
    (re.compile(r"(encoder_layer_\d+\.mlp)\.linear_2\."), r"\1.3."),
)
EXTRA_HEADS = ("aux1.", "aux2.", "AuxLogits.")  # of GoogLeNet and Inception, for training alone
POSITIONS = ("pos_embedding", "pos_embed")
BIAS_TABLE = "relative_position_bias_table"
COMPUTED = ("relative_position_index", "relative_coords_table")  # from the model's sizes
BLURRED = ".convolution."  # a convolution in --blur-pool
PROBES = 8  # names of the model that are looked for below a prefix
INTERPOLATED = "interpolated from {0} x {0} to {1} x {1}"


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
        saved_head, ours = state.get(fresh[0]), model_tensors[fresh[0]]
        why = "is not there"
        if saved_head is not None:
            why = f"has {len(ours)} classes instead of {len(saved_head)}"
        line += f"; the last layer ({', '.join(fresh)}) {why} and starts afresh"
    try:
        model.load_state_dict({**state, **{name: model_tensors[name] for name in fresh}})
    except RuntimeError:  # of the right shapes, but of a kind that cannot be copied
        raise SaveError(f"--weights {path}: tensors of another kind than this model's") from None
    return line


def _content_of(path: Path) -> tuple[Tensors, list[str]]:
    # The weights, and the class names if the file has any: a checkpoint, torch.save's or
    # safetensors', wrapped or not.
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
    weights = {}
    for name, tensor in content.items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        weights[name] = tensor
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


def adapted(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return a file's tensors with the names and shapes of a model's, and what was changed.

    Each step takes the tensors of a file and those of the model, and returns the file's as the
    model has them, with a note of what it changed. What no step can bring into place stays.
    """
    notes = []
    for step in STEPS:
        file_tensors, note = step(file_tensors, model_tensors)
        if note:
            notes.append(note)
    return file_tensors, notes


def _without_prefix(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # What a wrapper put before all names goes, and so do the tensors that are not below it. Of the
    # prefixes before any of the model's first names, the one counts below which most names fit.
    probes = list(model_tensors)[:PROBES]
    prefixes = {
        name.removesuffix(probe)
        for name in file_tensors
        for probe in probes
        if name.endswith(probe)
    }

    def fitting(prefix: str) -> int:
        below = (name[len(prefix) :] for name in file_tensors if name.startswith(prefix))
        return sum(name in model_tensors for name in below)

    prefix = max(["", *sorted(prefixes)], key=fitting)
    kept = {
        name.removeprefix(prefix): file_tensors[name]
        for name in file_tensors
        if name.startswith(prefix)
    }
    kept.pop("n_averaged", None)  # a count that torch's AveragedModel keeps
    if not prefix:
        return kept, ""
    others = len(file_tensors) - len(kept)
    left_out = f" ({others} others left out)" if others else ""
    return kept, f"found below {prefix}{left_out}"


def _renamed(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    renamed = {}
    for name, tensor in file_tensors.items():
        new_name = name
        for pattern, replacement in OLD_NAMES if name not in model_tensors else ():
            new_name = pattern.sub(replacement, new_name)
        renamed[new_name] = tensor
    return renamed, "earlier names" if renamed.keys() != file_tensors.keys() else ""


def _without_extra_heads(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    kept = {
        name: tensor
        for name, tensor in file_tensors.items()
        if name in model_tensors or not name.startswith(EXTRA_HEADS)
    }
    return kept, "auxiliary heads left out" if len(kept) < len(file_tensors) else ""


def _blurred(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    plain = {name.replace(BLURRED, "."): name for name in model_tensors if BLURRED in name}
    renamed = {plain.get(name, name): tensor for name, tensor in file_tensors.items()}
    changed = renamed.keys() != file_tensors.keys()
    return renamed, "plain convolutions blurred" if changed else ""


def _resized_positions(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # Position embeddings of another image size: (1, tokens + side * side, width).
    changed, note = {}, ""
    for name, tensor in _of_other_shapes(file_tensors, model_tensors, POSITIONS):
        model_shape = model_tensors[name].shape
        file_side, model_side = math.isqrt(tensor.shape[1]), math.isqrt(model_shape[1])
        tokens = tensor.shape[1] - file_side**2
        if tensor.ndim == 3 and model_shape == (1, tokens + model_side**2, tensor.shape[2]):
            grid = tensor[:, tokens:].transpose(1, 2).reshape(1, -1, file_side, file_side)
            rows = _interpolated(grid, model_side).flatten(2).transpose(1, 2)
            changed[name] = torch.cat([tensor[:, :tokens], rows], dim=1)
            note = f"position embeddings {INTERPOLATED.format(file_side, model_side)}"
    return file_tensors | changed, note


def resized_bias_tables(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Interpolate tables of relative biases, (side * side, heads), to another window."""
    changed, note = {}, ""
    for name, tensor in _of_other_shapes(file_tensors, model_tensors, (BIAS_TABLE,)):
        model_shape = model_tensors[name].shape
        file_side, model_side = math.isqrt(tensor.shape[0]), math.isqrt(model_shape[0])
        if model_shape == (model_side**2, *tensor.shape[1:]) and file_side**2 == tensor.shape[0]:
            grid = tensor.T.reshape(1, -1, file_side, file_side)
            changed[name] = _interpolated(grid, model_side).flatten(2)[0].T
            note = f"relative biases {INTERPOLATED.format(file_side, model_side)}"
    computed = {name: tensor for name, tensor in model_tensors.items() if name.endswith(COMPUTED)}
    return file_tensors | changed | computed, note


def _of_other_shapes(
    file_tensors: Tensors, model_tensors: Tensors, ends: tuple[str, ...]
) -> list[tuple[str, torch.Tensor]]:
    return [
        (name, tensor)
        for name, tensor in file_tensors.items()
        if name.endswith(ends)
        and name in model_tensors
        and tensor.ndim >= 2
        and tensor.shape != model_tensors[name].shape
    ]


def _interpolated(grid: torch.Tensor, side: int) -> torch.Tensor:
    # float (1, channels, H, W) -> (1, channels, side, side), corners on corners.
    return interpolate(grid.float(), size=(side, side), mode="bicubic", align_corners=True)


def _counted(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # A file from before torch counted batches gets the count of the model, 0.
    counts = {
        name: tensor
        for name, tensor in model_tensors.items()
        if name.endswith(".num_batches_tracked")
    }
    return counts | file_tensors, ""


STEPS: tuple[Step, ...] = (
    _without_prefix,
    _renamed,
    _without_extra_heads,
    _blurred,
    _resized_positions,
    resized_bias_tables,
    _counted,
)
