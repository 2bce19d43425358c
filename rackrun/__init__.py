"""Common ground of every package, and the `rackrun` command."""

from rackrun.reports import report as report

__version__ = "0.1.0"
