"""`dataclass`, whose classes share their methods: a launch compiled six for each of 140 classes.

The standard one writes source for every method of every class, and runs it: 67 of the 192 ms that a
launch's imports took. Here it does so for `__init__` alone, and the other methods go by
the fields. To type checkers, and to `fields`, `replace` and `asdict`, nothing differs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any, TypeVar

__all__ = ["dataclass"]

T = TypeVar("T")


def _light_dataclass(
    cls: type[T] | None = None,
    /,
    *,
    frozen: bool = False,
    eq: bool = True,
    repr: bool = True,
    **options: Any,
) -> type[T] | Callable[[type[T]], type[T]]:
    """Make a dataclass, as `dataclasses.dataclass` does for the same options."""

    def made(cls: type[T]) -> type[T]:
        shared: dict[str, Any] = {"__repr__": _repr} if repr else {}
        if eq:
            shared |= {"__eq__": _is_equal, "__hash__": _hash if frozen else None}
        if frozen:
            shared |= {"__setattr__": _set_once, "__delattr__": _refuse}
        for name in shared.keys() - vars(cls).keys():
            setattr(cls, name, shared[name])
        return dataclasses.dataclass(cls, repr=False, eq=False, **options)

    return made if cls is None else made(cls)


if not TYPE_CHECKING:
    dataclass = _light_dataclass


@functools.cache
def _fields(cls: Any, purpose: str) -> tuple[str, ...]:
    return tuple(each.name for each in dataclasses.fields(cls) if getattr(each, purpose))


def _compared(value: Any) -> tuple[Any, ...]:
    return tuple([getattr(value, name) for name in _fields(value.__class__, "compare")])


@recursive_repr()
def _repr(self: Any) -> str:
    shown = (f"{name}={getattr(self, name)!r}" for name in _fields(self.__class__, "repr"))
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _is_equal(self: Any, other: object) -> Any:
    return _compared(self) == _compared(other) if type(other) is type(self) else NotImplemented


def _hash(self: Any) -> int:
    return hash(_compared(self))


def _set_once(self: Any, name: str, value: object) -> None:
    """Set a field in `__init__`, which is the first to do so; refuse all else."""
    if name in vars(self) or name not in self.__dataclass_fields__:
        _refuse(self, name)
    object.__setattr__(self, name, value)


def _refuse(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change field {name!r}")
