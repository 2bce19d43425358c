"""The program on a host: it carries out orders from standard input, the last of which may be a run.

Every order of the launcher starts or meets this one program. So the process that has looked at a
host goes on as the agent of the run, with its locks: a host starts one Python for both.
"""

from __future__ import annotations

import os
import signal

from rackrun.launcher.remote import network, probe, results, run_processes, service, upload
from rackrun.launcher.remote.agent import agent
from rackrun.launcher.remote.locks import release

SILENT_SECONDS = 600  # a launcher that lost its network leaves an SSH session that never ends

ORDERS = {**probe.ORDERS, **upload.ORDERS, **results.ORDERS, **run_processes.ORDERS}


def serve() -> None:
    """Answer orders until standard input ends, or until one is for an agent, and carry that out."""
    os.chdir("/")  # an interpreter started in a user's folder might import modules from there
    signal.signal(signal.SIGALRM, _leave)
    service.announce()
    try:
        order = service.answer_orders(ORDERS, SILENT_SECONDS)
        if order:
            network.release_port()  # to torchrun
            agent.carry_out(order)
    finally:
        release()  # also where a launcher that was killed takes no reply any more


def _leave(*reason: object) -> None:
    release()
    os._exit(1)  # in the middle of a read, which a signal handler that returns would resume
