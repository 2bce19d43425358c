"""Names of the models in torchvision and timm, read from their sources.

To import them takes seconds, too long to wait for before every launch. Both libraries register a
model by a decorator over the function that builds it; timm has a table of former names, too.
"""

import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rackrun.contract.files import PUBLISHED
from rackrun.errors import UsageError
from training.config import nearest

TIMM = "timm:"
"""What a model of timm begins with in --model."""

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


def refuse_unpublished(model: str, known: Sequence[str]) -> None:
    """Raise UsageError for --weights imagenet with a model that is none of torchvision's."""
    if model not in known:
        raise UsageError(
            f"--weights {PUBLISHED}: torchvision has none for --model {model};"
            f" type --weights '', or another model: {nearest(model, known)}"
        )
