"""The small files beside the images are read, or refused in one line."""

import io
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy

from rackrun.convert import devkit
from rackrun.convert.imagenet import Choice, listing
from rackrun.convert.readers.matlab import NotMatlab, structs
from rackrun.errors import DataError
from tests.lab.data import tar
from tests.lab.run import write

PART = Choice(subset=True)
RECORDED = (
    Path(scipy.__file__).parent / "io" / "matlab" / "tests" / "data"
)  # written by MATLAB itself


def read(source: Path) -> int:
    """Return the number of images of a source."""
    return sum(1 for _ in listing(source, PART).records)


@pytest.mark.parametrize("name", sorted(path.name for path in RECORDED.glob("teststruct_*.mat")))
def test_tables_are_read_as_matlab_wrote_them(name):
    """Four releases of MATLAB, two byte orders: text and numbers are those that scipy sees."""
    (row,) = structs((RECORDED / name).read_bytes(), "teststruct", 1 << 20)
    table = scipy.io.loadmat(RECORDED / name, squeeze_me=True)["teststruct"]
    assert row["stringfield"] == str(table["stringfield"])
    assert row["doublefield"] == table["doublefield"].item()[0]


@pytest.mark.parametrize("compressed", [False, True])
def test_the_devkits_table_is_read_as_scipy_reads_it(compressed, small_imagenet):
    """Packed or not, every class keeps its number, its wnid and its words."""
    buffer = io.BytesIO()
    table = scipy.io.loadmat(io.BytesIO(small_imagenet.meta()))["synsets"]
    scipy.io.savemat(buffer, {"other": np.arange(5), "synsets": table}, do_compression=compressed)
    expected = {
        number: (wnid, small_imagenet.words(wnid))
        for wnid, number in small_imagenet.devkit_numbers.items()
    }
    assert devkit.synsets(buffer.getvalue()) == expected


def test_a_table_that_unpacks_without_end_is_refused(small_imagenet):
    """A thousandfold inside meta.mat costs what the true one costs, at the most."""
    header = small_imagenet.meta()[:128]
    packed = zlib.compress(bytes(64 << 20))
    bomb = header + struct.pack("<II", 15, len(packed)) + packed
    with pytest.raises(NotMatlab, match="unpacks to too many bytes"):
        structs(bomb, "synsets", 1 << 20)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.2, 0.5, 0.9, 0.99])
def test_a_table_of_matlab_that_is_cut_or_damaged_is_refused(share, small_imagenet, tmp_path):
    """Cut anywhere, or with a byte changed in its packed part: 65, or the right labels."""
    source = small_imagenet.folders(tmp_path, flat=True)
    path, whole = source / "ILSVRC2012_devkit_t12/data/meta.mat", small_imagenet.meta()
    at = int(len(whole) * share)
    changed = bytearray(whole)
    changed[at] ^= 0x55
    for damaged in (whole[:at], bytes(changed)):
        path.write_bytes(damaged)
        try:
            assert read(source) == 43
        except DataError as problem:
            assert "meta.mat" in str(problem) and "\n" not in str(problem)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_sparse_tar_gives_no_other_bytes(sparse, small_imagenet, tmp_path):
    """GNU tar's --sparse leaves out runs of zeros: refused with what to type, else right bytes."""
    holes = bytes(100_000) + small_imagenet.train[0].data + bytes(100_000)
    write(tmp_path / "loose", {"n01440764_0.JPEG": holes})
    command = ["tar", "-C", tmp_path / "loose", "--format=gnu", "-cf", "-"]
    with (tmp_path / "loose" / "n01440764_0.JPEG").open("wb") as file:
        file.seek(len(holes) - 1)
        file.write(b"\0")
    command += ["--sparse"] * sparse + ["n01440764_0.JPEG"]
    inner = subprocess.run(command, check=True, capture_output=True).stdout
    source = small_imagenet.archives(tmp_path / "raw")
    (source / "ILSVRC2012_img_train.tar").write_bytes(tar({"n01440764.tar": inner}))
    data = listing(source, Choice(classes="n01440764"))
    if sparse:
        with pytest.raises(DataError, match="n01440764_0.JPEG is sparse: pack it .*--sparse"):
            list(data.records)
        return
    first = next(data.records)
    assert data.containers[0].read(first) == bytes(len(holes))
