"""This machine as a host: the port at which its ranks meet."""

import subprocess
import sys

from tests.lab.needs import need

CROWDED = """
import os, socket, subprocess
from rackrun.launcher.transport.local import free_port
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40003")
held = [socket.socket() for _ in range(3)]
for number, one in enumerate(held):
    one.bind(("127.0.0.9", 40000 + number))
print(*{free_port() for _ in range(20)})
"""
"""In a network namespace with four ports for all programs, of which one is free."""


def test_a_free_port_is_free_at_every_address():
    """torchrun listens on all addresses: a port that another one has would end it at once."""
    need("root")
    python = [sys.executable, "-c", CROWDED]
    shown = subprocess.run(["unshare", "--net", *python], capture_output=True, text=True)
    assert shown.stdout == "40003\n", shown.stderr
