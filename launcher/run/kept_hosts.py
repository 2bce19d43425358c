"""hosts.json in a run's folder: its hosts, kept for whoever has to reach them again."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from rackrun.launcher.run.hosts import Host
from rackrun.run_files import MOST_BYTES
from rackrun.run_folder import RunFolder
from rackrun.shapes import Misshapen, Shape, parsed_file


class KeptHosts(Shape, frozen=True):
    """The hosts of a run, and the ssh_config by which they were reached; empty: the user's own."""

    hosts: tuple[Host, ...]
    ssh_config: str = ""


def hosts_text(hosts: Sequence[Host], ssh_config: str) -> str:
    """Return hosts.json for hosts that were reached by this ssh_config, or by the user's own."""
    config = str(Path(ssh_config).resolve()) if ssh_config else ""
    content = {"hosts": list(map(asdict, hosts)), "ssh_config": config}
    return f"{json.dumps(content, indent=2)}\n"


def hosts_in(folder: RunFolder) -> KeptHosts | None:
    """Return what a run's folder has of its hosts; None without a sound file of this account's."""
    with suppress(OSError, Misshapen):
        if folder.hosts.stat().st_uid == os.getuid():  # an ssh_config may name programs to run
            return parsed_file(folder.hosts, KeptHosts, MOST_BYTES)
    return None
