"""Models by the name in --model: torchvision's, timm's (`timm:NAME`), or the user's own."""

from collections.abc import Sequence
from difflib import get_close_matches

from torch import nn

from rackrun.errors import UsageError
from rackrun.user_code.imports import imported
from training.models.registered import TIMM
from training.models.torchvision_models import torchvision_model


def named_model(name: str, classes: int, size: int, own: Sequence[str] = ()) -> nn.Module:
    """Return the model of a name, without weights; UsageError for a name that means none.

    `own` are the names of the task's own models, for the message.
    """
    if name.startswith(TIMM):
        return _timm_model(name.removeprefix(TIMM), classes)
    if is_own(name):
        return _imported_model(name, classes)
    return torchvision_model(name, classes, size, own)


def is_own(name: str) -> bool:
    """Return whether a name is that of the user's own model, MODULE:NAME."""
    return ":" in name and not name.startswith(TIMM)


def _timm_model(name: str, classes: int) -> nn.Module:
    """Return a model of timm's own registry, which never asks a network for it."""
    try:
        import timm
    except ImportError:
        raise UsageError(f"--model {TIMM}{name}: needs timm: pip install 'rackrun[timm]'") from None
    if not timm.is_model(name):
        close = get_close_matches(name, timm.list_models(), n=1)
        meant = f"did you mean {TIMM}{close[0]}?" if close else "type a name of timm.list_models()"
        raise UsageError(f"--model {TIMM}{name}: no such model; {meant}")
    model: nn.Module = timm.create_model(name, pretrained=False, num_classes=classes)
    return model


def _imported_model(name: str, classes: int) -> nn.Module:
    """Return what the user's function or class builds; exceptions of their code pass through."""
    model = imported("--model", name, "Net", "num_classes")(num_classes=classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: returns no torch.nn.Module, but {type(model).__name__}")
    return model
