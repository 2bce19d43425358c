"""The records of runs on hosts that this machine started: a file for each, with its hosts."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rackrun import runs
from rackrun.atomic import translated_os_errors
from rackrun.errors import SaveError
from rackrun.launcher.output.log_files import write_json
from rackrun.launcher.run.hosts import Host
from rackrun.runs import LaunchRecord
from rackrun.shapes import Misshapen, shaped

KEPT_SECONDS = 90 * 86400.0  # since the run was last asked for


def remember(
    run: str,
    hosts: Sequence[Host],
    results: Path,
    config: str,
    name: str = "",
    task: str = "",
) -> str:
    """Record the hosts of a run; return why that failed: its hosts will have to be typed."""
    record = LaunchRecord(
        hosts=tuple(asdict(host) for host in hosts),
        ssh_config=str(Path(config).resolve()) if config else "",
        runs=str(results.resolve()),
        name=name,
        task=task,
        at=time.time(),
    )
    path = _path_of(run)
    try:
        with translated_os_errors(path):
            runs.make_private(path.parent)
            _forget_old(path.parent)
        write_json(path, asdict(record), mode=0o600)
    except SaveError as error:
        return f"{error}; later name the hosts: --hosts FILE"
    return ""


def forget(run: str) -> None:
    """Remove the record of a run of which nothing is left on its hosts."""
    with suppress(OSError):
        _path_of(run).unlink()


def keep(run: str) -> None:
    """Keep the record of a run that is still asked for from expiring."""
    with suppress(OSError):
        os.utime(_path_of(run))  # `_forget_old` goes by this time


def hosts_of(record: LaunchRecord) -> tuple[Host, ...]:
    """Return the hosts of a record; none if it is damaged."""
    with suppress(Misshapen):
        hosts: tuple[Host, ...] = shaped(list(record.hosts), tuple[Host, ...], "hosts")
        return hosts
    return ()


def _path_of(run: str) -> Path:
    return runs.RECORDS.expanduser() / f"{run}.json"


def _forget_old(folder: Path) -> None:
    for path in folder.glob("*.json"):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            path.unlink(missing_ok=True)
