"""Models by the name in --model: torchvision's, timm's (`timm:NAME`), or the user's own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rackrun.contract.files import PUBLISHED
from rackrun.errors import MissingPackage, UsageError
from rackrun.terminal import one_line
from rackrun.training.data.decode import Interpolation
from rackrun.training.data.transforms import Transforms
from rackrun.training.models.registered import MAXVIT, TIMM, has_one_size, other_models, refuse_size
from rackrun.user_code.imports import imported

HALVES = ("googlenet", "inception_v3", "efficientnet_v2_l")
"""Models of torchvision whose published weights were trained on pixels from -1 to 1."""
RESERVED = {"weights", "progress", "num_classes", "pretrained", "img_size", "image_size"}
"""Arguments of builders that --weights, the data and --image-size decide on."""
TIMM_FILES = ("model.safetensors", "pytorch_model.bin")  # in timm's repositories on Hugging Face


def named_model(
    name: str,
    classes: int,
    size: int,
    task_models: Sequence[str] = (),
    args: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Return the model of a name, without weights; UsageError for a name that means none.

    `task_models` are the names of the task's own models, for the message; `args` are further
    arguments of the function that builds the model (--model-args).
    """
    if name.startswith(TIMM):
        return timm_model(name.removeprefix(TIMM), classes, size, args)
    if is_own(name):
        # Exceptions of the user's code pass through.
        build = imported("--model", name, "Net", "num_classes", *args)
        model = build(num_classes=classes, **args)
        if not isinstance(model, nn.Module):
            what = type(model).__name__
            raise UsageError(f"--model {name}: returns no torch.nn.Module, but {what}")
        return _with_sizes(model, size)
    return torchvision_model(name, classes, size, task_models, args)


def _with_sizes(model: nn.Module, size: int) -> nn.Module:
    # Lazy layers get their sizes from images; until then torch neither moves nor copies them.
    if any(is_lazy(weight) for weight in (*model.parameters(), *model.buffers())):
        with torch.no_grad():
            model.eval()(torch.zeros(2, 3, size, size))
        model.train()
    return model


def torchvision_model(
    name: str,
    classes: int,
    size: int,
    task_models: Sequence[str] = (),
    args: Mapping[str, Any] = MappingProxyType({}),
) -> nn.Module:
    """Return a classification model of torchvision by its name in the registry, without weights.

    UsageError for a name that neither the registry nor the task has, and for a size that
    the model cannot have.
    """
    import torchvision  # it takes as long as torch to import, and a task may have its own models

    torchvision_names = torchvision.models.list_models(module=torchvision.models)
    if name not in torchvision_names:
        raise UsageError(
            f"--model {name}: no such model; {other_models(name, task_models, torchvision_names)}"
        )
    refuse_size(name, size)
    builder = torchvision.models.get_model_builder(name)
    options: dict[str, object] = {"num_classes": classes}
    if name in ("googlenet", "inception_v3"):
        options |= {"aux_logits": False, "init_weights": True}
    if name.startswith("vit_"):
        options["image_size"] = size
    if name.startswith(MAXVIT):
        options["input_size"] = (size, size)
    model = _built(name, args, partial(builder, weights=None, **options))
    assert isinstance(model, nn.Module)
    return model


def _built(name: str, args: Mapping[str, Any], build: Callable[..., nn.Module]) -> nn.Module:
    if reserved := sorted(RESERVED & args.keys()):
        raise UsageError(f"--model-args {reserved[0]}: other options decide on it; leave it out")
    try:
        return build(**args)
    except (TypeError, ValueError) as error:
        if not args:
            raise
        given = ",".join(f"{key}={value}" for key, value in args.items())
        raise UsageError(
            f"--model-args {given}: --model {name} does not take them: {one_line(str(error))[:200]}"
        ) from None


def normalized_for(model: str, transforms: Transforms) -> Transforms:
    """Return the transforms with the normalization of a model's published weights."""
    if model.startswith(TIMM):
        facts = published(model.removeprefix(TIMM))
        return replace(transforms, mean=tuple(facts.mean), deviation=tuple(facts.std))
    if model not in HALVES:
        return transforms
    half = (0.5, 0.5, 0.5)
    return replace(transforms, mean=half, deviation=half)


class PublishedImages(NamedTuple):
    """How evaluation showed images to published weights."""

    side: int
    short_side: int
    interpolation: Interpolation


def published_images(model: str) -> PublishedImages | None:
    """Return how images were shown to a model's published weights; None if it has none."""
    if model.startswith(TIMM):
        facts = published(model.removeprefix(TIMM))
        side = facts.input_size[-1]
        kernel: Interpolation = "bilinear" if facts.interpolation == "bilinear" else "bicubic"
        return PublishedImages(side, math.floor(side / facts.crop_pct), kernel)
    import torchvision

    if is_own(model) or model not in torchvision.models.list_models(module=torchvision.models):
        return None
    preset = torchvision.models.get_model_weights(model).DEFAULT.transforms()
    side, short_side = preset.crop_size[0], preset.resize_size[0]
    return PublishedImages(side, short_side, preset.interpolation.value)


def takes_one_size(name: str) -> bool:
    """Return whether a model is built for images of one size, as ViT and Swin are."""
    if name.startswith(TIMM):
        return bool(published(name.removeprefix(TIMM)).fixed_input_size)
    return has_one_size(name)


def is_own(name: str) -> bool:
    """Return whether a name is that of the user's own model, MODULE:NAME."""
    return ":" in name and not name.startswith(TIMM)


def timm_model(
    name: str, classes: int, size: int, args: Mapping[str, Any] = MappingProxyType({})
) -> nn.Module:
    """Return a model of timm's own registry, built for images of this size where it has to be.

    UsageError for a name that timm does not have, and for a size that the model cannot have.
    """
    fixed = published(name).fixed_input_size
    options: dict[str, Any] = {"img_size": size} if fixed else {}
    try:
        build = partial(
            _timm().create_model, name, pretrained=False, num_classes=classes, **options
        )
        model = _built(f"{TIMM}{name}", args, build)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        if not fixed:
            raise
        raise UsageError(
            f"--image-size {size}: --model {TIMM}{name}: {one_line(str(error))[:200]}; type"
            f" --image-size {published(name).input_size[-1]}"
        ) from None
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", (1,))[0] if fixed else 1
    if size % patch:
        raise UsageError(
            f"--image-size {size}: --model {TIMM}{name} takes images whose sides are multiples of"
            f" {patch}; type --image-size {max(1, round(size / patch)) * patch}"
        )
    return model


def timm_weights(name: str) -> Path | None:
    """Return the published weights in this host's cache of Hugging Face; None if not there."""
    from huggingface_hub import try_to_load_from_cache

    for file in TIMM_FILES:
        cached_path = try_to_load_from_cache(repository(name), file)
        if isinstance(cached_path, str):
            return Path(cached_path)
    return None


def repository(name: str) -> str:
    """Return where on Hugging Face the weights are; UsageError for a model that has none there."""
    hub_id: str | None = published(name).hf_hub_id
    if not hub_id:
        raise UsageError(
            f"--weights {PUBLISHED}: timm has none on Hugging Face for --model {TIMM}{name}; type"
            " --weights FILE, or --weights ''"
        )
    return hub_id


@cache
def published(name: str) -> Any:
    """Return timm's facts about a model's published weights, by its name with or without a tag."""
    timm = _timm()
    if not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=1)
        meant = f"did you mean {TIMM}{close[0]}?" if close else "type a name of timm.list_models()"
        raise UsageError(f"--model {TIMM}{name}: no such model; {meant}")
    try:
        weights_facts = timm.get_pretrained_cfg(name)
    except RuntimeError:
        model, _, tag = name.partition(".")
        tags = ", ".join(timm.list_pretrained(f"{model}.*")) or "none"
        raise UsageError(f"--model {TIMM}{name}: no weights {tag}; there are {tags}") from None
    return weights_facts or timm.models.PretrainedCfg()


def _timm() -> ModuleType:
    try:
        import timm
    except ImportError:
        raise MissingPackage("timm", "timm") from None
    module: ModuleType = timm
    return module
