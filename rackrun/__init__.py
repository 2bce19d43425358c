"""Common ground of every package, the `rackrun` command, and what programs may import from here."""

from importlib import import_module

__version__ = "0.1.0"

PUBLIC = {
    "Config": "rackrun.training.config",
    "ExactSampler": "rackrun.training.data.sampler",
    "Problem": "rackrun.errors",
    "RunFolder": "rackrun.run_folder",
    "Site": "rackrun.nginx.site",
    "Task": "rackrun.training.task",
    "Transforms": "rackrun.training.data.transforms",
    "augmented": "rackrun.training.data.transforms",
    "launch": "rackrun.launcher",
    "load_checkpoint": "rackrun.training.from_python",
    "load_model": "rackrun.training.trained:load_of_any_task",
    "open_source": "rackrun.shards.open",
    "report": "rackrun.reports",
    "samples": "rackrun.shards.samples",
    "serving": "rackrun.nginx.serve",
    "train": "rackrun.training.from_python",
}
"""Name -> module that has it, imported when it is first asked for; after `:` its name there.

Type checkers find them in `__init__.pyi`, users in docs/reference/api.md: these stay, all else may
change.
"""


def __getattr__(name: str) -> object:
    """Return what another package makes public; raise AttributeError for any other name."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'rackrun' has no attribute {name!r}")
    module, _, original = PUBLIC[name].partition(":")
    return getattr(import_module(module), original or name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook."""
    return sorted({*globals(), *PUBLIC})
