"""Names of the models in torchvision and timm, read from their sources.

To import them takes seconds, too long to wait for before every launch. Both libraries register a
model by a decorator over the function that builds it; timm has a table of former names, too.
"""

import re
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from rackrun.commands import called
from rackrun.contract.files import PUBLISHED
from rackrun.errors import UsageError
from rackrun.user_code.sources import did_you_mean, refuse_absent

TIMM = "timm:"
"""What a model of timm begins with in --model."""

MAXVIT = "maxvit_"
MAXVIT_MULTIPLE = 224
"""Pixels: windows of 7 divide what halvings to a 4th, 8th, 16th and 32nd leave."""

_VIT = re.compile(r"vit_[a-z]+_(\d+)")
"""A name that ends with the side of a patch, in pixels."""
_REGISTERED = re.compile(r"^@register_model(?:\(\))?\n(?:@.*\n)*def (\w+)\(", re.MULTILINE)
_FORMER = re.compile(r"^register_model_deprecations\(__name__, \{\n(.*?)^\}\)", re.M | re.S)
_NAME = re.compile(r"['\"](\w+)['\"]\s*:")


def registered(library: str) -> list[str]:
    """Return the names of a library's models; none where it is not installed."""
    spec = find_spec(library)
    folders = spec.submodule_search_locations if spec else None
    names: set[str] = set()
    for folder in folders or ():
        for path in (Path(folder) / "models").glob("*.py"):
            source = path.read_text()
            names.update(_REGISTERED.findall(source))
            names.update(name for table in _FORMER.findall(source) for name in _NAME.findall(table))
    return sorted(names)


def refuse_unknown(name: str, size: int, task_models: Sequence[str] | None) -> None:
    """Raise UsageError for a model that neither the task nor an installed library has.

    Raise it, too, for an image size that the model does not support. `task_models` is None for a
    task that does not list its own: any name may then be one of them.
    """
    if name.startswith(TIMM):
        models = [f"{TIMM}{each}" for each in registered("timm")]
        if models and name.partition(".")[0] not in models:
            raise UsageError(f"--model {name}: no such model; {other_models(name, (), models)}")
    elif task_models is None:
        return
    elif ":" in name:
        refuse_absent("--model", name, "Net", "num_classes")
    else:
        refuse_size(name, size)
        models = registered("torchvision")
        if models and name not in (*task_models, *models):
            raise UsageError(
                f"--model {name}: no such model; {other_models(name, task_models, models)}"
            )


def other_models(name: str, task_models: Sequence[str], library_models: Sequence[str]) -> str:
    """Return what to type instead of an unknown model: likely ones, or where the names are from.

    With those of timm among the likely ones, by their names with `timm:`.
    """
    timm_models = [f"{TIMM}{each}" for each in registered("timm")]
    names = dict.fromkeys((*task_models, *library_models, *timm_models))
    lists = f"{called('models')} lists all"
    if likely := did_you_mean(name, names, 0.5):
        is_unknown = not (timm_models or ":" in name)
        of_timm = f" or {TIMM}{name}, if it is one of timm's?" if is_unknown else ""
        return f"{likely.removeprefix('; ').rstrip('?')}{of_timm or '?'} {lists}"
    kinds = [
        *task_models,
        "a classification model of torchvision",
        "timm:NAME",
        "MODULE:NAME of your own",
    ]
    return f"type {', '.join(kinds[:-1])} or {kinds[-1]}; {lists}"


def refuse_unpublished(model: str, torchvision_names: Sequence[str]) -> None:
    """Raise UsageError for --weights imagenet with a model that is none of torchvision's."""
    if model not in torchvision_names:
        likely = [
            f", or --model {name}" for name in get_close_matches(model, torchvision_names, n=1)
        ]
        raise UsageError(
            f"--weights {PUBLISHED}: torchvision has none for --model {model};"
            f" type --weights ''{''.join(likely)}"
        )


def refuse_size(model: str, size: int) -> None:
    """Raise UsageError for images that a model of torchvision cannot cut into its patches."""
    patch = _VIT.fullmatch(model)
    multiple = int(patch[1]) if patch else MAXVIT_MULTIPLE if model.startswith(MAXVIT) else 1
    if size % multiple:
        fits = max(1, round(size / multiple)) * multiple
        raise UsageError(
            f"--image-size {size}: --model {model} takes images whose sides are multiples of"
            f" {multiple}; type --image-size {fits}"
        )


def has_one_size(model: str) -> bool:
    """Return whether a model of torchvision is built for images of one size."""
    return bool(_VIT.fullmatch(model)) or model.startswith(MAXVIT)
