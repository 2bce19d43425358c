"""Entries of a run, and answers of its hosts: fuzz targets, one for each decoder."""

import contextlib
import functools
import os
from pathlib import Path
from typing import Any

from rackrun.launcher.output.console import PlainOutput
from rackrun.launcher.output.merge import LogMerger
from rackrun.launcher.output.nonblocking import NonBlockingWriter
from rackrun.launcher.remote import files, run_processes
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan
from rackrun.launcher.viewer.entries import EntryReader
from rackrun.launcher.viewer.replay import Replay
from rackrun.launcher.viewer.replies import RunFacts, RunListing
from rackrun.shapes import Misshapen, parsed_json, shaped

MOST_BYTES = 1 << 20


@functools.cache
def discarding() -> NonBlockingWriter:
    """Return a writer whose output is discarded."""
    return NonBlockingWriter(os.open(os.devnull, os.O_WRONLY))


class Quiet(PlainOutput):
    """An observer that draws everything and shows nothing."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.out = self.stderr = discarding()
        self.merger = LogMerger(fold=plan.world_size > 1)
        self.progress_at = 0.0


def screen(job: Job, plan: Plan, plain: bool) -> Quiet:
    return Quiet(plan)


def fuzz_record(data: bytes) -> None:
    """Fuzz the lines of a record, as far as they make sense, shown as `attach` shows them."""
    reader = EntryReader()
    with contextlib.suppress(Misshapen), Replay(screen, True) as replay:
        for line in data.split(b"\n"):
            message = shaped(parsed_json(line, MOST_BYTES), dict[str, Any])  # as conversations do
            replay.take(reader.entry(message), b"some\nbytes")


def fuzz_found(data: bytes) -> None:
    """Fuzz the facts of a folder about a run."""
    decode(data, RunFacts)


def fuzz_listing(data: bytes) -> None:
    """Fuzz the list of a run's processes on a host."""
    decode(data, RunListing)


def decode(data: bytes, shape: type[Any]) -> None:
    with contextlib.suppress(Misshapen):
        shaped(parsed_json(data, MOST_BYTES), shape, "answer")


def fuzz_agent_pid(data: bytes) -> None:
    """Fuzz the file that identifies an agent, in a private folder of this account."""
    run = os.urandom(16).hex()
    folder = Path(f"/tmp/rackrun-{run}-0")
    folder.mkdir(0o700)
    try:
        (folder / "agent.pid").write_bytes(data)
        for identity in files.identities_in(str(folder)):
            assert all(type(number) is int for number in identity)
        assert len(run_processes.agents_of(run)) <= 1
    finally:
        (folder / "agent.pid").unlink()
        folder.rmdir()
