"""The network devices and addresses of a host, and its route to another one."""

from __future__ import annotations

import fcntl
import os
import socket
import struct

TYPE_CHECKING = False  # programs for hosts start sooner without typing
if TYPE_CHECKING:
    from typing import Any

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40  # struct ifreq on 64 bits: an interface's name and address


def route(address: str) -> dict[str, Any]:
    """Return the device and address from which this host reaches an address or name, and that."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # of a datagram socket: sends nothing, only finds the route
        ours, theirs = sock.getsockname()[0], sock.getpeername()[0]
    return {"address": ours, "interface": interface_of(ours), "master": theirs}


def address_of(interface: str) -> dict[str, Any]:
    """Return the first address of a device."""
    matching = [address for address, name in addresses() if name == interface]
    if matching:
        return {"address": matching[0]}
    names = ", ".join(sorted({name for _, name in addresses()}))
    return {"error": f"there is no device {interface} with an address; there are: {names}"}


def interface_of(address: str) -> str:
    """Return the name of the device that has this address; empty when none has."""
    if address.startswith("127."):
        return "lo"
    return dict(addresses()).get(address, "")


def addresses() -> list[tuple[str, str]]:
    """Return every address of this host, with its device."""
    import array

    room = array.array("B", bytes(256 * IFREQ_BYTES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        request = struct.pack("iP", len(room), room.buffer_info()[0])
        length = struct.unpack("iP", fcntl.ioctl(sock, SIOCGIFCONF, request))[0]
    pairs = []
    for start in range(0, length, IFREQ_BYTES):
        entry = room[start : start + IFREQ_BYTES].tobytes()
        name = entry[:16].split(b"\0")[0].decode().split(":")[0]  # eth0:1 is an alias on eth0
        pairs.append((socket.inet_ntoa(entry[20:24]), name))
    if os.path.exists("/proc/net/if_inet6"):
        with open("/proc/net/if_inet6") as file:
            for line in file:
                packed, *_, name = line.split()
                pairs.append((socket.inet_ntop(socket.AF_INET6, bytes.fromhex(packed)), name))
    return pairs
