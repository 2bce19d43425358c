"""One tar, whole or absent, the same bytes for the same samples."""

import io
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.atomic import write_whole
from rackrun.shards.writer import write_shard

KEYS = st.from_regex(r"[A-Za-z0-9_-]{1,90}", fullmatch=True)
SAMPLES = st.lists(
    st.tuples(KEYS, st.integers(0, 2**32 - 1), st.binary(max_size=3000)),
    max_size=8,
    unique_by=lambda sample: sample[0],
)


@given(samples=SAMPLES)
def test_samples_come_back_through_tarfile(samples, tmp_path_factory):
    """Any bytes of any length; the places that the writer reports are those in the file."""
    path = tmp_path_factory.getbasetemp() / "a-train-000000.tar"
    with write_shard(path) as writer:
        positions = [writer.add(key, label, image) for key, label, image in samples]
        shard = writer.close()
    data = path.read_bytes()
    assert (shard.samples, shard.bytes) == (len(samples), len(data))
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        members = {member.name: member for member in tar.getmembers()}
    for (key, label, image), position in zip(samples, positions, strict=True):
        assert members[f"{key}.jpg"].offset_data == position.image_offset
        assert members[f"{key}.cls"].offset == position.offset
        assert data[position.image_offset :][: len(image)] == image
        assert data[position.offset + 512 :][: len(str(label))] == str(label).encode()


def test_small_files_are_whole_too(tmp_path):
    """write_whole replaces a file at once, and does not follow a planted link."""
    write_whole(tmp_path / "a", b"1")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    write_whole(tmp_path / "link", b"2")
    assert (tmp_path / "a").read_bytes() == b"1"
    assert (tmp_path / "link").read_bytes() == b"2" and not (tmp_path / "link").is_symlink()


def test_keys_that_are_no_keys_are_not_written(tmp_path):
    """A dot, a slash or an umlaut in a key would merge or split samples in every reader."""
    for key in ("a.b", "a/b", "ä", "", "a" * 91):
        with pytest.raises(ValueError, match="key"), write_shard(tmp_path / "a.tar") as writer:
            writer.add(key, 0, b"")
