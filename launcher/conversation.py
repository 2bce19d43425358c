"""Talks with a program of ours on a host: an order, an answer, and sometimes plain bytes.

The program (`probe`, `porter`) is sent over standard input; orders and answers are JSON, with
their length on a line before them. What a login shell prints before is noise. A probe's process
and channel can be handed on to the run's agent, which spares the host a login shell and a Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from launcher.errors import HostLost, HostUnreachable, LauncherError
from launcher.parcel import packed
from launcher.place import Channel, Place
from launcher.wire import bootstrap, order
from rackrun.shapes import Misshapen, parsed_json, shaped
from rackrun.terminal import one_line

NOTHING = "it said nothing; does the login shell there end by itself, in its start-up file?"
NOISE_BYTES = 1 << 16
ANSWER_BYTES = 1 << 26
SEND_BYTES = 1 << 14  # a link of 16 KB/s is fast enough for the second that a send may take

Answer = Mapping[str, Any]


class Conversation:
    """One program on one host, from its start until `close`."""

    def __init__(
        self, place: Place, program: ModuleType, python: str = "", first: bytes = b""
    ) -> None:
        """Start it with the system's Python, or with `python` where there is none.

        `first` is an order that travels along, so that its answer costs no round trip of its own.
        """
        self._place = place
        self._opening = packed(program) + first
        self._heard = bytearray()
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
            self._heard += b"".join(iter(self._channel.receive, b""))  # it may have said why
            raise self._silent() from None

    def answer(self) -> Answer:
        """The next answer."""
        length = self._read_until(b"\n")
        if not length.isdigit() or len(length) > 9 or int(length) > ANSWER_BYTES:
            raise HostUnreachable(f"{self._place.name}: answers what no program of ours would")
        try:
            said = parsed_json(b"".join(self.receive(int(length))), ANSWER_BYTES)
            answer: Answer = shaped(said, dict[str, Any])
            return answer
        except Misshapen as error:
            nonsense = f"{self._place.name}: answers what no program of ours would ({error})"
            raise HostUnreachable(nonsense) from None

    def receive(self, size: int) -> Iterator[bytes]:
        """The next plain bytes, piece by piece."""
        while size:
            if not self._heard:
                self._hear()
            piece = bytes(self._heard[:size])
            del self._heard[: len(piece)]
            size -= len(piece)
            yield piece

    def close(self) -> None:
        """End the program."""
        if self._channel is not None:
            self._channel.close()

    def _start(self, program: ModuleType, python: str) -> None:
        self._heard.clear()
        self._channel = self._place.open(bootstrap(python))
        self.send(self._opening)
        self._read_until(program.MARKER)

    def _read_until(self, mark: bytes) -> bytes:
        while mark not in self._heard:
            if len(self._heard) > NOISE_BYTES:
                raise HostUnreachable(f"{self._place.name}: prints a lot at login, but no answer")
            self._hear()
        data, _, rest = bytes(self._heard).partition(mark)
        self._heard = bytearray(rest)
        return data

    def _hear(self) -> None:
        assert self._channel is not None
        data = self._channel.receive()
        if not data:
            raise self._silent()
        self._heard += data

    def _silent(self) -> HostUnreachable:
        """The program ended: what the host said instead, on standard error or as noise."""
        assert self._channel is not None
        said = self._channel.complaint() or self._heard.decode(errors="replace").strip()
        last = (said.splitlines() or [NOTHING])[-1]
        return HostUnreachable(
            f"{self._place.name}: Python could not be started there: {one_line(last)}"
        )


class Successor:
    """A place where a probe still runs: the first program that is opened there takes it over."""

    def __init__(self, place: Place, talk: Conversation, container: Sequence[str] = ()) -> None:
        """The conversation may go on until then; the first program runs in `container`, if any."""
        self._place = place
        self._talk: Conversation | None = talk
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
            except LauncherError:
                talk.close()
        return self._place.open(bootstrap() if self._container else argv)
