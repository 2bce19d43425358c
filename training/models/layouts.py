"""Published layouts of weights, converted to the names and shapes of our models.

Each step takes the tensors of a file and those of the model, and returns the file's as the model
has them, with a note of what it changed. What no step can bring into place is refused afterwards.
"""

import math
import re
from collections.abc import Callable, Iterable

import torch
from torch.nn.functional import interpolate

Tensors = dict[str, torch.Tensor]
Step = Callable[[Tensors, Tensors], tuple[Tensors, str]]

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


def adapted(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return a file's tensors as a model has them, and what was changed."""
    notes = []
    for step in STEPS:
        file_tensors, note = step(file_tensors, model_tensors)
        if note:
            notes.append(note)
    return file_tensors, notes


def _without_prefix(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Leave out what a wrapper put before all names, and the tensors that are not below it."""
    probes = list(model_tensors)[:PROBES]
    prefixes = {
        name.removesuffix(probe)
        for name in file_tensors
        for probe in probes
        if name.endswith(probe)
    }
    prefix = max(
        ["", *sorted(prefixes)], key=lambda prefix: _fitting(file_tensors, model_tensors, prefix)
    )
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


def _fitting(file_tensors: Iterable[str], model_tensors: Tensors, prefix: str) -> int:
    return sum(
        name.startswith(prefix) and name[len(prefix) :] in model_tensors for name in file_tensors
    )


def renamed(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Give tensors the names that torchvision's models have today."""
    names = {
        name: _name_today(name) if name not in model_tensors else name for name in file_tensors
    }
    changed = any(name != today for name, today in names.items())
    return {names[name]: tensor for name, tensor in file_tensors.items()}, "earlier names" * changed


def _name_today(name: str) -> str:
    for pattern, today in OLD_NAMES:
        name = pattern.sub(today, name)
    return name


def _without_extra_heads(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Leave out the auxiliary heads of a model that is built without them."""
    kept = {
        n: tensor
        for n, tensor in file_tensors.items()
        if n in model_tensors or not n.startswith(EXTRA_HEADS)
    }
    return kept, "auxiliary heads left out" if len(kept) < len(file_tensors) else ""


def blurred(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Give the convolutions of --blur-pool the weights of plain ones."""
    plain = {name.replace(BLURRED, "."): name for name in model_tensors if BLURRED in name}
    names = {name: plain.get(name, name) for name in file_tensors}
    changed = any(name != blurred_name for name, blurred_name in names.items())
    return {
        names[name]: tensor for name, tensor in file_tensors.items()
    }, "plain convolutions blurred" * changed


def _resized_positions(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Interpolate position embeddings, (1, tokens + side * side, width), to another image size."""
    changed, note = {}, ""
    for name, tensor in _of_other_shapes(file_tensors, model_tensors, POSITIONS):
        model_shape = model_tensors[name].shape
        file_side, model_side = math.isqrt(tensor.shape[1]), math.isqrt(model_shape[1])
        tokens = tensor.shape[1] - file_side**2
        if tensor.ndim == 3 and model_shape == (1, tokens + model_side**2, tensor.shape[2]):
            grid = tensor[:, tokens:].transpose(1, 2).reshape(1, -1, file_side, file_side)
            rows = _interpolated(grid, model_side).flatten(2).transpose(1, 2)
            changed[name] = torch.cat([tensor[:, :tokens], rows], dim=1)
            note = f"position embeddings {_sides(file_side, model_side)}"
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
            note = f"relative biases {_sides(file_side, model_side)}"
    computed = {name: tensor for name, tensor in model_tensors.items() if name.endswith(COMPUTED)}
    return file_tensors | changed | computed, note


def _sides(old: int, new: int) -> str:
    return f"interpolated from {old} x {old} to {new} x {new}"


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
    """Interpolate float (1, channels, H, W) to (1, channels, side, side), corners on corners."""
    return interpolate(grid.float(), size=(side, side), mode="bicubic", align_corners=True)


def counted(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    """Start the batch counts of norms at 0 if a file is older than the count."""
    counts = {
        n: tensor for n, tensor in model_tensors.items() if n.endswith(".num_batches_tracked")
    }
    return counts | file_tensors, ""


STEPS: tuple[Step, ...] = (
    _without_prefix,
    renamed,
    _without_extra_heads,
    blurred,
    _resized_positions,
    resized_bias_tables,
    counted,
)
