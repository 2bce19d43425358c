"""What the hosts of a run send each other: a request of one size, and its answer.

    request   token (16), SHA-256 of a shard (32), first byte (8), number of bytes (4), whether the
              host should verify the block first, as what it sent before was wrong (1)
    answer    any number of WAIT, while the host fetches the block; then HAVE and the bytes,
              or NO: it does not know the shard, or cannot get the bytes

A shard is named by its digest, which a host looks up among those of its data set: nothing in a
request becomes a path. A connection carries one request after the other; one that is not a request
of this run is closed.
"""

import hmac
import struct
from typing import NamedTuple

TOKEN_BYTES = 16
WAIT, HAVE, NO = b"w", b"h", b"n"
_REQUEST = struct.Struct(f"<{TOKEN_BYTES}s32sQI?")
REQUEST_BYTES = _REQUEST.size


class Request(NamedTuple):
    """A part of a shard."""

    sha256: str
    offset: int
    length: int
    verify: bool = False
    """Whether the block is to be read anew and verified, as the last answer was wrong."""


def encoded(token: bytes, request: Request) -> bytes:
    """Return the bytes of a request."""
    digest = bytes.fromhex(request.sha256)
    return _REQUEST.pack(token, digest, request.offset, request.length, request.verify)


def decoded(token: bytes, data: bytes) -> Request | None:
    """Return the request in REQUEST_BYTES; None if it has not the token of this run."""
    given, digest, offset, length, verify = _REQUEST.unpack(data)
    if not hmac.compare_digest(given, token):
        return None
    return Request(digest.hex(), offset, length, verify)
