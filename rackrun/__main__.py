"""`rackrun COMMAND ...`, as pip's script, as `python -m rackrun`, and as `./run-ssh` starts it."""

import signal

if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    # Until the imports are done, Ctrl-C ends this process without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import sys
from collections.abc import Sequence
from typing import NoReturn

from rackrun.cli.dispatch import run
from rackrun.commandline.program import leave, outcome
from rackrun.terminal import clean_lines


def command(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that these arguments name, by default those typed; exit with its code."""
    # Lines stay lines: a launch names each host that failed in one of its own.
    code = outcome(run, sys.argv[1:] if args is None else args, clean_lines)
    if "torch" in sys.modules:
        leave(code)
    sys.exit(code)


if __name__ == "__main__":
    command()
