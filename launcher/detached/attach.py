"""`./run-ssh attach RUN-ID`: show a detached run from its first line to its last."""

from __future__ import annotations

import fcntl
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from launcher.conversation import FOR_EVER
from launcher.detached.record import Entry, plan_of
from launcher.detached.replay import Replay
from launcher.detached.there import RunOptions, There, reached, talk_to
from launcher.errors import HostLost, LauncherError
from launcher.fetch import fetch_results
from launcher.screen import say
from launcher.session import open_screen
from rackrun.terminal import one_line

QUEUED_ENTRIES = 256
TURN_SECONDS = 0.1


@dataclass(frozen=True)
class AttachOptions(RunOptions):
    """Options of `./run-ssh attach`."""

    runs: str = ""
    """Folder for the results; by default that of the start, or runs."""
    plain: bool = False
    """Plain lines instead of the board."""


def attach(options: AttachOptions) -> int:
    """Show the run from its beginning until its end, or until Ctrl-C."""
    with reached(options) as there, hearing_the_end():
        fetch = partial(bring_here, there, options.runs)
        try:
            with Replay(open_screen, options.plain, fetch) as replay:
                watch(there, replay, on=True)
        except KeyboardInterrupt as interrupt:
            say("detached, the run goes on")
            say(f"come back: ./run-ssh attach {there.run}; end it: ./run-ssh stop {there.run}")
            return int(interrupt.args[0]) if interrupt.args else 0
        return verdict(there, replay)


def verdict(there: There, replay: Replay) -> int:
    """The exit code of a run that was watched to its end."""
    if replay.gone:
        return 128 + signal.SIGPIPE
    if replay.code is None:
        say(f"the keeper on {there.host.label} is gone, and its hosts have ended the run")
        say(f"what is left: ./run-ssh status {there.run}")
        return HostLost.exit_code
    if replay.error:
        sys.stderr.write(f"error: {replay.error}\n")
    return replay.code


def watch(there: There, replay: Replay, on: bool) -> None:
    """Feed all entries to a replay, until there are no more, or nobody reads."""
    entries: queue.Queue[tuple[Entry, bytes]] = queue.Queue(QUEUED_ENTRIES)
    reader = partial(read_entries, there, on, entries)
    threading.Thread(target=reader, daemon=True).start()
    while not replay.gone:
        try:
            entry, data = entries.get(timeout=TURN_SECONDS)
        except queue.Empty:
            replay.wait()
            continue
        if "lost" in entry:
            hint = f"the run goes on; come back: ./run-ssh attach {there.run}"
            raise HostLost(f"{there.host.label}: {entry['lost']}; {hint}")
        if "alive" in entry:
            return
        replay.take(entry, data)


def read_entries(there: There, on: bool, entries: queue.Queue[tuple[Entry, bytes]]) -> None:
    """On a thread of its own: the entries of a record and the bytes of outputs, as they come."""
    try:
        there.talk.order("follow", run=there.run, on=on)
        entry = dict(there.talk.answer(FOR_EVER))
        while True:
            size = entry["output"][3] if "output" in entry else 0
            entries.put((entry, b"".join(there.talk.receive(size))))
            if "alive" in entry:
                return
            entry = dict(there.talk.answer(FOR_EVER))
    except LauncherError:
        entries.put(({"lost": "the connection broke"}, b""))


def bring_here(there: There, runs: str, attempt: dict[str, Any]) -> Path:
    """Copy the run folder of an attempt, logs and all but for checkpoints; our folder of it."""
    source = Path(attempt["folder"])
    target = Path(runs or there.runs).resolve() / source.name
    plan = plan_of(attempt).hosts[0]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with alone_in(target):
            if not is_same(there, source, target):
                fetch_results(there.place, plan, "", target, heavy=("checkpoints",))
    except (LauncherError, OSError) as error:
        say(f"the results are still on {there.host.label}, in {source}: {one_line(str(error))}")
        return source
    return target


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other attached launchers out of a folder meanwhile, where folders can be locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_same(there: There, source: Path, target: Path) -> bool:
    """Whether the host and we have this folder in common: it sees what we put in."""
    mark = target / f".seen-{os.getpid()}-{time.time_ns()}"
    mark.touch()
    try:
        with talk_to(there.place, there.host.python) as talk:  # the other one is following
            return bool(talk.ask("exists", path=str(source / mark.name))["exists"])
    finally:
        mark.unlink()


@contextmanager
def hearing_the_end() -> Iterator[None]:
    """TERM and HUP end what is shown as Ctrl-C does, with codes of their own."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
