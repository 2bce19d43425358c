"""Detached runs that were started from this machine: a file for each."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from launcher.output.log_files import write_json
from launcher.run.hosts import Host
from rackrun.atomic import translated_os_errors
from rackrun.errors import SaveError, UsageError

KNOWN = Path("~/.rackrun/known")
KEPT_SECONDS = 90 * 86400.0  # since anybody asked for the run


def remember(run: str, hosts: Sequence[Host], runs: Path, config: str) -> str:
    """Write down where a run is; why that could not be done, which costs only this convenience."""
    told = {
        "hosts": [vars(host) for host in hosts],
        "ssh_config": str(Path(config).resolve()) if config else "",
        "runs": str(runs.resolve()),
    }
    path = KNOWN.expanduser() / f"{run}.json"
    try:
        with translated_os_errors(path):
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _forget_old(path.parent)
        write_json(path, told)
    except SaveError as error:
        return f"{error}; later name the hosts: --hosts FILE"
    return ""


def recall(run: str) -> tuple[str, dict[str, Any]]:
    """The whole id, and what was written down here about the run; nothing on another machine."""
    known = list(KNOWN.expanduser().glob(f"{run}*.json"))
    if len(known) > 1:
        names = ", ".join(sorted(path.stem for path in known))
        raise UsageError(f"several runs begin with {run}: {names}")
    if not known:
        return run, {}
    with suppress(OSError):
        known[0].touch()  # it is of use
    return known[0].stem, dict(json.loads(known[0].read_text()))


def _forget_old(folder: Path) -> None:
    """Remove what nobody has asked for in three months: a run may last that long."""
    for path in folder.glob("*.json"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)


def host_of(told: Mapping[str, Any]) -> Host:
    """A host, from what JSON has of it."""
    return Host(**{name: as_tuples(value) for name, value in told.items()})


def as_tuples(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
