"""Fuzz targets: data sets, answers and runs from elsewhere give a value or a Problem.

Each function hands bytes to a decoder and lets nothing pass but the decoder's own error.
"""

import contextlib
import http.client
import io
import json
import math
import socket
import struct
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from rackrun.catdog.recipes import CatDog
from rackrun.errors import DataError, SaveError, UsageError
from rackrun.shapes import Misshapen, shaped
from rackrun.shards.http_client import Trouble
from rackrun.shards.http_source import check_response
from rackrun.shards.images import too_large
from rackrun.shards.index import (
    Manifest,
    Shard,
    Split,
    parse_index,
    read_version,
    serialize_index,
)
from rackrun.terminal import clean
from rackrun.training import checkpoint
from rackrun.training.data import decode
from rackrun.training.data.transforms import Transforms
from tests.fuzz.decoders import coded, decoder
from tests.lab.data import encoded

HERE = Path("here")
SPLIT_SAMPLES = 3


def manifest() -> bytes:
    """Return a manifest of two classes."""
    shard = Shard("a-train-000000.tar", SPLIT_SAMPLES, 1 << 20, "0" * 64)
    split = Split("train", SPLIT_SAMPLES, "a-train.index.npy", "0" * 64, (shard,))
    return Manifest("a", ("one", "two"), (split,)).serialize()


def versions() -> bytes:
    """Return the newest of three manifests, then those before it."""
    chain = [Manifest.parse(manifest(), "")]
    for _ in range(2):
        parents = (*chain[-1].parents, chain[-1].digest)
        chain.append(replace(chain[-1], parents=parents, change={"dropped": 1}))
    return b"\0".join(each.serialize() for each in (chain[2], chain[0], chain[1]))


def index() -> bytes:
    """Return the index of three samples."""
    rows = [(0, 600 * n, 600, 600 * n + 512, 1, n % 2, 8, 8, 0, b"jpg") for n in range(3)]
    return serialize_index(rows)


def weights() -> bytes:
    """Return a file of weights."""
    return checkpoint.pack({"model": {"a": torch.zeros(2)}, "classes": ["x"], "n": 1.5})


def jpeg(**options: object) -> bytes:
    """Return a crop and a size, then a JPEG of noise."""
    pixels = np.random.default_rng(0).integers(256, size=(40, 56, 3), dtype=np.uint8)
    return struct.pack("<4H", 3, 5, 20, 20) + encoded(Image.fromarray(pixels), **options)


ANSWER = (
    b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/20\r\nContent-Length: 2\r\n"
    b"Content-Type: text/html; x\r\nLocation: /x\r\nContent-Encoding: gzip\r\n"
    b"Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n\r\nab"
)


@decoder(manifest())
def fuzz_manifest(data: bytes) -> None:
    """Fuzz a manifest: an accepted one has a digest and can be written again."""
    with contextlib.suppress(DataError):
        manifest = Manifest.parse(data, "here")
        assert Manifest.parse(manifest.serialize(), "here") == manifest


@decoder(versions())
def fuzz_versions(data: bytes) -> None:
    """Fuzz a chain of manifests: what is read of it has the digest that the newest names."""
    text, *earlier = data.split(b"\0")

    def read_file(name: str, most_bytes: int) -> bytes:
        return dict(zip(("dataset.v1.json", "dataset.v2.json"), earlier, strict=False)).get(
            name, b""
        )

    with contextlib.suppress(DataError):
        newest = Manifest.parse(text, "here")
        versions = [
            read_version(newest, number, read_file, "here") for number in range(1, newest.number)
        ]
        assert tuple(version.digest for version in versions) == newest.parents


@decoder(index())
def fuzz_index(data: bytes) -> None:
    """Fuzz an index whose digest is right: its publisher is not trusted, either."""
    shard = Shard("a-train-000000.tar", SPLIT_SAMPLES, 1 << 20, "0" * 64)
    digest = sha256(data).hexdigest()
    split = Split("train", SPLIT_SAMPLES, "a-train.index.npy", digest, (shard,))
    with contextlib.suppress(DataError):
        parse_index(data, Manifest("a", ("one", "two"), (split,)), split, "here")


class _Sent(socket.socket):
    """A socket over which these bytes have come."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.data = data

    def makefile(self, *args: object, **options: object) -> io.BytesIO:
        return io.BytesIO(self.data)


@decoder(ANSWER)
def fuzz_answer(data: bytes) -> None:
    """Fuzz the head of an HTTP answer."""
    with _Sent(data) as sent:
        response = http.client.HTTPResponse(sent)
        try:
            response.begin()
        except (http.client.HTTPException, OSError):
            return
        try:
            assert 1 <= check_response(response, 0, 1, None, 1 << 20) <= 1 << 20
        except Trouble as trouble:
            assert clean(str(trouble)) == str(trouble) and len(str(trouble)) < 500
            assert trouble.pause_seconds >= 0 and not math.isnan(trouble.pause_seconds)


@decoder(weights(), b"\x80\x02}q\x00.")
def fuzz_checkpoint(data: bytes) -> None:
    """Fuzz a file of weights without a digest."""
    with contextlib.suppress(SaveError):
        checkpoint.parse(data, HERE)


@decoder(coded(asdict(Transforms(32))), b"{}")
def fuzz_final(data: bytes) -> None:
    """Fuzz the values in a final.pt that describe the model and its transforms."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return
    with contextlib.suppress(Misshapen, UsageError):
        shaped(content, CatDog, "config")
    with contextlib.suppress(Misshapen):
        transforms: Transforms = shaped(content, Transforms, "preparation")
        transforms.check()


@decoder(jpeg(), jpeg(progressive=True))
def fuzz_picture(data: bytes) -> None:
    """Fuzz an image: its first eight bytes choose the crop and the size of the result."""
    head, picture = data[:8].ljust(8, b"\0"), data[8:]
    left, top, across, down = struct.unpack("<4H", head)
    size = 1 + left % 64

    def choose(width: int, height: int) -> decode.Box:
        assert not too_large(width, height)
        box = decode.Box(left % width, top % height, 0, 0)
        return decode.Box(
            box.left,
            box.top,
            1 + across % (width - box.left),
            1 + down % (height - box.top),
        )

    with contextlib.suppress(DataError):
        region = decode.region_of(picture, choose, size)
        assert region.resized(size).shape == (size, size, 3)
