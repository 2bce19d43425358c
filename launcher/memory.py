"""What this machine remembers of the detached runs that were started from it: a file for each."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launcher.errors import UsageError
from launcher.hosts import Host

KNOWN = Path("~/.rackrun/known")


def remember(run: str, hosts: Sequence[Host], runs: Path, config: str) -> str:
    """Write down where a run is; why that could not be done, which costs only this convenience."""
    told = {
        "hosts": [vars(host) for host in hosts],
        "ssh_config": str(Path(config).resolve()) if config else "",
        "runs": str(runs.resolve()),
    }
    path = KNOWN.expanduser() / f"{run}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps(told))
    except OSError as error:
        return f"{path}: {error.strerror}; later name the hosts: --hosts FILE"
    return ""


def remembered(run: str) -> tuple[str, dict[str, Any]]:
    """The whole id, and what was written down here about the run; nothing on another machine."""
    known = list(KNOWN.expanduser().glob(f"{run}*.json"))
    if len(known) > 1:
        names = ", ".join(sorted(path.stem for path in known))
        raise UsageError(f"several runs begin with {run}: {names}")
    if not known:
        return run, {}
    return known[0].stem, dict(json.loads(known[0].read_text()))


def host_of(told: Mapping[str, Any]) -> Host:
    """A host, from what JSON has of it."""
    return Host(**{name: frozen(value) for name, value in told.items()})


def frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    return tuple(map(frozen, value)) if isinstance(value, list) else value
