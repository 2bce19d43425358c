"""Runs that were started from this machine: a file for each, with its hosts and its command."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

from launcher.output.log_files import write_json
from launcher.run.hosts import Host
from rackrun.atomic import translated_os_errors
from rackrun.errors import SaveError, UsageError
from rackrun.shapes import AtMost, Misshapen, parsed_file

KNOWN = Path("~/.rackrun/known")
KEPT_SECONDS = 90 * 86400.0  # since the run was last asked for
MOST_BYTES = 1 << 26
MOST_HOSTS = 100_000
CALLED = re.compile(r"[A-Za-z0-9._-]{1,255}")
"""What a run may be called by: its id, the start of it, or its name."""


@dataclass(frozen=True)
class KnownRun:
    """What was written down here about a run."""

    hosts: Annotated[tuple[Host, ...], AtMost(MOST_HOSTS)]
    ssh_config: str = ""
    runs: str = "runs"
    """The folder here for its results."""
    name: str = ""
    task: str = ""
    at: float = 0.0
    """When it was started."""
    resume: tuple[str, ...] = ()
    """The command that continues it, but for the name of its folder at the end."""
    settings: Annotated[str, AtMost(MOST_BYTES)] = ""
    """Its settings file: what `rerun` obeys comes from here, and from no host."""


def remember(
    run: str,
    hosts: Sequence[Host],
    runs: Path,
    config: str,
    name: str = "",
    task: str = "",
    resume: tuple[str, ...] = (),
    settings: str = "",
) -> str:
    """Write down where a run is; return why that failed, which costs only this convenience."""
    known = KnownRun(
        hosts=tuple(hosts),
        ssh_config=str(Path(config).resolve()) if config else "",
        runs=str(runs.resolve()),
        name=name,
        task=task,
        at=time.time(),
        resume=resume,
        settings=settings,
    )
    path = _path_of(run)
    try:
        with translated_os_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_old(path.parent)
        write_json(path, asdict(known), mode=0o600)  # has --env values
    except SaveError as error:
        return f"{error}; later name the hosts: --hosts FILE"
    return ""


def forget(run: str) -> None:
    """Remove what was written down about a run, of which nothing is left on its hosts."""
    with suppress(OSError):
        _path_of(run).unlink()


def recall(run: str) -> tuple[str, KnownRun | None]:
    """Return the whole id, and what was written down here about the run, if anything.

    Of several runs of one name on the same hosts, the hosts choose: they know which one is running.
    """
    known = known_runs()
    found = {key: told for key, told in known.items() if key.startswith(run)}
    found = found or {key: told for key, told in known.items() if told.name == run}
    if not found:
        return run, None
    newest = max(found, key=lambda key: found[key].at)
    if len(found) > 1 and not _are_namesakes(run, list(found.values())):
        names = ", ".join(f"{key} ({told.name})" for key, told in sorted(found.items()))
        raise UsageError(f"several runs are called {run}: {names}; type more of the id")
    with suppress(OSError):
        _path_of(newest).touch()  # still in use: `_forget_old` goes by this time
    return newest if len(found) == 1 else run, found[newest]


def known_runs() -> dict[str, KnownRun]:
    """Return what was written down here, by the ids of the runs."""
    found = {}
    for path in KNOWN.expanduser().glob("*.json"):
        with suppress(OSError, Misshapen):
            known = parsed_file(path, KnownRun, MOST_BYTES)
            found[path.stem] = known if known.at else replace(known, at=path.stat().st_mtime)
    return found


def _are_namesakes(name: str, runs: Sequence[KnownRun]) -> bool:
    """Return True for runs of this name that were started on the same hosts."""
    return all(run.name == name and run.hosts == runs[0].hosts for run in runs)


def _path_of(run: str) -> Path:
    return KNOWN.expanduser() / f"{run}.json"


def _forget_old(folder: Path) -> None:
    """Remove what has not been asked for in three months: a run may last that long."""
    for path in folder.glob("*.json"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)
