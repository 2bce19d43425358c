"""Talks with a program of ours on a host: an order, an answer, and sometimes plain bytes.

The program (`probe`, `porter`) is sent over standard input; orders and answers are JSON, with
their length on a line before them. What a login shell prints before is noise. A probe's process
and channel can be handed on to the run's agent, which spares the host a login shell and a Python.

Nothing that a host says is believed: what is no answer, too long, or not of the shape that was
asked for is HostUnreachable, and so is silence, or less than a trickle, for too long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, TypeVar

from launcher.errors import HostLost, HostUnreachable
from launcher.remote.service import MARKER
from launcher.transport.base import Channel, Transport
from launcher.transport.bootstrap import bootstrap, order
from launcher.transport.bundle import packed
from rackrun.errors import Problem
from rackrun.shapes import Misshapen, parsed_json, shaped
from rackrun.terminal import one_line

NOTHING = "it said nothing; does the login shell there end by itself, in its start-up file?"
NOISE_BYTES = 1 << 16
ANSWER_BYTES = 1 << 26
ANSWER_SECONDS = 60.0  # until an answer has begun
STALL_SECONDS = 30.0  # for the next TRICKLE_BYTES of it
TRICKLE_BYTES = 30_000
LENGTH_DIGITS = 9
LONGEST_COMPLAINT = 300
SEND_BYTES = 1 << 14  # a link of 16 KB/s is fast enough for the second that a send may take

Answer = Mapping[str, Any]
T = TypeVar("T")


class RpcClient:
    """One program on one host, from its start until `close`."""

    def __init__(
        self,
        place: Transport,
        program: ModuleType,
        python: str = "",
        first: bytes = b"",
        patience_seconds: float = ANSWER_SECONDS,
    ) -> None:
        """Start it with the system's Python, or with `python` where there is none.

        `first` is an order that travels along, so that its answer costs no round trip of its own.
        An answer begins within `patience_seconds`, where nothing else is said.
        """
        self._place = place
        self._patience = patience_seconds
        self._opening = packed(program) + first
        self._heard = bytearray()
        self._begun = False
        self._channel: Channel | None = None
        try:
            self._start(program, "python3")
        except HostUnreachable:
            self.close()
            if not python.startswith("/"):
                raise
            self._start(program, python)

    def become(self) -> Channel:
        """Let another program take over: what is sent next is read as `bootstrap` reads it."""
        self.order("become")
        assert self._channel is not None
        channel, self._channel = self._channel, None
        return channel

    def replace(self, *command: str) -> Channel:
        """Let a command take over, of which no shell has seen a word."""
        error = self.ask("replace", command=command).get("error")
        if error:
            raise HostLost(f"{self._place.name}: {error}")
        assert self._channel is not None
        channel, self._channel = self._channel, None
        return channel

    def ask(self, question: str, /, **words: object) -> Answer:
        """Give an order and wait for its answer; raises HostUnreachable when none comes."""
        self.order(question, **words)
        return self.answer()

    def order(self, question: str, /, **words: object) -> None:
        """Give an order; its answer is to be taken later."""
        self.send(order(do=question, **words))

    def send(self, data: bytes) -> None:
        """Send bytes, piece by piece, as long as the host takes them."""
        assert self._channel is not None
        try:
            for start in range(0, len(data), SEND_BYTES):
                self._channel.send(data[start : start + SEND_BYTES])
        except HostLost:
            self._channel.close()
            while len(self._heard) < NOISE_BYTES and (data := self._channel.receive()):
                self._heard += data  # it may have said why
            raise self._silent("takes no more data") from None

    def answer(self, seconds: float | None = None) -> Answer:
        """The next answer; `seconds`: until it has begun, if not the usual time."""
        length = self._read_until(b"\n", self._patience if seconds is None else seconds)
        if not length.isdigit() or len(length) > LENGTH_DIGITS or int(length) > ANSWER_BYTES:
            raise self._nonsense("a length")
        try:
            said = parsed_json(b"".join(self.receive(int(length))), ANSWER_BYTES)
        except Misshapen as error:
            raise self._nonsense(str(error)) from None
        if not isinstance(said, dict):
            raise self._nonsense("not an object")
        return said

    def answer_as(self, shape: type[T], seconds: float | None = None) -> T:
        """The next answer, held against a declared shape."""
        return self.held(self.answer(seconds), shape)

    def held(self, answer: Answer, shape: type[T]) -> T:
        """An answer as the declared shape has it; raises HostUnreachable for any other."""
        try:
            found: T = shaped(answer, shape, "the answer")
        except Misshapen as error:
            raise self._nonsense(str(error)) from None
        return found

    def hears(self, seconds: float) -> bool:
        """Whether there is something of the next answer within so many seconds."""
        assert self._channel is not None
        if not self._heard:
            try:
                data = self._channel.receive(seconds)
            except TimeoutError:
                return False
            if not data:
                raise self._silent()
            self._heard += data
        return True

    def receive(self, size: int) -> Iterator[bytes]:
        """The next plain bytes, piece by piece."""
        until, trickle = time.monotonic() + STALL_SECONDS, 0
        while size:
            if not self._heard:
                self._hear(until)
            piece = bytes(self._heard[:size])
            del self._heard[: len(piece)]
            size -= len(piece)
            trickle += len(piece)
            if trickle >= TRICKLE_BYTES:
                until, trickle = time.monotonic() + STALL_SECONDS, 0
            yield piece

    def close(self) -> None:
        """End the program."""
        if self._channel is not None:
            self._channel.close()

    def _start(self, program: ModuleType, python: str) -> None:
        self._heard.clear()
        self._begun = False
        self._channel = self._place.open(bootstrap(python))
        self.send(self._opening)
        self._read_until(MARKER, self._patience)
        self._begun = True

    def _read_until(self, mark: bytes, seconds: float) -> bytes:
        until = time.monotonic() + seconds
        while mark not in self._heard:
            if len(self._heard) > NOISE_BYTES:
                raise HostUnreachable(f"{self._place.name}: prints a lot at login, but no answer")
            self._hear(until)
        data, _, rest = bytes(self._heard).partition(mark)
        self._heard = bytearray(rest)
        return data

    def _hear(self, until: float) -> None:
        """Wait for more, until then at most: whoever waits knows by when enough must be here."""
        assert self._channel is not None
        left = max(0.0, until - time.monotonic())
        try:
            data = self._channel.receive(left)
        except TimeoutError:
            self.close()
            raise HostUnreachable(f"{self._place.name}: has fallen silent") from None
        if not data:
            raise self._silent()
        self._heard += data

    def _nonsense(self, what: str) -> HostUnreachable:
        """What to say of an answer that is none."""
        reason = f"answers what no program of ours would ({one_line(what)})"
        return HostUnreachable(f"{self._place.name}: {reason}")

    def _silent(self, what: str = "our program there has ended") -> HostUnreachable:
        """The program ended: what the host said instead, on standard error or as noise."""
        assert self._channel is not None
        said = self._channel.complaint() or self._heard.decode(errors="replace").strip()
        last = one_line((said.splitlines() or [NOTHING])[-1][:LONGEST_COMPLAINT])
        if self._begun:
            end = f": {last}" if said else ""
            return HostUnreachable(f"{self._place.name}: {what}{end}")
        return HostUnreachable(f"{self._place.name}: Python could not be started there: {last}")


class Handover:
    """A place where a probe still runs: the first program that is opened there takes it over."""

    def __init__(self, place: Transport, talk: RpcClient, container: Sequence[str] = ()) -> None:
        """The conversation may go on until then; the first program runs in `container`, if any."""
        self._place = place
        self._talk: RpcClient | None = talk
        self._container = container

    @property
    def name(self) -> str:
        """The name of the place."""
        return self._place.name

    def open(self, argv: Sequence[str]) -> Channel:
        """The probe's channel, once; a new one later, or when that one broke.

        Who comes later looks after a lost agent: on the host, whose Python is not the image's.
        """
        talk, self._talk = self._talk, None
        if talk is not None:
            if self._container:
                return talk.replace(*self._container, *argv)
            try:
                return talk.become()
            except Problem:
                talk.close()
        return self._place.open(bootstrap() if self._container else argv)
