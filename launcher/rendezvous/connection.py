"""The line between two nodes of a run: JSON objects, and what shows that they are of one job.

    node 0 ── {"nonce": …, "sealed": …} ──▶ node k
           ◀── {"hello": …, "nonce": …} ──

A job may have a key (`RACKRUN_JOB_KEY`). Each line then begins with an HMAC over the nonce of who
receives it, the role of its sender, and its text. So no caller without the key is accepted, and
nothing recorded earlier or elsewhere can be replayed. The lines themselves are no secret.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import time
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Annotated, Any

from rackrun.contract.variables import JOB_KEY
from rackrun.errors import UsageError
from rackrun.launcher.remote.sockets import keep_alive
from rackrun.shapes import Matches, Misshapen, parsed_json, shaped

LEAST_KEY = 16
NEW_KEY = f"export {JOB_KEY}=$(openssl rand -hex 24)"
LINE_BYTES = 1 << 16
READ_BYTES = 1 << 16

Nonce = Annotated[str, Matches("[0-9a-f]{32}")]


@dataclass(frozen=True)
class Greeting:
    """Greeting of node 0 to a caller."""

    nonce: Nonce
    sealed: bool
    """Whether it knows a key of the job."""


def job_key(environment: MutableMapping[str, str]) -> bytes:
    """Take the key of the job out of the environment, so that no rank has it; empty for none."""
    key = environment.pop(JOB_KEY, "")
    if key and len(key) < LEAST_KEY:
        raise UsageError(f"{JOB_KEY}: shorter than {LEAST_KEY} characters; type: {NEW_KEY}")
    return key.encode("utf-8", "surrogateescape")


class PeerConnection:
    """JSON objects, a line each, in both directions."""

    def __init__(self, stream: socket.socket, key: bytes = b"", most_bytes: int = LINE_BYTES):
        """Have the kernel notice a dead peer; no line is longer than `most_bytes`."""
        self.stream = stream
        self.key = key
        self.most_bytes = most_bytes
        self.nonce = secrets.token_hex(16)
        self.theirs = ""
        self.calls = False
        self.rest = bytearray()
        keep_alive(stream)

    def greet(self) -> None:
        """Speak first, as node 0."""
        self._write({"nonce": self.nonce, "sealed": bool(self.key)}, b"")

    def call(self, seconds: float) -> bool:
        """Read the greeting, as another node; return False when there is none.

        Raises UsageError where one side has a key and the other has none, TimeoutError, Misshapen.
        """
        self.calls = True
        line = self._line_within(seconds)
        if line is None:
            return False
        greeting: Greeting = shaped(parsed_json(line, self.most_bytes), Greeting, "a greeting")
        if greeting.sealed != bool(self.key):
            who = ("here, and not on node 0", "on node 0, and not here")[greeting.sealed]
            raise UsageError(f"{JOB_KEY} is set {who}; set the same on every node")
        self.theirs = greeting.nonce
        return True

    def send(self, **fields: Any) -> None:
        """Send one object; a lost connection is noticed by the receiver."""
        self._write(fields, self.key)

    def receive(self, seconds: float | None = None) -> dict[str, Any] | None:
        """Return the next object, None at the end; raise TimeoutError, or Misshapen for nonsense.

        `seconds` are for all of it, however it drips.
        """
        line = self._line_within(seconds)
        return None if line is None else self._opened(line)

    def hear(self) -> bool:
        """Take in what has come; False at the end. TimeoutError passes."""
        try:
            data = self.stream.recv(READ_BYTES)
        except BlockingIOError:
            return True
        except TimeoutError:
            raise
        except OSError:
            return False
        self.rest += data
        return bool(data)

    def message(self) -> dict[str, Any] | None:
        """Return the next object received; None while it is incomplete."""
        line = self._line()
        return None if line is None else self._opened(line)

    def close(self) -> None:
        """Close both directions, which wakes a blocked receiver."""
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def _write(self, fields: dict[str, Any], key: bytes) -> None:
        text = json.dumps(fields).encode()
        if key:
            text = self._seal(self.theirs, self.calls, text) + b" " + text
        with contextlib.suppress(OSError):
            self.stream.sendall(text + b"\n")

    def _opened(self, line: bytes) -> dict[str, Any]:
        """Return the object in a line, once it is known to come from a node of the job."""
        if self.key:
            seal, _, line = line.partition(b" ")
            if not hmac.compare_digest(seal, self._seal(self.nonce, not self.calls, line)):
                raise Misshapen(f"not sealed with our {JOB_KEY}")
        fields: dict[str, Any] = shaped(parsed_json(line, self.most_bytes), dict[str, Any])
        return fields

    def _seal(self, nonce: str, by_caller: bool, text: bytes) -> bytes:
        role = "node k" if by_caller else "node 0"
        return hmac.digest(self.key, f"{nonce} {role} ".encode() + text, "sha256").hex().encode()

    def _line(self) -> bytes | None:
        line, end, rest = self.rest.partition(b"\n")
        if len(line) > self.most_bytes:
            raise Misshapen(f"a line of more than {self.most_bytes} bytes")
        if not end:
            return None
        self.rest = rest
        return bytes(line)

    def _line_within(self, seconds: float | None) -> bytes | None:
        deadline = None if seconds is None else time.monotonic() + seconds
        while (line := self._line()) is None:
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                raise TimeoutError
            try:
                self.stream.settimeout(left)
                if not self.hear():
                    return None
            except TimeoutError:
                if seconds is None:
                    return None  # the other machine is silent
                raise
            except OSError:  # we have closed it ourselves
                return None
        return line
