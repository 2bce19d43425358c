"""Five hundred ways to spoil a shard or an answer, each the same for the same number.

cuts      every 512 bytes of one shard, as often as they last
the rest  seeded: kinds in turn, places and bytes at random
"""

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from tests.lab.data import Tiny, write_tiny
from tests.lab.servers import Answer, Fault, Proxy, open_folder

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
        if mutation.kind in ANSWERS:
            self.proxy.fault = sometimes(ANSWERS[mutation.kind], dice)
        else:
            for path, data in spoilt_files(mutation, self.shards, dice).items():
                path.write_bytes(data)
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
    with open_folder() as top:
        tiny = write_tiny(top / "shards")
        paths = sorted(tiny.folder.glob("*.tar"))
        for path in paths:
            path.chmod(0o644)
        with serving(Site(tiny.folder, port=0, native=True)) as server:
            proxy = Proxy((server.site.address, server.site.port))
            try:
                yield Lab(tiny, proxy, {path: path.read_bytes() for path in paths})
            finally:
                proxy.stop()


def corpus() -> list[Mutation]:
    """Return all mutations."""
    kinds = ["swap", *FILES, *ANSWERS]
    seeded = [Mutation(CUTS + n, kinds[n % len(kinds)]) for n in range(TOTAL - CUTS)]
    return [Mutation(number, "cut") for number in range(CUTS)] + seeded


def spoilt_files(
    mutation: Mutation, shards: dict[Path, bytes], dice: random.Random
) -> dict[Path, bytes]:
    """Return the shards that a mutation changes, with their new bytes."""
    if mutation.kind == "cut":
        path = min(shards)
        return {path: shards[path][: mutation.number * 512 % len(shards[path])]}
    if mutation.kind == "swap":
        first, second = dice.sample(sorted(shards), 2)
        return {first: shards[second], second: shards[first]}
    path = dice.choice(sorted(shards))
    return {path: FILES[mutation.kind](bytearray(shards[path]), dice)}


def flip(data: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.randint(1, 3)):
        data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
    return bytes(data)


def headers(data: bytearray) -> list[int]:
    return [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]


def flip_in_a_header(data: bytearray, dice: random.Random) -> bytes:
    data[dice.choice(headers(data)) + dice.randrange(160)] ^= 1 << dice.randrange(8)
    return bytes(data)


def zero(data: bytearray, dice: random.Random) -> bytes:
    at = dice.randrange(0, len(data) - 512, 512)
    data[at : at + 512] = bytes(512)
    return bytes(data)


def garbage_behind(data: bytearray, dice: random.Random) -> bytes:
    return bytes(data) + dice.randbytes(dice.choice([1, 512, 1024]))


def sample_missing(data: bytearray, dice: random.Random) -> bytes:
    """Remove a whole member or two: the rest is a valid tar."""
    starts = headers(data)
    first = dice.randrange(len(starts) - 2)
    return bytes(data[: starts[first]] + data[starts[first + dice.randint(1, 2)] :])


FILES: dict[str, Callable[[bytearray, random.Random], bytes]] = {
    "flip": flip,
    "flip in a header": flip_in_a_header,
    "zero": zero,
    "garbage behind": garbage_behind,
    "sample missing": sample_missing,
}
AnswerFault = Callable[[Answer, random.Random], None]


def sometimes(fault: AnswerFault, dice: random.Random) -> Fault:
    """Spoil one answer, or all from one on."""
    first, always = dice.randrange(5), dice.random() < 0.3

    def wrapped(reply: Answer) -> None:
        if reply.number == first or (always and reply.number > first):
            fault(reply, dice)
        else:
            reply.send()

    return wrapped


def part_of(reply: Answer, dice: random.Random) -> bytes:
    """Return the beginning of a body; half of the time up to the end of a member."""
    end = dice.randrange(max(len(reply.body), 1))
    return reply.body[: end // 512 * 512 if dice.random() < 0.5 else end]


def short_body(reply: Answer, dice: random.Random) -> None:
    reply.send(body=part_of(reply, dice))
    reply.hang_up()


def reset(reply: Answer, dice: random.Random) -> None:
    reply.send(body=part_of(reply, dice))
    reply.reset()


def stall(reply: Answer, dice: random.Random) -> None:
    reply.send(body=part_of(reply, dice))
    reply.stall()


def shorter_than_it_is(reply: Answer, dice: random.Random) -> None:
    """Answer like a proxy that announces and sends less, so that nothing seems cut."""
    body = part_of(reply, dice)
    reply.send(head=with_length(reply, len(body)), body=body)


def longer_than_it_is(reply: Answer, dice: random.Random) -> None:
    reply.send(head=with_length(reply, len(reply.body) + dice.randint(1, 2000)))
    reply.hang_up()


def other_bytes(reply: Answer, dice: random.Random) -> None:
    """Answer with the right head and other bytes."""
    reply.send(body=dice.randbytes(len(reply.body)))


def shifted(reply: Answer, dice: random.Random) -> None:
    """Answer like a proxy that mixes up ranges: the right bytes, a block too late."""
    by = 512 * dice.randint(1, 4)
    reply.send(body=reply.body[by:] + reply.body[:by])


def whole_instead_of_a_part(reply: Answer, dice: random.Random) -> None:
    reply.send(head=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply.body))


def page(reply: Answer, dice: random.Random) -> None:
    body = b"<html>" + b"Please log in. " * dice.randint(1, 200)
    reply.send(head=b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body), body=body)


def error(reply: Answer, dice: random.Random) -> None:
    line = dice.choice(["404 Not Found", "403 Forbidden", "500 Oops", "503 Busy", "429 Slower"])
    reply.send(head=f"HTTP/1.1 {line}\r\nContent-Length: 0\r\n\r\n".encode(), body=b"")


def with_length(reply: Answer, length: int) -> bytes:
    return reply.head.replace(
        b"Content-Length: %d" % len(reply.body), b"Content-Length: %d" % length
    )


ANSWERS: dict[str, AnswerFault] = {
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
