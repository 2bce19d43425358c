"""Five hundred ways to spoil a shard or an answer, each the same for the same number.

cuts      every 512 bytes of one shard, as often as they last
the rest  seeded: kinds in turn, places and bytes at random
"""

import contextlib
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from tests.lab.data import Tiny, write_tiny
from tests.lab.servers import Answer, Fault, Proxy

CUTS = 64  # mutations that cut a shard
TOTAL = 500


class Mutation(NamedTuple):
    """One spoilt shard or one spoilt answer."""

    number: int
    kind: str


@dataclass(frozen=True)
class Lab:
    """A shard folder of its own, a real nginx in front of it, a proxy in front of that."""

    tiny: Tiny
    proxy: Proxy
    shards: dict[Path, bytes]

    @contextlib.contextmanager
    def spoilt(self, mutation: Mutation) -> Iterator[str]:
        """Yield the URL of a server that shows the mutation, until the block ends."""
        dice = random.Random(mutation.number)
        if mutation.kind in FILES:
            for path, data in FILES[mutation.kind](self.shards, mutation.number, dice).items():
                path.write_bytes(data)
        else:
            self.proxy.fault = sometimes(ANSWERS[mutation.kind](dice), dice)
        self.proxy.requests.clear()
        try:
            yield self.proxy.url
        finally:
            self.proxy.fault = Answer.send
            for path, data in self.shards.items():
                if path.read_bytes() != data:
                    path.write_bytes(data)


@contextlib.contextmanager
def lab() -> Iterator[Lab]:
    """Yield a lab for the block."""
    top = Path(tempfile.mkdtemp(prefix="rackrun-test-"))
    top.chmod(0o755)
    tiny = write_tiny(top / "shards")
    paths = sorted(tiny.folder.glob("*.tar"))
    for path in paths:
        path.chmod(0o644)
    try:
        with serving(Site(tiny.folder, port=0, native=True)) as server:
            proxy = Proxy((server.site.address, server.site.port))
            try:
                yield Lab(tiny, proxy, {path: path.read_bytes() for path in paths})
            finally:
                proxy.stop()
    finally:
        shutil.rmtree(top)


def corpus() -> list[Mutation]:
    """Return all mutations."""
    kinds = [kind for kind in (*FILES, *ANSWERS) if kind != "cut"]
    seeded = [Mutation(CUTS + n, kinds[n % len(kinds)]) for n in range(TOTAL - CUTS)]
    return [Mutation(number, "cut") for number in range(CUTS)] + seeded


def cut(shards: dict[Path, bytes], number: int, dice: random.Random) -> dict[Path, bytes]:
    path = min(shards)
    return {path: shards[path][: number * 512 % len(shards[path])]}


def flip(shards: dict[Path, bytes], number: int, dice: random.Random) -> dict[Path, bytes]:
    path = dice.choice(sorted(shards))
    data = bytearray(shards[path])
    for _ in range(dice.randint(1, 3)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return {path: bytes(data)}


def flip_in_a_header(
    shards: dict[Path, bytes], number: int, dice: random.Random
) -> dict[Path, bytes]:
    path = dice.choice(sorted(shards))
    data = bytearray(shards[path])
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    data[dice.choice(headers) + dice.randrange(160)] ^= 1 << dice.randrange(8)
    return {path: bytes(data)}


def zero(shards: dict[Path, bytes], number: int, dice: random.Random) -> dict[Path, bytes]:
    path = dice.choice(sorted(shards))
    data = bytearray(shards[path])
    at = dice.randrange(0, len(data) - 512, 512)
    data[at : at + 512] = bytes(512)
    return {path: bytes(data)}


def swap(shards: dict[Path, bytes], number: int, dice: random.Random) -> dict[Path, bytes]:
    first, second = dice.sample(sorted(shards), 2)
    return {first: shards[second], second: shards[first]}


def garbage_behind(
    shards: dict[Path, bytes], number: int, dice: random.Random
) -> dict[Path, bytes]:
    path = dice.choice(sorted(shards))
    return {path: shards[path] + dice.randbytes(dice.choice([1, 512, 1024]))}


def sample_missing(
    shards: dict[Path, bytes], number: int, dice: random.Random
) -> dict[Path, bytes]:
    """Remove a whole member or two: the rest is a valid tar."""
    path = dice.choice(sorted(shards))
    data = shards[path]
    headers = [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]
    first = dice.randrange(len(headers) - 2)
    return {path: data[: headers[first]] + data[headers[first + dice.randint(1, 2)] :]}


FILES: dict[str, Callable[[dict[Path, bytes], int, random.Random], dict[Path, bytes]]] = {
    "cut": cut,
    "flip": flip,
    "flip in a header": flip_in_a_header,
    "zero": zero,
    "swap": swap,
    "garbage behind": garbage_behind,
    "sample missing": sample_missing,
}


def sometimes(fault: Fault, dice: random.Random) -> Fault:
    """Spoil one answer, or all from one on."""
    first, always = dice.randrange(5), dice.random() < 0.3

    def wrapped(reply: Answer) -> None:
        if reply.number == first or (always and reply.number > first):
            fault(reply)
        else:
            reply.send()

    return wrapped


def part_of(reply: Answer, dice: random.Random) -> bytes:
    """Return the beginning of a body; half of the time up to the end of a member."""
    end = dice.randrange(max(len(reply.body), 1))
    return reply.body[: end // 512 * 512 if dice.random() < 0.5 else end]


def short_body(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        reply.send(body=part_of(reply, dice))
        reply.hang_up()

    return fault


def reset(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        reply.send(body=part_of(reply, dice))
        reply.reset()

    return fault


def stall(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        reply.send(body=part_of(reply, dice))
        reply.stall()

    return fault


def shorter_than_it_is(dice: random.Random) -> Fault:
    """Return the fault of a proxy that announces and sends less, so that nothing seems cut."""

    def fault(reply: Answer) -> None:
        body = part_of(reply, dice)
        reply.send(head=with_length(reply, len(body)), body=body)

    return fault


def longer_than_it_is(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        reply.send(head=with_length(reply, len(reply.body) + dice.randint(1, 2000)))
        reply.hang_up()

    return fault


def other_bytes(dice: random.Random) -> Fault:
    """Return the fault of a right head with other bytes."""

    def fault(reply: Answer) -> None:
        reply.send(body=dice.randbytes(len(reply.body)))

    return fault


def shifted(dice: random.Random) -> Fault:
    """Return the fault of a proxy that mixes up ranges: the right bytes, a block too late."""

    def fault(reply: Answer) -> None:
        by = 512 * dice.randint(1, 4)
        reply.send(body=reply.body[by:] + reply.body[:by])

    return fault


def whole_instead_of_a_part(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply.body)
        reply.send(head=head)

    return fault


def page(dice: random.Random) -> Fault:
    def fault(reply: Answer) -> None:
        body = b"<html>" + b"Please log in. " * dice.randint(1, 200)
        reply.send(head=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body=body)

    return fault


def error(dice: random.Random) -> Fault:
    line = dice.choice(["404 Not Found", "403 Forbidden", "500 Oops", "503 Busy", "429 Slower"])
    head = f"HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n".encode()
    return lambda reply: reply.send(head=head, body=b"")


def with_length(reply: Answer, length: int) -> bytes:
    return reply.head.replace(
        b"Content-Length: %d" % len(reply.body), b"Content-Length: %d" % length
    )


ANSWERS: dict[str, Callable[[random.Random], Fault]] = {
    "short body": short_body,
    "reset": reset,
    "stall": stall,
    "shorter than it is": shorter_than_it_is,
    "longer than it is": longer_than_it_is,
    "other bytes": other_bytes,
    "shifted": shifted,
    "whole instead of a part": whole_instead_of_a_part,
    "page": page,
    "error": error,
}
