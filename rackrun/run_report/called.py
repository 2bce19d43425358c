"""Where a run is meant: by its folder, by its name, or by the start of its id."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from rackrun.errors import UsageError
from rackrun.shapes import Misshapen, parsed_file

RUNS = Path("runs")
MOST_BYTES = 1 << 26  # of a plan, which names every host
_RUN = re.compile(r"[0-9]{8}-[0-9]{6}-(?P<name>[A-Za-z0-9._-]{1,239})")
_CALLED = re.compile(r"[A-Za-z0-9._-]{1,255}")


def run_called(word: str | os.PathLike[str], runs: Path = RUNS) -> Path:
    """Return the folder of the run of this name or start of an id; any other word as a path.

    Raises UsageError where several runs are meant.
    """
    path = Path(word)
    if path.exists() or not _CALLED.fullmatch(str(word)):
        return path
    found = list(_runs(runs))
    meant = [folder for folder, _, run in found if run.startswith(str(word))]
    meant = meant or [folder for folder, name, _ in found if name == str(word)]
    if len(meant) > 1:
        folders = ", ".join(map(str, meant))
        raise UsageError(f"several runs are called {word}: {folders}; type the folder of one")
    return meant[0] if meant else path


def _runs(runs: Path) -> Iterator[tuple[Path, str, str]]:
    """Yield folder, name and id of the runs in a folder, the newest first."""
    for folder in sorted(runs.glob("[0-9]*-[0-9]*-*"), reverse=True):
        if match := _RUN.fullmatch(folder.name):
            yield folder, match["name"], _id_of(folder / "plan.json")


def _id_of(plan: Path) -> str:
    with suppress(OSError, Misshapen):
        found = parsed_file(plan, dict[str, Any], MOST_BYTES).get("run_id")
        return found if isinstance(found, str) else ""
    return ""
