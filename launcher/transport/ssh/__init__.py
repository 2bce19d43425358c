"""Hosts behind SSH as places to start programs: the only package that knows Fabric and paramiko.

    hosts -> routes (ssh_config, gateways, known keys) -> connections, all at once -> machines

Fabric resolves the configuration and logs in. What it leaves to chance is settled here: host keys
are held against known_hosts before anything is sent, every step has a time limit, a gateway is
one connection however many hosts are behind it, and programs talk over plain channels.
"""

import logging

from launcher.transport.ssh.machine import Machine
from launcher.transport.ssh.network import Network
from launcher.transport.ssh.route import ConnectSettings

__all__ = ["ConnectSettings", "Machine", "Network"]

logging.getLogger("paramiko").addHandler(logging.NullHandler())  # we say it ourselves, once
