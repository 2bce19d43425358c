"""What a mutated module imports: a function switches to the mutant that a variable names.

The environment variable reaches ranks and loader workers too, as tests start them.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mutmut.mutation.trampoline import MutantDict, wrap_in_trampoline

__all__ = ["MutantDict", "switched"]
UNDER_TEST = "MUTANT_UNDER_TEST"  # of mutmut
REACHED = "MUTANTS_REACHED"
"""A file for the names of the functions that a test calls, one per line."""

_noted: set[tuple[str, str]] = set()


class _Noting:
    """The variants of a function; notes that it was called."""

    def __init__(self, variants: dict[str, Any]) -> None:
        self.variants = variants

    def __getitem__(self, name: str) -> Any:
        variant = self.variants[name]
        if path := os.environ.get(REACHED):
            function = f"{variant.__module__}.{variant.__name__.partition('__mutmut')[0]}"
            if (path, function) not in _noted:
                _noted.add((path, function))
                with Path(path).open("a") as file:
                    file.write(f"{function}\n")
        return variant

    def get(self, name: str) -> Any:
        return self.variants.get(name)


def switched(variants: dict[str, Any], **options: bool) -> Callable[..., Any]:
    """Decorate a function of a mutated module, as mutmut's own trampoline does."""
    return wrap_in_trampoline(_Noting(variants), **options)
