"""Serve a folder of shards over HTTP, in the foreground: python -m rackrun.nginx SHARDS"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn

from rackrun.commandline import removed
from rackrun.commandline.options import Examples
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.terminal import clean_lines

TICK_SECONDS = 0.5


@dataclass(frozen=True)
class Serve(Site):
    """Serve a folder of shards over HTTP, read-only; Ctrl-C ends it."""

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "serve to this machine"),
        ("{prog} data/shards --address 10.0.0.5", "to a network"),
        ("{prog} data/shards --native --include tls.conf", "with your own nginx directives"),
    )


def main(args: list[str]) -> NoReturn:
    """Serve until a signal comes; a Problem if nginx ends before."""
    with serving(read(args)) as server:
        print(clean_lines(f"{server.announcement}; Ctrl-C ends it"), flush=True)
        while server.alive:
            time.sleep(TICK_SECONDS)
        raise Problem(f"nginx at {server.url} has ended: {server.last_words}")


def read(args: list[str]) -> Serve:
    """Return the settings that the arguments give."""
    command = f"serve {args[0]}" if args else ""
    if command in removed.COMMANDS and not Path(args[0]).exists():
        raise UsageError(f"{command}: no longer a command; {removed.COMMANDS[command]}")
    return parse(Serve, called("serve"), args)


if __name__ == "__main__":
    run(main)
