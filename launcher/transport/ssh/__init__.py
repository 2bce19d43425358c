"""Transport over SSH: the only package that knows paramiko.

    hosts -> routes (ssh_config, gateways, known keys) -> connections, all at once -> machines

paramiko speaks the protocol. What it leaves to chance is settled here: host keys are checked
against known_hosts before anything is sent, every step has a time limit, all hosts behind a gateway
share one connection to it, and programs use plain channels.
"""

import logging
import sys

if "invoke" not in sys.modules:
    # For `Match exec`, which `lookup` runs itself, paramiko would import 127 modules of it: a sixth
    # of what a launch imports.
    sys.modules["invoke"] = None  # type: ignore[assignment]
    import paramiko  # noqa: F401

    del sys.modules["invoke"]

from launcher.transport.ssh.machine import Machine
from launcher.transport.ssh.network import Network
from launcher.transport.ssh.route import ConnectSettings

__all__ = ["ConnectSettings", "Machine", "Network"]

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # errors are reported once, by us
