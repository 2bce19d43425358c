"""Common ground of every package, the `rackrun` command, and what programs may import from here."""

from importlib import import_module

__version__ = "0.1.0"

PUBLIC = {
    "launch": "rackrun.launcher",
    "load_model": "rackrun.training.trained:load_of_any_task",
    "report": "rackrun.reports",
    "open_source": "rackrun.shards.open",
    "samples": "rackrun.shards.samples",
}
"""Name -> module that has it, imported when it is first asked for; after `:` its name there.

Type checkers find them in `__init__.pyi`.
"""


def __getattr__(name: str) -> object:
    """Return a public function of another package; raise AttributeError for any other name."""
    if name not in PUBLIC:
        raise AttributeError(f"module 'rackrun' has no attribute {name!r}")
    module, _, original = PUBLIC[name].partition(":")
    return getattr(import_module(module), original or name)


def __dir__() -> list[str]:
    """Return the public names, for completion in a notebook."""
    return sorted({*globals(), *PUBLIC})
