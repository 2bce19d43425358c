"""`python -m rackrun.launcher local|ssh|node|ray ...`: the launcher's commands by their module."""

import sys

from rackrun.__main__ import command

SCRIPT = "./run-"
"""Messages then call commands as a checkout without an environment does."""


if __name__ == "__main__":
    names = [name if name.startswith("-") else f"{SCRIPT}{name}" for name in sys.argv[1:2]]
    command([*names, *sys.argv[2:]])
