"""Models by the name in --model: torchvision's, timm's (`timm:NAME`), or the user's own."""

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path

from torch import nn

from rackrun.errors import UsageError
from training.models.torchvision_models import torchvision_model

TIMM = "timm:"
IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.\w+)*:[^\W\d]\w*(\.\w+)*")
FORM = "type MODULE:NAME, as my_models:Net for the class Net of my_models.py in this folder"


def named_model(name: str, classes: int, size: int, own: Sequence[str] = ()) -> nn.Module:
    """Return the model of a name, without weights; UsageError for a name that means none.

    `own` are the names of the task's own models, for the message.
    """
    if name.startswith(TIMM):
        return _timm_model(name.removeprefix(TIMM), classes)
    if is_import_path(name):
        return _imported_model(name, classes)
    return torchvision_model(name, classes, size, own)


def is_import_path(name: str) -> bool:
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
    module, _, path = name.partition(":")
    build = _found(name, module, path)
    try:
        inspect.signature(build).bind(num_classes=classes)
    except (TypeError, ValueError):
        form = f"def {path.rpartition('.')[2]}(num_classes): ..."
        raise UsageError(
            f"--model {name}: cannot be called with num_classes; type: {form}"
        ) from None
    model = build(num_classes=classes)
    if not isinstance(model, nn.Module):
        raise UsageError(f"--model {name}: returns no torch.nn.Module, but {type(model).__name__}")
    return model


def _found(name: str, module: str, path: str) -> Callable[..., object]:
    """Import what MODULE:NAME means, from the current folder or installed packages."""
    if not IMPORT_PATH.fullmatch(name):
        raise UsageError(f"--model {name}: {FORM}")
    try:
        target: object = import_module(module)
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):
            raise  # a module that theirs imports
        where = f"in {Path.cwd()} or installed"
        raise UsageError(f"--model {name}: no module {error.name} {where}; {FORM}") from None
    for part in path.split("."):
        target = getattr(target, part, None)
    if not callable(target):
        raise UsageError(f"--model {name}: no class or function {path} in {module}; {FORM}")
    return target
