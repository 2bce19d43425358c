"""Names that several packages must agree on, each written once. Standard library only."""

MANIFEST_NAME = "dataset.json"
"""Written last into a folder of shards: one that has it is complete."""

PLATFORM = ("rackrun", "launcher", "shards", "convert", "nginx", "training")
"""The packages that every task shares."""

RETURNED = "returned"
"""The folder in a run folder with what a function returned: a file rank-N.json of each rank."""

MOST_RETURNED = 1_000_000
"""Bytes of such a file."""

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
