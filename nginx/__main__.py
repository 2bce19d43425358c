"""Serve a folder of shards over HTTP.

python -m rackrun.nginx SHARDS             serve in the foreground; Ctrl-C ends it
python -m rackrun.nginx SHARDS --detach    serve until stopped
python -m rackrun.nginx status             what this user serves
python -m rackrun.nginx stop [SHARDS]      end the servers of a folder, or all of this user's
"""

import json
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, TypeVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.commands import called
from rackrun.errors import Problem, UsageError
from rackrun.nginx.serve import NginxServer, servers, serving, start, stop
from rackrun.nginx.site import Site
from rackrun.terminal import clean_lines
from rackrun.units import plural

TICK_SECONDS = 0.5

Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Serve(Site):
    """Serve a folder of shards over HTTP, read-only.

    In place of FOLDER, `status` lists the servers that you run, and `stop [FOLDER]` ends them.
    """

    examples: ClassVar[Examples] = (
        ("{prog} data/shards", "serve to this machine; Ctrl-C ends it"),
        ("{prog} data/shards --address 10.0.0.5 --detach", "to a network, until it is stopped"),
        ("{prog} status", "what you serve"),
        ("{prog} stop data/shards", "end it"),
    )

    detach: bool = False
    """Return when the server is ready; it runs until it is stopped."""


@dataclass(frozen=True)
class Status:
    """List the servers that this user runs."""

    examples: ClassVar[Examples] = (("{prog}", "one line for each server"),)

    json: bool = False
    """Print JSON: a list with folder, url, container, pid and since (seconds since 1970)."""


@dataclass(frozen=True)
class StopCommand:
    """Stop the servers that this user runs."""

    examples: ClassVar[Examples] = (
        ("{prog}", "end all"),
        ("{prog} data/shards", "end the servers of a folder"),
    )

    folder: Positional[Path | None] = None
    """Stop only the servers of this folder."""
    port: int = 0
    """Stop only the server on this port; 0: any port."""


def main(args: list[str]) -> int:
    """Run the command that the arguments name; return its exit code."""
    if args[:1] == ["status"]:
        return _show_status(_read(Status, "status", args[1:]))
    if args[:1] == ["stop"]:
        return _stop_servers(_read(StopCommand, "stop", args[1:]))
    settings = _read(Serve, "", args)
    return detach(settings) if settings.detach else serve(settings)


def _read(settings: type[Settings], verb: str, args: list[str]) -> Settings:
    prog = f"{called('serve')} {verb}".rstrip()
    return parse(settings, prog, args)


def serve(settings: Serve) -> int:
    """Serve until a signal comes, with a live line on a terminal."""
    with serving(settings) as server:
        say(server.announcement + "; Ctrl-C ends it")
        try:
            watch(server)
        finally:
            say(f"\nserved {totals(server)}")
    return 0


def watch(server: NginxServer) -> NoReturn:
    """Draw the traffic until nginx ends, which is an error, or a signal comes."""
    live = sys.stdout.isatty()
    while server.alive:
        before = server.traffic.bytes
        time.sleep(TICK_SECONDS)
        server.traffic.update()
        rate = (server.traffic.bytes - before) / TICK_SECONDS
        if live:
            sys.stdout.write(f"\r\x1b[K{totals(server)}, now {rate / 1e6:.0f} MB/s")
            sys.stdout.flush()
    raise Problem(f"nginx at {server.url} has ended unexpectedly; see its last output above")


def totals(server: NginxServer) -> str:
    """Return the requests, bytes and clients so far."""
    traffic = server.traffic
    requests, clients = plural(traffic.requests, "request"), plural(len(traffic.clients), "client")
    return f"{requests}, {traffic.bytes / 1e6:,.0f} MB, {clients}"


def detach(settings: Serve) -> int:
    """Start a server that outlives this command."""
    server = start(settings, detach=True)
    say(server.announcement)
    folder, port = shlex.quote(server.record.folder), server.site.port
    say(f"to end it, type: {called('serve')} stop {folder} --port {port}")
    return 0


def _show_status(settings: Status) -> int:
    if settings.json:
        say(json.dumps([record.plain for record in servers()], indent=2))
        return 0
    for record in servers():
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.since))
        say(f"{record.url}  {record.folder}  ({record.runs_as}, since {since})")
    return 0


def _stop_servers(settings: StopCommand) -> int:
    folder = str(settings.folder.resolve()) if settings.folder else None
    meant = [
        record
        for record in servers()
        if folder in (None, record.folder)
        and (not settings.port or record.url.endswith(f":{settings.port}/"))
    ]
    if not meant:
        raise UsageError(f"no such server; to see all, type: {called('serve')} status")
    for record in meant:
        stop(record)
        say(f"ended {record.url}")
    return 0


def say(line: str) -> None:
    """Print a line at once."""
    print(clean_lines(line), flush=True)


if __name__ == "__main__":
    run(main)
