"""Transport over SSH: the only package that knows Fabric and paramiko.

    hosts -> routes (ssh_config, gateways, known keys) -> connections, all at once -> machines

Fabric resolves the configuration and logs in. What it leaves to chance is settled here: host keys
are checked against known_hosts before anything is sent, every step has a time limit, all hosts
behind a gateway share one connection to it, and programs use plain channels.
"""

import logging

from rackrun.launcher.transport.ssh.machine import Machine
from rackrun.launcher.transport.ssh.network import Network, open_network
from rackrun.launcher.transport.ssh.route import ConnectSettings

__all__ = ["ConnectSettings", "Machine", "Network", "open_network"]

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # errors are reported once, by us
