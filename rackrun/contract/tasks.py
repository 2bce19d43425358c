"""What can be trained, and the packages that every task shares."""

PLATFORM = ("rackrun", "launcher", "shards", "convert", "nginx", "training")
"""The packages that every task shares."""

TASKS = {
    "catdog": ("demo",),
    "classify": (),
    "imagenet": (),
    "mnist": (),
}
"""What can be trained: task -> its own commands, each a module of it with `main(args)`.

A task is a package of its name, or the one in PACKAGES, with `recipes.py` (settings, without torch)
and `model.py` (models and the `TASK`). A line here makes it known to the launcher, to
`python -m training` and to the tests.
"""

PACKAGES = {"classify": "training.tasks.classify"}
"""The packages of tasks that have another name."""
