"""Transport on this machine: a child process, with a socket for both directions."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from typing import IO

from rackrun.launcher.errors import HostLost, HostUnreachable

READ_BYTES = 1 << 18
COMPLAINT_BYTES = 4096
SEND_SECONDS = 1
LAST_SECONDS = 30.0  # for an agent to exit once its stream has ended


class LocalTransport:
    """This machine, under any name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def open(self, argv: Sequence[str]) -> LocalChannel:
        """Start a program in a session of its own, so that Ctrl-C does not reach it.

        Here `python3` is the one that runs the launcher, whatever PATH has.
        """
        program, *args = argv
        # A socket and not two pipes: one end of file tells the agent that we are gone, even if a
        # child of ours has inherited the other direction.
        ours, theirs = socket.socketpair()
        complaints = tempfile.TemporaryFile()  # noqa: SIM115 - the channel closes it
        try:
            process = subprocess.Popen(
                [sys.executable if program == "python3" else program, *args],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=complaints,
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            complaints.close()
            reason = f"cannot start {argv[0]}: {error.strerror}"
            raise HostUnreachable(f"{self.name}: {reason}") from error
        finally:
            theirs.close()
        return LocalChannel(process, ours, complaints)


class LocalChannel:
    """A program on this machine, whose standard input and output are the other end of a socket."""

    def __init__(
        self, process: subprocess.Popen[bytes], stream: socket.socket, complaints: IO[bytes]
    ) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_SECONDS, 0))
        self.process = process
        self.stream = stream
        self.complaints = complaints
        self.errors = ""
        threading.Thread(target=process.wait, daemon=True).start()  # no zombie stays

    def send(self, data: bytes) -> None:
        """Write all of `data`, waiting for room for a second at most."""
        try:
            self.stream.sendall(data)
        except OSError as error:
            raise HostLost("the connection to the agent is closed") from error

    def receive(self, seconds: float | None = None) -> bytes:
        """Wait for bytes; return b"" at the end; raise TimeoutError after `seconds`."""
        if seconds is not None and not self._is_ready(seconds):
            raise TimeoutError
        try:
            data = self.stream.recv(READ_BYTES)
        except OSError:
            data = b""
        if not data:
            self._release()
        return data

    def _is_ready(self, seconds: float) -> bool:
        poll = select.poll()  # unlike select, without a limit on descriptors
        poll.register(self.stream, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def is_unread(self) -> bool:
        """Return whether bytes or the end lie here."""
        return self.stream.fileno() < 0 or self._is_ready(0)

    def complaint(self) -> str:
        """Return the end of its standard error, once `receive` has returned b""."""
        return self.errors

    def close(self) -> None:
        """End both directions; the agent then cleans up by itself."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)

    def _release(self) -> None:
        """Free the socket, wait for the program to exit, and keep the end of its errors."""
        self.stream.close()
        if self.complaints.closed:
            return  # read already, by an earlier call
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LAST_SECONDS)
        with self.complaints as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - COMPLAINT_BYTES))
            self.errors = file.read().decode("utf-8", "replace").strip()


def free_port() -> int:
    """Return a TCP port that is free at every address: torchrun's store listens on all."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
