"""`python -m launcher local|ssh|node|ray ...`: the launcher's commands, called by their module."""

import sys

from rackrun.__main__ import command

SCRIPT = "./run-"
"""Messages then call commands as a checkout without an environment does."""


def _script_of(name: str) -> str:
    """Return the script of a command; an option such as --help as it is."""
    return name if name.startswith("-") else f"{SCRIPT}{name}"


if __name__ == "__main__":
    command([*map(_script_of, sys.argv[1:2]), *sys.argv[2:]])
