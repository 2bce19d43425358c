"""The small files beside the images are read, or refused in one line."""

import subprocess

import pytest

from rackrun.convert import devkit
from rackrun.convert.imagenet import ImagenetPart, listing
from rackrun.errors import DataError
from tests.lab.data import tar
from tests.lab.run import write

PART = ImagenetPart(subset=True)


def test_the_table_of_classes_has_the_numbers_that_the_devkit_gives_them():
    """The first validation images show what is known of them: a sea snake, an alp, a Shetland."""
    truth = devkit.numbered(b"490\n361\n171\n822\n297\n482\n13\n704\n599\n164")
    wnids = "n01751748 n09193705 n02105855 n04263257 n03125729"
    assert " ".join(truth.values()).startswith(wnids)
    assert len(devkit.words()) == 1000
    ranks = sorted(devkit.words())
    assert [ranks.index(wnid) for wnid in truth.values()] == [
        *(65, 970, 230, 809, 516, 57, 334, 415, 674, 332)
    ]


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
    data = listing(source, ImagenetPart(classes="n01440764"))
    if sparse:
        with pytest.raises(DataError, match="n01440764_0.JPEG is sparse: pack it .*--sparse"):
            list(data.records)
        return
    first = next(data.records)
    assert data.containers[0].read(first) == bytes(len(holes))
