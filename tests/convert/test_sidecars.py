"""Files for other readers agree with the tars, byte for byte, and go when the data set goes."""

import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from convert.__main__ import main
from rackrun.errors import UsageError
from shards.index import Manifest
from tests.convert.conftest import Convert, shown
from tests.convert.drawn import drawn, write_files
from tests.convert.test_index import as_hugging_face, by_webdataset, write_tar


def manifest_of(folder: Path) -> Manifest:
    return Manifest.parse((folder / "dataset.json").read_bytes(), "")


def members_of(path: Path) -> dict[str, bytes]:
    """Return the regular files of a tar, as Python's tarfile reads them."""
    with tarfile.open(path) as tar:
        return {each.name: tar.extractfile(each).read() for each in tar if each.isreg()}


def by_dali(folder: Path, shard: str) -> dict[str, bytes]:
    """Return the members where the index says they are, by the definition of DALI's format v1.2."""
    head, *lines = (folder / shard).with_suffix(".idx").read_text().splitlines()
    assert head == f"v1.2 {len(lines)}"
    data, result = (folder / shard).read_bytes(), {}
    for line in lines:
        args = iter(line.split(" "))
        for extension, offset, size, name in zip(args, args, args, args, strict=True):
            assert name.rpartition("/")[2].partition(".")[2] == extension
            result[name] = data[int(offset) : int(offset) + int(size)]
    return result


def by_energon(folder: Path, shard: str) -> list[dict[str, bytes]]:
    """Return the samples between the offsets of the index, each read as a tar of its own."""
    packed = (folder / f"{shard}.idx").read_bytes()
    offsets = struct.unpack(f"<{len(packed) // 8}Q", packed)
    data, samples = (folder / shard).read_bytes(), []
    for start, end in zip(offsets, offsets[1:], strict=False):
        with tarfile.open(fileobj=io.BytesIO(data[start:end] + bytes(1024))) as tar:
            samples.append({each.name: tar.extractfile(each).read() for each in tar})
    return samples


def check(folder: Path) -> None:
    """Hold every file for other readers against the tars."""
    manifest, meta = manifest_of(folder), folder / ".nv-meta"
    assert manifest.sidecars
    info = json.loads((meta / ".info.json").read_bytes())["shard_counts"]
    parts = json.loads((meta / "split.yaml").read_bytes())["split_parts"]
    for split in manifest.splits:
        names = [shard.name for shard in split.shards]
        assert parts[split.name] == names
        wids = json.loads((folder / f"{manifest.dataset}-{split.name}.wids.json").read_bytes())
        assert (wids["__kind__"], wids["wids_version"]) == ("wids-shard-index-v1", 1)
        assert [each["url"] for each in wids["shardlist"]] == names
        assert sum(each["nsamples"] for each in wids["shardlist"]) == split.samples
        for name in names:
            members = members_of(folder / name)
            assert by_dali(folder, name) == members
            samples = by_energon(folder, name)
            assert {key: data for each in samples for key, data in each.items()} == members
            assert len(samples) == info[name]


def test_they_agree_with_the_tars_and_go_with_them(train_zip: Path, convert: Convert) -> None:
    """They change neither shards nor identity; --force removes them, but no file beside them."""
    plain = convert("catdog", train_zip, "--shards", 3, out="plain")
    out = convert("catdog", train_zip, "--shards", 3, "--sidecars")
    check(out)
    assert manifest_of(out).digest == manifest_of(plain).digest
    assert (
        shown(out).items()
        >= {name: data for name, data in shown(plain).items() if name != "dataset.json"}.items()
    )
    (out / ".nv-meta" / "index.uuid").write_text("of Energon")
    convert("catdog", train_zip, "--shards", 3, "--force")
    assert shown(out) == shown(plain)
    assert [path.name for path in (out / ".nv-meta").iterdir()] == ["index.uuid"]


def test_a_finished_folder_gets_them_later(train_zip: Path, convert: Convert) -> None:
    """By the same command with --sidecars, or by one of its own, twice without harm."""
    out = convert("catdog", train_zip, "--shards", 2)
    convert("catdog", train_zip, "--shards", 2, "--sidecars")
    check(out)
    before = shown(out)
    main(["sidecars", str(out)])
    assert shown(out) == before


@pytest.mark.parametrize("write", [by_webdataset, as_hugging_face])
def test_tars_of_other_programs_get_them(tmp_path: Path, write: Callable[[Path], object]) -> None:
    """Also with extended headers, folders in names and padding; an index without them removes."""
    write(tmp_path)
    tars = {path: path.read_bytes() for path in tmp_path.glob("*.tar")}
    main(["index", str(tmp_path), "--sidecars", "--workers", "1"])
    if write is by_webdataset:
        check(tmp_path)
    for path in tars:
        result = by_dali(tmp_path, path.name)
        assert result == members_of(path)
        samples = by_energon(tmp_path, path.name)
        assert {key: data for each in samples for key, data in each.items()} == result
    main(["index", str(tmp_path), "--force", "--workers", "1"])
    assert not list(tmp_path.glob("*.idx"))
    assert not (tmp_path / ".nv-meta").exists()
    assert {path: path.read_bytes() for path in tars} == tars


@pytest.mark.parametrize("names", [("猫咪", "狗"), ("__cat", "dog"), ("__cat", "__dog")])
def test_keys_that_begin_with_underscores_are_samples(
    names: tuple[str, str], tmp_path: Path, convert: Convert
) -> None:
    """As letters do that are not ASCII: the index had none of them, or there was no index."""
    files = {f"{name}/{n}.jpg": drawn(f"{name}{n}") for name in names for n in "1234_"}
    out = convert("folder", write_files(tmp_path / "set", files), "--sidecars")
    check(out)


def test_conversions_remove_no_tar_of_another_program(
    tmp_path: Path, train_zip: Path, convert: Convert
) -> None:
    """--force takes the index of adopted tars away, and leaves the tars."""
    out = tmp_path / "out"
    tar = write_tar(out / "catdog-train-000000.tar", [("a.cls", b"0"), ("a.jpg", drawn("a"))])
    main(["index", str(out), "--workers", "1"])
    with pytest.raises(UsageError, match=f"{tar.name}: no conversion here has made it"):
        convert("catdog", train_zip, "--force")
    assert tar.exists()


def test_files_that_are_not_ours_stay(train_zip: Path, convert: Convert) -> None:
    """One that wds2idx has made is not replaced; nor may an array job ask for them."""
    out = convert("catdog", train_zip, "--shards", 2)
    (out / "catdog-train-000001.idx").write_text("mine")
    with pytest.raises(UsageError, match=r"catdog-train-000001\.idx: no conversion has made it"):
        main(["sidecars", str(out)])
    assert not manifest_of(out).sidecars
    with pytest.raises(UsageError, match=r"after the array job, type: .* sidecars OUT"):
        convert("catdog", train_zip, "--task-index", 0, "--task-count", 2, "--sidecars")
