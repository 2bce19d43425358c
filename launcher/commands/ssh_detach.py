"""`./run-ssh --detach`: start a run that goes on without this machine, and print its id."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from launcher.commands.reach import addresses
from launcher.commands.ssh_settings import SshOptions
from launcher.commands.upload import code_there
from launcher.detached.start import detach
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.serving import folder_to_serve
from launcher.output.console import say
from launcher.run.hosts import Host
from launcher.run.job import Work
from launcher.run.settings import Serving
from rackrun.errors import UsageError

if TYPE_CHECKING:
    from launcher.transport.ssh import Machine


def start_detached(
    hosts: Sequence[Host],
    places: Sequence[Machine],
    work: Work,
    settings: LaunchSettings,
    options: SshOptions,
) -> int:
    """Start the run, print its id, and return 0."""
    if options.scaling:
        raise UsageError("--scaling starts several runs, and shows them; leave out --detach")
    _refuse_serving(work, options.serving, addresses(hosts, places))
    code = code_there(hosts, places, options)
    run = detach(hosts, places, work, settings, options.ssh_config, code)
    sys.stdout.write(f"{run}\n")
    say(f"detached; to see it: ./run-ssh attach {run}")
    return 0


def _refuse_serving(work: Work, serving: Serving, addresses: Sequence[str]) -> None:
    """Refuse to serve shards from here, since this launcher does not outlive the start."""
    if folder_to_serve(work, serving, addresses) is not None:
        raise UsageError(
            "--detach: this launcher would serve the shards, and it does not stay;"
            " serve them yourself (python -m nginx --help) and give --data http://...,"
            " or type --no-serve when every host has the folder"
        )
