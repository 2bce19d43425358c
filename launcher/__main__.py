"""`python -m launcher local|ssh|node|ray ...`: the launcher's commands, called by their module."""

import sys

from rackrun.__main__ import command

SCRIPT = "./run-"
"""Messages then call commands as a checkout without an environment does."""


def _script_of(word: str) -> str:
    """Return the script of a command; an option such as --help as it is."""
    return word if word.startswith("-") else f"{SCRIPT}{word}"


if __name__ == "__main__":
    command([*map(_script_of, sys.argv[1:2]), *sys.argv[2:]])
