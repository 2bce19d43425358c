"""A task imported from its source: the settings that it offers, and its `Task`.

For the user's own file or module, its folder comes first among those that are imported from, as if
Python ran it: in this process, in loader workers, and in the server that forks them.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.user_code.imports import import_from, own_module
from rackrun.user_code.tasks import TaskSource, find_task, why_no_task

if TYPE_CHECKING:
    from rackrun.training.task import Task


def require_task(task: str) -> TaskSource:
    """Return the task of this name, import path or file, ready to be imported."""
    source = find_task(task)
    if source is None:
        raise UsageError(why_no_task(task))
    if source.file:
        import_from(source.file.absolute().parent if task.endswith(".py") else Path.cwd())
    return source


def recipes_of(source: TaskSource) -> Mapping[str, type[Config]]:
    """Return the settings of a task by the names of its recipes."""
    recipes = _value(source, source.recipes, "RECIPES")
    named = recipes.get("default") if isinstance(recipes, dict) else None
    if not (isinstance(named, type) and issubclass(named, Config)):
        form = 'RECIPES = {"default": MySettings}'
        form += ", a dataclass that extends rackrun.Config"
        raise UsageError(f"{source.name}: RECIPES: not a dict of settings; type: {form}")
    settings_by_recipe: Mapping[str, type[Config]] = recipes
    for settings in settings_by_recipe.values():
        _require_types(source, settings)
    return settings_by_recipe


def _require_types(source: TaskSource, settings: type[Config]) -> None:
    # A dataclass silently ignores a default without a type.
    own_classes = settings.__mro__[: settings.__mro__.index(Config)]
    for each in own_classes:
        for name, value in vars(each).items():
            typed = name in vars(each).get("__annotations__", {})
            if not (typed or name.startswith("_")) and isinstance(value, bool | int | float | str):
                form = f"{name}: {type(value).__name__} = {value!r}"
                raise UsageError(
                    f"{source.name}: {each.__name__}.{name}: has no type, and so no effect;"
                    f" type: {form}"
                )


def task_of(source: TaskSource) -> "Task":
    """Return the `TASK` of a task, which is imported with torch and all else that it needs."""
    from rackrun.training.task import Task

    task = _value(source, source.model, "TASK")
    if not isinstance(task, Task):
        form = 'TASK = rackrun.Task("my_task", build, transforms)'
        raise UsageError(f"{source.name}: TASK: not a Task; type: {form}")
    return task


def _value(source: TaskSource, name: str, variable: str) -> Any:
    module = import_module(name) if source.file is None else own_module(source.name, name)
    if source.file and source.model == name:
        imported_file = Path(module.__file__).resolve() if module.__file__ else None
        if imported_file != source.file.resolve():
            raise UsageError(
                f"{source.name}: Python has another module {name}, {module.__file__}; rename yours"
            )
    if not hasattr(module, variable):
        raise UsageError(f"{source.name}: {module.__file__} does not define {variable}")
    return getattr(module, variable)
