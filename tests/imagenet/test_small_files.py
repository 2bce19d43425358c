"""The small files beside the images are read, or refused in one line."""

import gzip
import io
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import scipy

from rackrun.convert import devkit
from rackrun.convert.imagenet import Choice, listing
from rackrun.convert.readers.matlab import NotMatlab, structs
from rackrun.errors import DataError, Problem
from tests.lab.imagenet_archives import tar, written

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


KAGGLE = {
    "LOC_synset_mapping.txt": [
        (b"n01440764 caf\xe9\n", r"LOC_synset_mapping.txt: not UTF-8 at byte 13"),
        (b"n02012849 b\nn01440764 a\n", r"not in the order of their wnids"),
    ],
    "LOC_val_solution.csv": [
        (b"ImageId\xff", r"LOC_val_solution.csv: not UTF-8 at byte 7"),
        (b"", r"does not begin with ImageId,PredictionString"),
        (b"ILSVRC2012_val_00000001,n01440764 1 2 3 4\n", r"does not begin with ImageId"),
        (b"ImageId,PredictionString\nILSVRC2012_val_00000001\n", r"row 2 does not name a"),
        (b"ImageId,PredictionString\nx,\n", r"row 2 does not name an image and its class"),
        (b"ImageId,PredictionString\nx," + b"n" * 140_000, r"line 2: field larger than"),
    ],
}


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [(name, data, says) for name, wrong in KAGGLE.items() for data, says in wrong],
)
def test_tables_of_kaggle_that_are_damaged_are_refused(name, data, says, small_imagenet, tmp_path):
    """Not UTF-8, no header, a short row, a huge field: one line, from the tree and from the zip."""
    files = small_imagenet.kaggle() | {name: data}
    with zipfile.ZipFile(tmp_path / "kaggle.zip", "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
    for source in (written(tmp_path / "raw", files), tmp_path / "kaggle.zip"):
        with pytest.raises(DataError, match=says) as problem:
            read(source)
        assert "\n" not in str(problem.value)


def test_a_damaged_table_in_kaggles_zip_is_found_by_its_checksum(small_imagenet, tmp_path):
    """A flipped bit in the labels would train wrongly: the archive's CRC-32 finds it."""
    source = tmp_path / "kaggle.zip"
    with zipfile.ZipFile(source, "w") as archive:
        for path, content in small_imagenet.kaggle().items():
            archive.writestr(path, content)
    data = bytearray(source.read_bytes())
    data[data.index(b"PredictionString\n") + 60] ^= 1
    source.write_bytes(data)
    with pytest.raises(DataError, match="LOC_val_solution.csv: not the bytes"):
        read(source)


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


def test_a_devkit_that_unpacks_without_end_is_refused(small_imagenet, tmp_path):
    """0.1 MB of gzip that become 100 are read to the limit; so are files that lie beside it."""
    source = small_imagenet.archives(tmp_path)
    packed = source / "ILSVRC2012_devkit_t12.tar.gz"
    packed.write_bytes(gzip.compress(tar({"data/meta.mat": bytes(100 << 20)})))
    with pytest.raises(DataError, match="over 64 MiB, where the true one has 3"):
        read(source)
    with (source / "meta.mat").open("wb") as file:
        file.truncate(100 << 20)
    with pytest.raises(DataError, match="over 64 MiB"):
        read(source)


@pytest.mark.parametrize("sparse", [True, False])
def test_a_sparse_tar_gives_no_other_bytes(sparse, small_imagenet, tmp_path):
    """GNU tar's --sparse leaves out runs of zeros: refused with what to type, else right bytes."""
    holes = bytes(100_000) + small_imagenet.train[0].data + bytes(100_000)
    written(tmp_path / "loose", {"n01440764_0.JPEG": holes})
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


@pytest.mark.parametrize(
    "size", [b"\x80" + b"\0" * 3 + b"\xff" * 8, b"\xff" * 12, b"\x80" + b"\xff" * 11]
)
def test_sizes_that_cannot_be_are_refused(size, small_imagenet, tmp_path):
    """A header may claim more than 2**63 bytes, or fewer than none: one line, and no loop."""
    source = small_imagenet.archives(tmp_path)
    path = source / "ILSVRC2012_img_val.tar"
    data = bytearray(path.read_bytes())
    start = data.index(b"ILSVRC2012_val_00000001")
    start -= start % 512
    data[start + 124 : start + 136] = size
    data[start + 148 : start + 156] = b" " * 8
    data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    path.write_bytes(data)
    with pytest.raises(Problem, match="cut off|is damaged"):
        read(source)
