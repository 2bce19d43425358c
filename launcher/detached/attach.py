"""`./run-ssh attach RUN`: print the output of a detached run from its first line to its last."""

from __future__ import annotations

import queue
import signal
import sys
import threading
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples
from rackrun.commands import called
from rackrun.errors import Problem
from rackrun.launcher.detached.entries import Beat, Entry, EntryReader, Failed, Last, Wrote
from rackrun.launcher.detached.locate import ReachedRun, RunOptions, reached
from rackrun.launcher.detached.replay import Replay
from rackrun.launcher.detached.results import bring_here
from rackrun.launcher.errors import HostLost
from rackrun.launcher.lifecycle.session import open_screen
from rackrun.launcher.output.console import say
from rackrun.runs import Run
from rackrun.shapes import Misshapen
from rackrun.signals import interruptible
from rackrun.terminal import one_line

QUEUED_ENTRIES = 256
TURN_SECONDS = 0.1
SILENT_SECONDS = 60.0  # the host sends a sign of life every few seconds


@dataclass(frozen=True)
class AttachOptions(RunOptions):
    """Print all output of a detached run, and follow it; Ctrl-C detaches."""

    examples: ClassVar[Examples] = (
        ("{prog} 3fa8", "the run whose ID begins so"),
        ("{prog} --plain catdog", "the newest of this name, without the dashboard"),
    )

    runs: str = ""
    """Folder for the results (default: the one of the launch, or runs)."""
    plain: bool = False
    """Print plain lines instead of the dashboard."""


def attach(run: Run, options: AttachOptions) -> int:
    """Show the run from its beginning until its end, or until Ctrl-C."""
    with reached(run, options) as reached_run, interruptible():
        fetch = partial(bring_here, reached_run, Path(options.runs or reached_run.runs))
        try:
            with Replay(open_screen, options.plain, fetch, reached_run.resume) as replay:
                watch(reached_run, replay, follow=True)
        except KeyboardInterrupt as interrupt:
            say("detached, the run continues")
            see, end = (f"{called(verb)} {reached_run.id}" for verb in ("attach", "stop"))
            say(f"to see it: {see}; to end it: {end}")
            return int(interrupt.args[0]) if interrupt.args else 0
        return _exit_code(reached_run, replay)


def _exit_code(run: ReachedRun, replay: Replay) -> int:
    if replay.closed:
        return 128 + signal.SIGPIPE
    if replay.code is None:  # the record ends without the result of the run
        say(f"the controller on {run.host.label} is gone, and its hosts have ended the run")
        say(f"what is left: {called('status')} {run.id}")
        return HostLost.exit_code
    if replay.error:
        sys.stderr.write(f"error: {replay.error}\n")
    return replay.code


def watch(run: ReachedRun, replay: Replay, follow: bool) -> None:
    """Feed the entries of a record to a replay, until there are no more or its reader has gone.

    `follow`: until the run ends. Raises HostLost when the connection breaks, the host is silent, or
    its controller was stopped.
    """
    entries: queue.Queue[tuple[Entry, bytes]] = queue.Queue(QUEUED_ENTRIES)
    reader = partial(_read_entries, run, follow, entries)
    threading.Thread(target=reader, daemon=True).start()
    silent_turns = 0  # counted: no host is to be called silent for a time in which we were stopped
    while not replay.closed:
        try:
            entry, data = entries.get(timeout=TURN_SECONDS)
        except queue.Empty:
            silent_turns += 1
            if silent_turns * TURN_SECONDS > SILENT_SECONDS:
                raise _lost(run, f"has sent nothing for {SILENT_SECONDS:.0f} s") from None
            replay.wait()
            continue
        silent_turns = 0
        if isinstance(entry, Last):
            return
        if isinstance(entry, Failed):
            raise _lost(run, entry.why)
        if isinstance(entry, Beat):
            if pid := entry.beat:
                stopped = f"{run.host.label}: its controller (process {pid}) was stopped"
                hint = f"resume it there: kill -CONT {pid}"
                raise HostLost(f"{stopped}; {hint}; or end the run: {called('stop')} {run.id}")
            continue
        replay.take(entry, data)


def _lost(run: ReachedRun, why: str) -> HostLost:
    hint = f"the run continues; to see it: {called('attach')} {run.id}"
    return HostLost(f"{run.host.label}: {why}; {hint}")


def _read_entries(run: ReachedRun, follow: bool, entries: queue.Queue[tuple[Entry, bytes]]) -> None:
    # On a thread of its own, so that the dashboard is redrawn while no entry arrives. The queue is
    # bounded: a slow terminal holds up this follower and its connection, but never the run.
    reader = EntryReader()
    try:
        message = run.client.call("follow", run=run.id, on=follow)
        while True:
            entry = reader.entry(message)
            size = entry.output[3] if isinstance(entry, Wrote) else 0
            entries.put((entry, b"".join(run.client.receive(size))))
            if isinstance(entry, Last):
                return
            message = run.client.reply()
    except Problem:
        entries.put((Failed("the connection broke"), b""))
    except Misshapen as error:
        entries.put((Failed(f"its answer is not the record of a run: {one_line(str(error))}"), b""))
