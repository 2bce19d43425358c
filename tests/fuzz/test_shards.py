"""Any bytes at all are a value or the product's own error, in all that reads data and runs."""

import io
import json
import struct
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rackrun.shards.index import Manifest, Row, Shard, Split, pack_rows, serialise_index
from rackrun.training import checkpoint
from rackrun.training.data.transforms import Transforms
from tests.fuzz import targets_shards as targets


def manifest() -> bytes:
    shard = Shard("a-train-000000.tar", 3, 1 << 20, "0" * 64)
    split = Split("train", 3, "a-train.index.npy", "0" * 64, (shard,))
    return Manifest("a", ("one", "two"), (split,)).serialise()


def versions() -> bytes:
    """Return the newest of three manifests, then those before it."""
    chain = [Manifest.parse(manifest(), "")]
    for _ in range(2):
        parents = (*chain[-1].parents, chain[-1].digest)
        chain.append(replace(chain[-1], parents=parents, change={"dropped": 1}))
    return b"\0".join(each.serialise() for each in (chain[2], chain[0], chain[1]))


def index() -> bytes:
    rows = [Row(0, 600 * n, 600, 600 * n + 512, 1, n % 2, 8, 8, 0, b"jpg") for n in range(3)]
    return serialise_index(pack_rows(rows))


def answer() -> bytes:
    return (
        b"HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-1/20\r\nContent-Length: 2\r\n"
        b"Content-Type: text/html; x\r\nLocation: /x\r\nContent-Encoding: gzip\r\n"
        b"Retry-After: Fri, 31 Dec 1999 23:59:59 GMT\r\n\r\nab"
    )


def weights() -> bytes:
    return checkpoint.pack({"model": {"a": torch.zeros(2)}, "classes": ["x"], "n": 1.5})


def transforms() -> bytes:
    return json.dumps(asdict(Transforms(32))).encode()


def jpeg(**options: object) -> bytes:
    pixels = np.random.default_rng(0).integers(256, size=(40, 56, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", **options)
    return struct.pack("<4H", 3, 5, 20, 20) + buffer.getvalue()


SEEDS = {
    targets.fuzz_manifest: [manifest()],
    targets.fuzz_versions: [versions()],
    targets.fuzz_index: [index()],
    targets.fuzz_answer: [answer()],
    targets.fuzz_checkpoint: [weights(), b"\x80\x02}q\x00."],
    targets.fuzz_final: [transforms(), b"{}"],
    targets.fuzz_picture: [jpeg(), jpeg(progressive=True)],
}

JUNK = st.one_of(
    st.binary(max_size=12),
    st.sampled_from(
        [b"[" * 2000, b"9" * 5000, b"\x1b]0;x\x07", b"-1", b"\xff\xda", b"e999", b"null"]
    ),
)
CHANGES = st.lists(st.tuples(st.floats(0, 1), st.integers(0, 12), JUNK), max_size=4)


def test_every_target_has_a_seed_that_is_right():
    """A target without a valid seed would only test refusals."""
    options = {value for name, value in vars(targets).items() if name.startswith("fuzz_")}
    assert options == set(SEEDS)
    Manifest.parse(manifest(), "here")
    for target, seeds in SEEDS.items():
        for seed in seeds:
            target(seed)


@pytest.mark.parametrize("target", SEEDS, ids=lambda target: target.__name__)
def test_any_bytes_are_a_value_or_an_error(target):
    """Bytes at random, and right ones with some exchanged, cut out or put in."""

    @given(st.sampled_from(SEEDS[target]), CHANGES, st.binary(max_size=100), st.booleans())
    def fuzz(
        seed: bytes, changes: list[tuple[float, int, bytes]], junk: bytes, is_ours: bool
    ) -> None:
        data = seed
        for where, length, junk_here in changes:
            at = int(where * len(data))
            data = data[:at] + junk_here + data[at + length :]
        target(data if is_ours else junk)

    fuzz()
