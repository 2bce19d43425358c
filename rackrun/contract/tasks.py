"""The table of tasks, and the packages that all tasks share."""

PLATFORM = ("launcher", "shards", "convert", "nginx", "training")
"""The packages in `rackrun` that every task shares."""

TASKS = {
    "catdog": ("demo",),
    "classify": (),
    "imagenet": (),
    "mnist": (),
}
"""The table of tasks: task -> its own commands, each a module in it with `main(args)`.

A task is a package of its name in `rackrun`, or the one in PACKAGES, with `recipes.py` (settings,
without torch) and `model.py` (models and the `TASK`). A line here makes it known to the launcher,
to `python -m rackrun.training` and to the tests.
"""

PACKAGES = {"classify": "rackrun.training.tasks.classify"}
"""The packages of tasks whose package has another name."""


def package_of(task: str) -> str:
    """Return the package of a task of the table, as `rackrun.catdog`."""
    return PACKAGES.get(task, f"rackrun.{task}")
