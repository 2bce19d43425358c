"""Weights from a file, in any published layout, into a model."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import safetensors.torch
import torch
from torch import nn
from torch.nn.functional import interpolate

from rackrun.errors import SaveError
from rackrun.shapes import Misshapen, parsed_json
from rackrun.terminal import one_line
from rackrun.training import checkpoint
from rackrun.training.data.transforms import Transforms
from rackrun.training.differences import short, table_differences
from rackrun.training.layers import heads_of
from rackrun.units import first_few, plural

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
GRIDS = {
    **dict.fromkeys(("pos_embedding", "pos_embed"), "position embeddings"),
    "relative_position_bias_table": "relative biases",
}
"""How names of tensors end that hold a row for each place of a grid, and what they are."""
MOST_HEADER = 16 << 20  # bytes, of a safetensors file
COMPUTED = ("relative_position_index", "relative_coords_table")  # from the model's sizes


def load_weights(
    model: nn.Module,
    path: Path,
    classes: Sequence[str],
    transforms: Transforms | None = None,
    whole: bool = False,
) -> str:
    """Load the weights in a file; return a line about what was loaded, adapted and left as it is.

    The rows of the last layer follow their classes by name; a class that the file lacks is
    reinitialized, and so is a last layer of another size. `transforms`: how images reach the model,
    for a remark where those of the file reached it otherwise. SaveError for anything else that does
    not fit, and if the weights are to be `whole`, for a last layer without a row for each class.
    """
    model_tensors = model.state_dict()
    file = _content_of(path)
    state, notes = adapted(file.tensors, model_tensors)
    head = tuple(f"{name}." for name in heads_of(model, len(classes))[-1:])
    head_names = [name for name in model_tensors if name.startswith(head)]
    rows_note = ""
    if all(state.get(name) is not model_tensors[name] for name in head_names):
        state, rows_note = _with_rows_by_class(state, model_tensors, head_names, file, classes)
    else:  # the file has what the model wraps, without this layer
        rows_note = "is not there and is reinitialized"
    fresh = [
        name
        for name in head_names
        if name not in state or state[name].shape != model_tensors[name].shape
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
    if fresh and not rows_note:
        saved_head, ours = state.get(fresh[0]), model_tensors[fresh[0]]
        rows_note = "is not there and is reinitialized"
        if saved_head is not None:
            rows_note = f"has {len(ours)} classes instead of {len(saved_head)} and is reinitialized"
    if whole and ("reinitialized" in rows_note or fresh):
        raise SaveError(
            f"--weights {path}: the last layer {rows_note}; type --classes with the"
            " names of the classes of these weights"
        )
    if rows_note:
        notes.append(f"the last layer ({', '.join(head_names)}) {rows_note}")
    if transforms and (seen := file.seen_otherwise(transforms)):
        notes.append(seen)
    try:
        model.load_state_dict({**state, **{name: model_tensors[name] for name in fresh}})
    except RuntimeError:  # of the right shapes, but of a kind that cannot be copied
        raise SaveError(f"--weights {path}: tensors of another kind than this model's") from None
    return one_line("; ".join([f"weights from {path}", *notes]))


def _with_rows_by_class(
    state: Tensors,
    model_tensors: Tensors,
    head_names: Sequence[str],
    file: "WeightsFile",
    classes: Sequence[str],
) -> tuple[Tensors, str]:
    # The tensors with the rows of the last layer where the classes of the same name are.
    fits = [name for name in head_names if _has_rows_of(state, model_tensors, name)]
    rows = len(state[fits[0]]) if fits else 0
    if len(fits) < len(head_names) or not rows:
        return state, ""
    if len(file.classes) != rows:
        if rows != len(classes):
            return state, ""
        return state, f"keeps its {rows:,} rows: the file does not say of which classes"
    if file.classes == list(classes):
        return state, ""
    old_rows = {name: row for row, name in enumerate(file.classes)}
    found = [number for number, name in enumerate(classes) if name in old_rows]
    if not found:
        others = {name: tensor for name, tensor in state.items() if name not in head_names}
        theirs = first_few([short(name) for name in file.classes], 3)
        return others, f"had other classes ({theirs}) and is reinitialized"
    moved = {}
    for name in head_names:
        moved[name] = model_tensors[name].detach().clone()
        source = [old_rows[classes[number]] for number in found]
        moved[name][found] = state[name][source].to(moved[name])
    note = f"has the rows of {len(found):,} of {plural(len(classes), 'class', 'classes')} by name"
    if new := [short(name) for name in classes if name not in old_rows]:
        note += f"; reinitialized: {first_few(new, 3)}"
    return state | moved, note


def _has_rows_of(state: Tensors, model_tensors: Tensors, name: str) -> bool:
    saved, ours = state.get(name), model_tensors[name]
    return saved is not None and 0 < saved.ndim == ours.ndim and saved.shape[1:] == ours.shape[1:]


class WeightsFile(NamedTuple):
    """What a file of weights holds."""

    tensors: Tensors
    classes: list[str]
    """Empty where the file does not name them."""
    mean: object
    deviation: object
    """Standard deviation in training; None where the file does not say."""

    def seen_otherwise(self, transforms: Transforms) -> str:
        """Return what to type if the weights were trained with another normalization, or ""."""
        try:
            seen = [
                tuple(float(each) for each in values)
                for values in (self.mean, self.deviation)
                if isinstance(values, list | tuple) and 0 < len(values) <= 3
            ]
        except (TypeError, ValueError):
            return ""
        if len(seen) < 2 or seen == [transforms.mean, transforms.deviation]:
            return ""
        mean, std = (",".join(f"{each:g}" for each in values) for values in seen)
        return f"they were trained with another normalization: type --mean {mean} --std {std}"


def _content_of(path: Path) -> WeightsFile:
    # A checkpoint, torch.save's or safetensors', wrapped or not.
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SaveError(f"--weights {path}: cannot be read: {error.strerror}") from None
    if data[8:9] == b"{":
        content, said = _safetensors(data, path), _metadata(data)
    else:
        content = said = checkpoint.parse(data, path)
    tensors = {}
    for name, tensor in _named_weights(content, path).items():
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        tensors[name] = tensor
    classes, numbers = said.get("classes"), said.get("class_to_idx")
    if isinstance(numbers, dict) and all(isinstance(each, int) for each in numbers.values()):
        classes = sorted(numbers, key=lambda name: numbers[name])  # of torchvision's ImageFolder
    if not isinstance(classes, list) or not all(isinstance(each, str) for each in classes):
        classes = []
    preparation = said.get("preparation")
    seen = preparation if isinstance(preparation, dict) else {}
    return WeightsFile(tensors, classes, seen.get("mean"), seen.get("deviation"))


def _named_weights(content: dict[str, Any], path: Path) -> Tensors:
    table: Any = content
    for _ in WRAPPERS:  # a table may hold itself
        if are_weights(table):
            return table
        if not isinstance(table, dict):
            break
        tables = [key for key in WRAPPERS if isinstance(table.get(key), dict) and table[key]]
        if not tables:
            tables = [key for key, value in table.items() if are_weights(value)]
            if len(tables) != 1:
                break
        table = table[tables[0]]
    keys = first_few([short(key) for key in content], 8) or "none"
    raise SaveError(
        f"--weights {path}: holds no named weights, or several tables of them; its keys: {keys};"
        " save the state_dict() alone"
    )


def _safetensors(data: bytes, path: Path) -> Any:
    try:
        return safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        reason = one_line(str(error))[:200]
        raise SaveError(f"--weights {path}: not whole, as safetensors: {reason}") from None
    except KeyError as error:  # a type of numbers that this library knows, and not for torch
        kind = one_line(str(error))[:40]
        raise SaveError(f"--weights {path}: numbers of type {kind}, unknown to torch") from None


def _metadata(data: bytes) -> dict[str, Any]:
    # What an export has written beside its tensors; nothing for files of other programs.
    try:
        header = parsed_json(data[8 : 8 + int.from_bytes(data[:8], "little")], MOST_HEADER)
        texts = header["__metadata__"]
        return {name: parsed_json(texts[name], MOST_HEADER) for name in ("classes", "preparation")}
    except (Misshapen, KeyError):
        return {}


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


def _in_place(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # What a wrapper put before all names of the file goes, and what the model itself puts before
    # its names comes. Of all such pairs the one counts by which most names fit.
    def fitting(pair: tuple[str, str]) -> int:
        of_file, of_model = pair
        below = (name[len(of_file) :] for name in file_tensors if name.startswith(of_file))
        return sum(of_model + name in model_tensors for name in below)

    models = _prefixes(model_tensors)
    pair = max(((each, model) for model in models for each in _prefixes(file_tensors)), key=fitting)
    of_file, of_model = pair if 2 * fitting(pair) > len(model_tensors) else ("", "")
    kept = {
        of_model + name.removeprefix(of_file): tensor
        for name, tensor in file_tensors.items()
        if name.startswith(of_file) and name != "n_averaged"  # that torch's AveragedModel counts
    }
    notes = []
    if of_file:
        rest = len(file_tensors) - len(kept)
        left_out = f" ({rest} others left out)" if rest else ""
        notes.append(f"found below {of_file}{left_out}")
    if of_model:
        others = {
            name: tensor
            for name, tensor in model_tensors.items()
            if not name.startswith(of_model) and name not in kept
        }
        made = f" ({first_few([short(name) for name in others], 3)} as the model makes them)"
        notes.append(f"put below {of_model}{made if others else ''}")
        kept |= others
    return kept, "; ".join(notes)


def _prefixes(tensors: Tensors) -> list[str]:
    # Those of a quarter of the names at least, the shortest first: "", "net.", "net.body.".
    counts = Counter(
        f"{prefix}."
        for name in tensors
        for prefix in accumulate(name.split(".")[:-1], "{}.{}".format)
    )
    return ["", *sorted((each for each in counts if 4 * counts[each] >= len(tensors)), key=len)]


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


def _resized_grids(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # Position embeddings of another image size, (1, tokens + side * side, width), and tables of
    # relative biases of another window, (side * side, heads).
    changed, notes = {}, dict[str, str]()
    for name, tensor in file_tensors.items():
        kind = next((kind for end, kind in GRIDS.items() if name.endswith(end)), "")
        ours = model_tensors.get(name, tensor)
        if not kind or tensor.shape == ours.shape or not 2 <= tensor.ndim <= 3:
            continue
        rows = tensor.reshape(-1, *tensor.shape[-2:])  # (1, tokens + side * side, width)
        file_side, model_side = math.isqrt(rows.shape[1]), math.isqrt(ours.shape[-2])
        tokens = rows.shape[1] - file_side**2
        shape = (*tensor.shape[:-2], tokens + model_side**2, rows.shape[2])
        if len(rows) > 1 or ours.shape != shape:
            continue
        grid = rows[:, tokens:].transpose(1, 2).reshape(1, -1, file_side, file_side)
        sides = (model_side, model_side)  # corners lie on corners
        grid = interpolate(grid.float(), size=sides, mode="bicubic", align_corners=True)
        resized = torch.cat([rows[:, :tokens], grid.flatten(2).transpose(1, 2)], dim=1)
        changed[name] = resized.reshape(shape)
        notes[kind] = (
            f"{kind} interpolated from {file_side} x {file_side} to {model_side} x {model_side}"
        )
    computed = {name: tensor for name, tensor in model_tensors.items() if name.endswith(COMPUTED)}
    return file_tensors | changed | computed, "; ".join(notes.values())


def _counted(file_tensors: Tensors, model_tensors: Tensors) -> tuple[Tensors, str]:
    # A file from before torch counted batches gets the count of the model, 0.
    counts = {
        name: tensor
        for name, tensor in model_tensors.items()
        if name.endswith(".num_batches_tracked")
    }
    return counts | file_tensors, ""


STEPS: tuple[Step, ...] = (
    _in_place,
    _renamed,
    _without_extra_heads,
    _resized_grids,
    _counted,
)
