"""Remote calls to our program on a host: an order, a reply, and sometimes plain bytes.

The program is sent over standard input; orders and replies are JSON, with their length on a line
before them. What a login shell prints before is noise. The last order may be that for an agent,
which has the channel from then on.

Replies are untrusted: one that is invalid, too long, or not of the expected shape raises
HostUnreachable, and so does a host that is silent, or slower than a trickle, for too long.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from rackrun.launcher.errors import HostLost, HostUnreachable
from rackrun.launcher.remote.service import MARKER
from rackrun.launcher.transport.base import Channel, Transport
from rackrun.launcher.transport.bootstrap import bootstrap, last_error_line, opening, order
from rackrun.shapes import Misshapen, parsed_json, shaped
from rackrun.terminal import one_line

NO_MORE = "; does the login shell there exit in its start-up file?"
INTERACTIVE = "write before that: [[ $- == *i* ]] || return"
SIGNS = {
    r"^([^ ]*/)?-?(zsh|ksh|mksh|fish|tcsh|csh)\b": (
        f"; does ~/.bashrc there start another shell? {INTERACTIVE}"
    ),
    r"not a terminal|connected to a terminal": (
        f"; does ~/.bashrc there start tmux or screen? {INTERACTIVE}"
    ),
    r"invalid literal for int\(\)": "; does a start-up file there read from standard input?",
}
"""Signs in what a login shell or a Python printed last -> what they mean."""
NOISE_BYTES = 1 << 16
REPLY_BYTES = 1 << 23
LISTING_BYTES = 1 << 25  # of all files of a folder
REPLY_SECONDS = 60.0  # until a reply has begun
STALL_SECONDS = 30.0  # for the next TRICKLE_BYTES of it
TRICKLE_BYTES = 30_000
LENGTH_DIGITS = 9
SEND_BYTES = 1 << 14  # at 16 KB/s, it is sent within the second that a send may take

Reply = Mapping[str, Any]
T = TypeVar("T")


class RpcClient:
    """The program on one host, from its start until `close`."""

    def __init__(
        self,
        transport: Transport,
        python: str = "",
        reply_seconds: float = REPLY_SECONDS,
    ) -> None:
        """Start the program with the system's Python, or with `python` where there is none.

        A reply must begin within `reply_seconds`, unless a call sets another limit.
        """
        self._transport = transport
        self._reply_seconds = reply_seconds
        self._buffer = bytearray()
        self._begun = False
        self._channel: Channel | None = None
        # The system's Python is there before any environment is, and starts without a login's PATH.
        try:
            self._start("python3")
        except HostUnreachable:
            self.close()
            if not python.startswith("/"):
                raise
            self._start(python)

    def enter(self, container: Sequence[str], python: str) -> None:
        """Start the program anew in a container, in place of this process: no shell is between."""
        if error := self.call("replace", command=(*container, *bootstrap(python))).get("error"):
            raise HostLost(f"{self._transport.name}: {error}")
        self._begin()

    def hand_over(self, order: bytes) -> tuple[Channel, bytes]:
        """Send the order for an agent; return its channel, and what has come from there already."""
        self.send(order)
        assert self._channel is not None
        channel, self._channel = self._channel, None
        return channel, bytes(self._buffer)

    def call(self, order_name: str, /, **fields: object) -> Reply:
        """Send an order and return its reply; raise HostUnreachable when none comes."""
        self.order(order_name, **fields)
        return self.reply()

    def order(self, order_name: str, /, **fields: object) -> None:
        """Send an order; its reply is to be taken later."""
        self.send(order(do=order_name, **fields))

    def send(self, data: bytes) -> None:
        """Send bytes, piece by piece, as long as the host accepts them."""
        assert self._channel is not None
        try:
            for start in range(0, len(data), SEND_BYTES):
                self._channel.send(data[start : start + SEND_BYTES])
        except HostLost:
            self._channel.close()
            # What it printed before it stopped reading may contain the reason.
            while len(self._buffer) < NOISE_BYTES and (data := self._channel.receive()):
                self._buffer += data
            raise self._silent("accepts no more data") from None

    def reply(self, seconds: float | None = None, most_bytes: int = REPLY_BYTES) -> Reply:
        """Return the next reply, which must begin within `seconds`, or else the usual time."""
        length = self._read_until(b"\n", self._reply_seconds if seconds is None else seconds)
        if not length.isdigit() or len(length) > LENGTH_DIGITS or int(length) > most_bytes:
            raise self._invalid("a length")
        try:
            reply = parsed_json(b"".join(self.receive(int(length))), most_bytes)
        except Misshapen as error:
            raise self._invalid(str(error)) from None
        if not isinstance(reply, dict):
            raise self._invalid("not an object")
        return reply

    def parsed(self, reply: Reply, shape: type[T]) -> T:
        """Return a reply in its declared shape; raise HostUnreachable for any other."""
        try:
            value: T = shaped(reply, shape, "the answer")
        except Misshapen as error:
            raise self._invalid(str(error)) from None
        return value

    def receive(self, size: int) -> Iterator[bytes]:
        """Yield the next plain bytes, piece by piece."""
        # A deadline for all would end a slow but healthy link; one for the next byte would let a
        # host send a byte a minute for ever. So there is one for every TRICKLE_BYTES.
        until, trickle = time.monotonic() + STALL_SECONDS, 0
        while size:
            if not self._buffer:
                self._read_more(until)
            piece = bytes(self._buffer[:size])
            del self._buffer[: len(piece)]
            size -= len(piece)
            trickle += len(piece)
            if trickle >= TRICKLE_BYTES:
                until, trickle = time.monotonic() + STALL_SECONDS, 0
            yield piece

    def close(self) -> None:
        """End the program."""
        if self._channel is not None:
            self._channel.close()

    def _start(self, python: str) -> None:
        self._channel = self._transport.open(bootstrap(python))
        self._begin()

    def _begin(self) -> None:
        """Send the program, and wait until it answers."""
        self._buffer.clear()
        self._begun = False
        self.send(opening())
        self._read_until(MARKER, self._reply_seconds)
        self._begun = True

    def _read_until(self, mark: bytes, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        while mark not in self._buffer:
            if len(self._buffer) > NOISE_BYTES:
                printed = f"the login shell printed {NOISE_BYTES >> 10} KiB"
                raise HostUnreachable(f"{self._transport.name}: {printed}, but no answer came")
            self._read_more(until)
        data, _, rest = bytes(self._buffer).partition(mark)
        self._buffer = bytearray(rest)
        return data

    def _read_more(self, until: float) -> None:
        # `until` is the caller's deadline for all of its data, not for a pause between two pieces.
        assert self._channel is not None
        left = max(0.0, until - time.monotonic())
        try:
            data = self._channel.receive(left)
        except TimeoutError:
            self.close()
            raise HostUnreachable(f"{self._transport.name}: has gone silent") from None
        if not data:
            raise self._silent()
        self._buffer += data

    def _invalid(self, what: str) -> HostUnreachable:
        reason = f"sent an invalid answer ({one_line(what)})"
        return HostUnreachable(f"{self._transport.name}: {reason}")

    def _silent(self, what: str = "the program there has ended") -> HostUnreachable:
        assert self._channel is not None
        # A login shell that fails may say why on either stream.
        complaint = self._channel.complaint()
        printed = complaint or self._buffer.decode(errors="replace").strip()
        last = last_error_line(printed)
        if self._begun:
            end = f": {last}" if last else ""
            return HostUnreachable(f"{self._transport.name}: {what}{end}")
        signs = (hint for sign, hint in SIGNS.items() if re.search(sign, last))
        why = f"{last or 'no output'}{next(signs, '' if complaint else NO_MORE)}"
        return HostUnreachable(f"{self._transport.name}: Python could not be started there: {why}")
