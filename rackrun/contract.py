"""Names that several packages must agree on, each written once. Standard library only."""

TASKS = {
    "catdog": ("demo",),
    "imagenet": (),
    "mnist": (),
}
"""What can be trained: package -> its own commands, each a module of it with `main(args)`.

A package has `recipes.py` (settings, without torch) and `model.py` (models and the `TASK`). A line
here makes it known to the launcher, to `python -m training` and to the tests.
"""
