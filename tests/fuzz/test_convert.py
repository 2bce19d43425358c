"""Conversion turns any bytes into a value, a Defect or a Problem."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.convert.devkit import GROUND_TRUTH
from tests.fuzz import targets_convert as targets
from tests.lab.data import drawn, rotated, tar


def zipped(how: int) -> bytes:
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", how) as archive:
        archive.writestr("a/cat.1.jpg", b"a" * 99)
        archive.writestr(zipfile.ZipInfo("b.jpg"), b"b")
    return stored.getvalue()


def headed(kind: bytes) -> bytes:
    """Return a tar whose member has an extended header of that kind before it."""
    form = tarfile.PAX_FORMAT if kind == b"x" else tarfile.GNU_FORMAT
    info = tarfile.TarInfo("long" * 40)
    info.size = 9
    return info.tobuf(form) + b"x" * 9 + bytes(503 + 1024)


SEEDS: dict[Callable[[bytes], None], tuple[bytes, ...]] = {
    targets.fuzz_zip: (zipped(zipfile.ZIP_STORED), zipped(zipfile.ZIP_DEFLATED)),
    targets.fuzz_tar: (tar({"a": b"1"}, "gnu"), headed(b"x"), headed(b"L")),
    targets.fuzz_picture: (
        *(drawn(1)[2:], drawn(1, progressive=True)[2:]),
        *(drawn(1, (16, 12), name) for name in ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")),
    ),
    targets.fuzz_exif: (rotated(1)[12:100],),
    targets.fuzz_solution: (b"ILSVRC2012_val_00000001,n01440764 1 2 3 4\n",),
    targets.fuzz_ground_truth: (b"1\n2\n",),
    targets.fuzz_devkit: (gzip.compress(tar({f"data/{GROUND_TRUTH}": b"1"}), mtime=0),),
    targets.fuzz_plan: (b'{"dataset": "a", "classes": [], "preset": {}, "shards": [{}]}',),
}


@st.composite
def changed(draw: st.DrawFn, seeds: tuple[bytes, ...]) -> bytes:
    """Draw one of the seeds with bytes overwritten, cut out, doubled or appended."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        end = at + draw(st.integers(0, 12))
        data[at:end] = draw(st.binary(max_size=16) | st.just(bytes(data[at:end]) * 2))
    return bytes(data)


@pytest.mark.parametrize("target", SEEDS, ids=lambda target: target.__name__)
@pytest.mark.security("FUZZ-1")
def test_no_bytes_bring_a_decoder_of_conversion_to_a_traceback(target):
    """Any bytes, and true ones with damage: a value, a Defect or a Problem, nothing else."""

    @given(st.binary(max_size=2000) | changed(SEEDS[target]))
    def run(data: bytes) -> None:
        target(data)

    run()
