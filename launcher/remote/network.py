"""The network of a host: its addresses, its route to the master, and the master's port.

That port, of the rendezvous, is tried from the other hosts before the run:

    listen   on the first host: hold a free port, and take every call
    route    on all: call it
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import socket
import struct
import threading
from typing import Any

SIOCGIFCONF = 0x8912
IFREQ_BYTES = 40  # struct ifreq on 64 bits: an interface's name and address

CONNECT_SECONDS = 5.0

LISTENERS: list[tuple[socket.socket, threading.Thread]] = []
"""What `listen` has opened, and the thread that takes calls there."""


def route(address: str, master: str = "", port: int = 0) -> dict[str, Any]:
    """Return the device and address from which this host reaches an address or name, and that.

    Also why the port of the master cannot be reached, if one is given.
    """
    with socket.socket(family_of(address), socket.SOCK_DGRAM) as sock:
        sock.connect((address, 9))  # of a datagram socket: sends nothing, only finds the route
        own_address, master_address = sock.getsockname()[0], sock.getpeername()[0]
    unreached = ""
    if port:
        try:
            socket.create_connection((master, port), CONNECT_SECONDS).close()
        except OSError as error:
            unreached = error.strerror or str(error)
    return {
        "address": own_address,
        "interface": interface_of(own_address),
        "master": master_address,
        "unreached": unreached,
    }


def family_of(address: str) -> socket.AddressFamily:
    """Return IPv6 for such an address, and for a name that has no other; else IPv4."""
    families = {socket.AF_INET6} if ":" in address else set()
    with contextlib.suppress(OSError):  # a name that is not known fails where it is used
        families = families or {info[0] for info in socket.getaddrinfo(address, None)}
    return socket.AF_INET6 if families == {socket.AF_INET6} else socket.AF_INET


def address_of(interface: str) -> tuple[str, str]:
    """Return the first address of a device, and why there is none."""
    matching = [address for address, name in addresses() if name == interface]
    if matching:
        return matching[0], ""
    names = ", ".join(sorted({name for _, name in addresses()}))  # what could be typed instead
    return "", f"there is no device {interface} with an address; there are: {names}"


def interface_of(address: str) -> str:
    """Return the name of the device that has this address; empty when none has."""
    if address.startswith("127."):
        return "lo"
    return dict(addresses()).get(address, "")


def addresses() -> list[tuple[str, str]]:
    """Return every address of this host, with its device."""
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


# -- the master's port


def listen(address: str, port: int) -> dict[str, Any]:
    """Listen on a port that is free here, for all hosts to try, until `release_port`."""
    release_port()  # the one of an earlier look
    listener = socket.socket(family_of(address), socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(("", port))
    except OSError as error:
        listener.close()
        return {"error": f"port {port}: {error.strerror}"}
    listener.listen(1024)
    thread = threading.Thread(target=_take_calls, args=(listener,), daemon=True)
    thread.start()
    LISTENERS.append((listener, thread))
    return {"port": listener.getsockname()[1]}


def release_port() -> None:
    """Stop listening: the port is now free for torchrun."""
    while LISTENERS:
        listener, thread = LISTENERS.pop()
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        thread.join(CONNECT_SECONDS)
        listener.close()


def _take_calls(listener: socket.socket) -> None:
    """Take every call until the listener is shut down: the kernel keeps only some in line.

    They are kept till then. The side that closes first keeps its port in TIME_WAIT, and torchrun is
    to bind this one soon.
    """
    with contextlib.suppress(OSError), contextlib.ExitStack() as calls:
        while True:
            calls.enter_context(listener.accept()[0])
