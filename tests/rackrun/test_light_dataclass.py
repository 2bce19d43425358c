"""The dataclass of launcher/ and rackrun/ does what the standard one does, for less."""

import copy
import dataclasses
import pickle
import re
from dataclasses import FrozenInstanceError, asdict, field, replace
from pathlib import Path
from typing import Any

import pytest

from rackrun.light_dataclass import dataclass

ROOT = Path(__file__).parents[2]


def classes(decorator: Any, **options: Any) -> tuple[Any, Any]:
    """Return a class and one that inherits from it, both made by a decorator."""

    @decorator(**options)
    class Job:
        name: str
        ranks: int = 2
        hosts: tuple[Any, ...] = ()
        secret: str = field(default="", repr=False)
        handle: Any = field(default=None, compare=False)
        notes: list[str] = field(default_factory=list, compare=False)

    @decorator(**options)
    class Longer(Job):
        hours: float = 1.0

    return Job, Longer


@pytest.mark.parametrize(
    "options", [{}, {"frozen": True}, {"eq": False}, {"frozen": True, "repr": False}]
)
def test_values_are_shown_compared_and_copied_as_those_of_the_standard_one(
    options: dict[str, bool],
) -> None:
    """Every pair of values is equal in both or in neither, and looks the same."""

    def seen(decorator: Any) -> list[object]:
        values = [
            maker(*args, **fields)
            for maker in classes(decorator, **options)
            for args in (("a",), ("a", 3), ("b",))
            for fields in ({}, {"secret": "s"}, {"handle": 7}, {"hosts": ("x",)})
        ]
        shown = [re.sub(r"0x\w+", "", repr(value)) for value in values]
        changed = [asdict(replace(value, ranks=9)) for value in values]
        copied = [copy.copy(value) == value for value in values]
        equal = [one == other for one in values for other in values]
        hashed = values[0].__hash__ and [hash(a) == hash(b) for a in values for b in values]
        return [shown, changed, copied, equal, hashed, [v.__match_args__ for v in values]]

    assert seen(dataclass) == seen(dataclasses.dataclass)


def test_a_frozen_value_stays_as_it_was_made() -> None:
    """No field is set or deleted, and none is added; the constructor names a wrong argument."""
    job = classes(dataclass, frozen=True)[1]("a")
    for name in ("name", "ranks", "hours", "new"):
        with pytest.raises(FrozenInstanceError, match=name):
            setattr(job, name, 1)
        with pytest.raises(FrozenInstanceError, match=name):
            delattr(job, name)
    assert job == type(job)("a")
    with pytest.raises(TypeError, match="unexpected keyword argument 'rank'"):
        type(job)("a", rank=1)


@dataclass(frozen=True)
class Shown:
    """Has a representation of its own, and sets a field after the others."""

    number: int
    double: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "double", 2 * self.number)

    def __repr__(self) -> str:
        return f"<{self.number}, {self.double}>"


def test_what_a_class_defines_itself_stays() -> None:
    """Its own representation is shown, and a pickled value comes back."""
    assert repr(Shown(2)) == "<2, 4>"
    assert pickle.loads(pickle.dumps(Shown(2))) == Shown(2)


def test_a_value_that_holds_itself_is_shown() -> None:
    """The inner one is three dots, as for lists."""
    job = classes(dataclass)[0]("a")
    job.hosts = (job,)
    assert "hosts=(...,)" in repr(job)


def test_a_launch_imports_no_class_of_the_standard_decorator() -> None:
    """launcher/ and rackrun/ use the light one throughout: each class of the other costs 0.5 ms.

    rackrun/contract/ is sent to hosts, without it.
    """
    standard = re.compile(r"^from dataclasses import .*\bdataclass\b", re.MULTILINE)
    files = [path for room in ("launcher", "rackrun") for path in (ROOT / room).rglob("*.py")]
    heavy = {path for path in files if standard.search(path.read_text())}
    assert heavy - {*(ROOT / "rackrun/contract").glob("*")} == {ROOT / "rackrun/light_dataclass.py"}
