"""What is known of a run, and answers of its hosts: fuzz targets, one for each decoder."""

import contextlib
import os
from pathlib import Path
from typing import Any

from rackrun.launcher.remote import files, run_processes
from rackrun.launcher.viewer.replies import RunFacts, RunListing
from rackrun.shapes import Misshapen, parsed_json, shaped

MOST_BYTES = 1 << 20


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
