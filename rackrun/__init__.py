"""Common ground of every package, and the `rackrun` command."""

__version__ = "0.1.0"
