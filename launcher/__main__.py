"""`python -m launcher local|ssh|node|ray ...`: the launcher's commands, called by their module."""

import sys

from rackrun.__main__ import command

SCRIPT = "./run-"
"""Messages then call commands as a checkout without an environment does."""

if __name__ == "__main__":
    command([f"{SCRIPT}{word}" for word in sys.argv[1:2]] + sys.argv[2:])
