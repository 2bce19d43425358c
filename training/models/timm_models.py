"""Models of timm by name: built without a network, with timm's normalisation and its weights."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from rackrun.contract.files import PUBLISHED
from rackrun.errors import MissingPackage, UsageError
from rackrun.terminal import one_line
from training.data.transforms import Transforms
from training.models.registered import TIMM

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in timm's repositories on Hugging Face


def timm_model(name: str, classes: int, size: int) -> nn.Module:
    """Return a model of timm's own registry, built for images of this size where it has to be.

    UsageError for a name that timm does not have, and for a size that the model cannot have.
    """
    fixed = takes_one_size(name)
    options: dict[str, Any] = {"img_size": size} if fixed else {}
    try:
        model: nn.Module = _timm().create_model(
            name, pretrained=False, num_classes=classes, **options
        )
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
            f"--image-size {size}: --model {TIMM}{name} takes images with sides of a multiple of"
            f" {patch}; type --image-size {max(1, round(size / patch)) * patch}"
        )
    return model


def takes_one_size(name: str) -> bool:
    """Return whether a model is built for images of one size, as ViT and Swin are."""
    return bool(published(name).fixed_input_size)


def timm_normalised(name: str, transforms: Transforms) -> Transforms:
    """Return the transforms with the normalisation that timm's weights were trained with."""
    weights_facts = published(name)
    return replace(transforms, mean=tuple(weights_facts.mean), deviation=tuple(weights_facts.std))


def timm_weights(name: str) -> Path | None:
    """Return the published weights in this host's cache of Hugging Face; None if not there."""
    from huggingface_hub import try_to_load_from_cache

    for file in WEIGHTS:
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
