"""Restart tiles: JPEGs written anew, not a coefficient changed; all else as it was, and counted."""

import io
import json
import os
import signal
import struct
import tarfile
from functools import cache
from hashlib import sha256
from pathlib import Path
from random import Random

import numpy as np
import pytest
import simplejpeg
from PIL import Image

from convert.__main__ import main
from convert.images import transcoder
from convert.images.tiles import Untiled, has_sound_tiles, same_coefficients, tiled
from convert.images.transcoder import Refused, rewritten
from convert.packing import pack
from convert.packing.plan import load_plan
from convert.verify import Originals, compared
from rackrun.errors import DataError, MissingProgram, Problem, UsageError
from shards.images import START, Frame, jpeg_frame
from shards.index import Manifest
from shards.tiles import MOST_TILES, original_digest, tile_interval
from tests.convert.conftest import Convert, everything, shown
from tests.convert.drawn import drawn, rotated, textured, write_files, write_zip
from tests.waiting import until


def frame_of(data: bytes) -> Frame:
    frame = jpeg_frame(data)
    assert frame is not None
    return frame


def has_tiles(data: bytes) -> bool:
    """Return whether a file has a list of tiles that fits it."""
    frame = jpeg_frame(data)
    return frame is not None and frame.tiles_at > 0 and has_sound_tiles(data, frame)


def quarter_colour() -> bytes:
    """Return a JPEG whose colours have a quarter of the width."""
    return simplejpeg.encode_jpeg(pixels(textured(1)), colorsubsampling="411")


def pixels(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize(
    "options",
    [
        {"subsampling": "4:4:4"},
        {"subsampling": "4:2:2"},
        {"subsampling": "4:2:0", "quality": 95},
        {"progressive": True},
        {"mode": "L"},
        {"restart_marker_rows": 3},
        {"optimize": True, "comment": b"a comment", "icc_profile": b"a profile"},
    ],
    ids=str,
)
def test_coefficients_and_pixels_stay(options: dict[str, object]) -> None:
    """The file with tiles is the same image: its coefficients, its tables, and what Pillow sees."""
    data = textured(1, **options)
    made = tiled(data)
    assert has_tiles(made) and not has_tiles(data)
    assert same_coefficients(made, data)
    assert np.array_equal(pixels(made), pixels(data))
    assert original_digest(made, frame_of(made)) == sha256(data).digest()
    before, after = (Image.open(io.BytesIO(each)) for each in (data, made))
    assert after.info.get("icc_profile") == before.info.get("icc_profile")
    assert after.info.get("comment") == before.info.get("comment")
    assert "progressive" not in after.info


def test_another_coefficient_shows() -> None:
    """The comparison of coefficients fails where one of them differs."""
    data = textured(1, quality=90)
    assert not same_coefficients(tiled(data), tiled(textured(1, quality=91)))


def test_a_file_with_tiles_stays_as_it_is() -> None:
    """Converting what was converted changes nothing."""
    made = tiled(textured(1))
    assert tiled(made) is made


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (quarter_colour(), "a rare sampling"),
        (textured(1)[:-900] + b"\xff\xd9", "libjpeg-turbo: "),
        (tiled(textured(1)) + b"\xff\xd9", "its list of tiles does not fit"),
        (drawn(1, (300, 200)), "bytes with tiles"),
    ],
    ids=["4:1:1", "damaged", "another list", "grows"],
)
def test_what_does_not_fit_is_named(data: bytes, why: str) -> None:
    """A JPEG that would gain by tiles and cannot have them has its reason."""
    with pytest.raises(Untiled, match=why):
        tiled(data)


def test_what_would_not_gain_keeps_its_bytes(tmp_path: Path, convert: Convert) -> None:
    """A crop of a small JPEG decodes no faster with tiles, and other images have none."""
    kept = {
        "cmyk": textured(1, mode="CMYK"),
        "png": textured(2, format="PNG"),
        "narrow": textured(3, (299, 200)),
        "thumbnail": textured(4, (64, 64)),
    }
    files = {f"{kind}/{n}.jpg": textured(10 * n + ord(kind)) for kind in "ab" for n in range(2)}
    files |= {f"a/{name}.jpg": data for name, data in kept.items()}
    out = convert("folder", write_files(tmp_path / "images", files))
    images = {sample.key: sample.image for sample in everything(out)}
    assert {name: images.pop(f"a_{name}") for name in kept} == kept
    assert all(has_tiles(image) for image in images.values())


def test_baseline_jpegs_are_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of its own, at twice the time, are for files that would grow by more than a tenth."""
    tables = []

    def counted(data: bytes, interval: int, optimised: bool) -> bytes:
        tables.append(optimised)
        return rewritten(data, interval, optimised)

    monkeypatch.setattr("convert.images.tiles.rewritten", counted)
    for data, expected in [
        (textured(1, quality=92), [False]),
        (textured(1, progressive=True), [True]),
        (textured(1, quality=20, subsampling="4:4:4", optimize=True), [False, True]),
    ]:
        tables.clear()
        assert has_tiles(tiled(data))
        assert tables == expected


@pytest.mark.parametrize(
    ("width", "height", "mcu", "interval"),
    [
        (500, 375, (16, 16), 2),
        (375, 500, (16, 16), 2),
        (333, 500, (16, 16), 3),
        (496, 300, (16, 16), 1),
        (500, 375, (8, 8), 3),
        (375, 500, (8, 8), 47),
        (9000, 7000, (8, 8), 45),
        (65500, 65500, (8, 8), 4094),
    ],
)
def test_tiles_are_about_32_pixels_wide(
    width: int, height: int, mcu: tuple[int, int], interval: int
) -> None:
    """As far as the width can be divided, a segment has room for their list, and none is tiny."""
    assert tile_interval(width, height, mcu) == interval
    across, down = -(-width // mcu[0]), -(-height // mcu[1])
    assert across % interval == 0 and across // interval * down <= MOST_TILES


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write images that fit and some that do not, a few of each class."""
    files = {
        f"{kind}/{n}.jpg": textured(10 * n + len(kind)) for kind in ("a", "bb") for n in range(6)
    }
    odd = {
        "a/progressive.jpg": textured(1, progressive=True),
        "a/png.png": textured(2, format="PNG"),
        "bb/cmyk.jpg": textured(3, mode="CMYK"),
        "bb/small.jpg": textured(5, (64, 64)),
        "bb/quarter.jpg": quarter_colour(),
        "bb/turned.jpg": rotated(4),
    }
    return write_files(tmp_path / "images", files | odd)


def test_a_folder_is_converted_with_tiles(
    folder: Path, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    """What gains has tiles and its coefficients; all else its bytes, and odd JPEGs are named."""
    out = convert("folder", folder)
    originals = {sha256(path.read_bytes()).digest(): path for path in folder.glob("*/*")}
    stored = [sample.image for sample in everything(out)]
    with_tiles = [data for data in stored if has_tiles(data)]
    assert len(with_tiles) == 13
    for data in with_tiles:
        path = originals.pop(original_digest(data, frame_of(data)), None)
        assert path is None or same_coefficients(data, path.read_bytes())
    untouched = {"png.png", "cmyk.jpg", "small.jpg", "quarter.jpg"}
    assert {path.name for path in originals.values()} == untouched | {"turned.jpg"}
    assert {path.read_bytes() for path in originals.values() if path.name in untouched} < {*stored}
    report = json.loads((out / "report.json").read_bytes())
    untiled = {each["file"] for each in report["findings"] if each["found"] == "untiled"}
    assert untiled == {"bb/quarter.jpg"}
    manifest = Manifest.parse((out / "dataset.json").read_bytes(), "here")
    assert manifest.tiles and manifest.report["untiled"] == 1
    assert "1 stored without tiles; decoded whole" in capsys.readouterr().out


def test_originals_are_kept_on_request(folder: Path, convert: Convert) -> None:
    """With --no-tiles, neither plan nor manifest has tiles, and no image is changed."""
    out = convert("folder", folder, "--no-tiles", "--task-index", 0, "--task-count", 2)
    assert not load_plan(out / ".converting/plan").tiles
    out = convert("folder", folder, "--no-tiles", out="whole")
    assert not Manifest.parse((out / "dataset.json").read_bytes(), "here").tiles
    assert not any(has_tiles(sample.image) for sample in everything(out))


def test_other_options_are_another_data_set(folder: Path, convert: Convert) -> None:
    """A folder with originals does not become one with tiles by itself; --force makes it one."""
    originals = shown(convert("folder", folder, "--no-tiles"))
    with pytest.raises(UsageError, match="--force"):
        convert("folder", folder, "--tiles")
    assert shown(convert("folder", folder)) == originals
    out = convert("folder", folder, "--force")
    assert shown(out) == shown(convert("folder", folder, "--tiles", out="again")) != originals


@pytest.mark.parametrize("options", [(), ("--short-side", 150)], ids=["as they are", "resized"])
def test_tiles_are_a_function_of_the_image(
    folder: Path, convert: Convert, options: tuple[object, ...]
) -> None:
    """One process, three, or the tasks of an array job: all files are the same bytes."""
    alone = shown(convert("folder", folder, "--shards", 3, "--workers", 1, *options, out="alone"))
    together = convert("folder", folder, "--shards", 3, "--workers", 3, *options, out="together")
    assert shown(together) == alone
    for task in (1, 0):
        share = ("--task-index", task, "--task-count", 2, "--workers", 1)
        array = convert("folder", folder, "--shards", 3, *share, *options, out="array")
    main(["finish", str(array)])
    assert shown(array) == alone


@pytest.fixture
def other_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this Pillow be none of the wheels that bring libjpeg-turbo."""
    without_library(monkeypatch)


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process find no libjpeg-turbo beside Pillow."""
    transcoder._child(os.getpid()).end()
    monkeypatch.setattr(transcoder, "LIBRARY", "nothing")
    monkeypatch.setattr(transcoder, "library", cache(transcoder.library.__wrapped__))
    monkeypatch.setattr(pack, "library", transcoder.library)


@pytest.mark.usefixtures("other_pillow")
def test_presets_need_no_library(folder: Path, convert: Convert) -> None:
    """What is encoded anyway gets its markers from Pillow; the pixels are those without them."""
    options = ("--short-side", 220, "--quality", 90)
    plain = everything(convert("folder", folder, *options, "--no-tiles", out="plain"))
    marked = everything(convert("folder", folder, *options))
    assert [each.key for each in marked] == [each.key for each in plain]
    for sample, original in zip(marked, plain, strict=True):
        assert has_tiles(sample.image) == (sample.key not in ("bb_turned", "bb_small"))
        assert np.array_equal(pixels(sample.image), pixels(original.image))


@pytest.mark.usefixtures("other_pillow")
def test_a_missing_library_is_named_before_anything_is_read(
    folder: Path, convert: Convert, tmp_path: Path
) -> None:
    """The error has what to type."""
    with pytest.raises(MissingProgram, match="pip install --force-reinstall"):
        convert("folder", folder, "--tiles")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("other_pillow")
def test_without_the_library_originals_are_stored(
    folder: Path, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line says so, and the folder is that of --no-tiles."""
    out = convert("folder", folder)
    line = "original bytes are stored, as with --no-tiles: restart tiles need the libjpeg-turbo"
    assert capsys.readouterr().err.count(line) == 1
    assert shown(out) == shown(convert("folder", folder, "--no-tiles", out="originals"))


@pytest.mark.parametrize("is_first_without", [False, True])
def test_hosts_of_an_array_job_do_as_the_first(
    folder: Path, convert: Convert, is_first_without: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two hosts lacks the library: no folder has originals and tiles side by side.

    The host without it writes originals if it is the first; if not, it says what is missing.
    """

    def task(number: int, is_without: bool) -> Path:
        with monkeypatch.context() as context:
            if is_without:
                without_library(context)
            return convert("folder", folder, "--task-index", number, "--task-count", 2)

    out = task(0, is_first_without)
    if not is_first_without:
        with pytest.raises(MissingProgram, match="restart tiles need"):
            task(1, is_without=True)
    task(1, is_without=False)
    main(["finish", str(out)])
    options = ("--no-tiles",) if is_first_without else ("--tiles",)
    assert shown(out) == shown(convert("folder", folder, *options, out="alone"))


@pytest.mark.parametrize(
    ("sent", "error"),
    [(signal.SIGKILL, Problem), (signal.SIGTERM, Problem), (signal.SIGSEGV, Refused)],
)
def test_a_child_that_is_killed_is_no_defect_of_the_image(
    sent: signal.Signals, error: type[Exception]
) -> None:
    """Else the same images would become other bytes on a machine that is short of memory."""
    data = textured(1)
    rewritten(data)
    os.kill(transcoder._child(os.getpid()).pid, sent)
    with pytest.raises(error):
        for _ in range(1000):  # a signal takes a moment
            rewritten(data)
    assert same_coefficients(rewritten(data), data)


def test_each_process_has_a_child_of_its_own_which_ends_with_it() -> None:
    """Processes that are forked later share no socket with the one that forked them."""
    data = textured(1)
    expected = rewritten(data, 4)
    ours = transcoder._child(os.getpid()).pid
    reader, writer = os.pipe()
    if not (forked := os.fork()):
        is_right = rewritten(data, 4) == expected
        os.write(writer, struct.pack("=Q?", transcoder._child(os.getpid()).pid, is_right))
        os._exit(0)
    os.waitpid(forked, 0)
    theirs, is_right = struct.unpack("=Q?", os.read(reader, 100))
    assert is_right and theirs != ours
    until(lambda: not Path(f"/proc/{theirs}").exists(), "the child has ended")
    assert rewritten(data, 4) == expected


@pytest.mark.parametrize("seed", range(3))
def test_no_damage_reaches_this_process(seed: int) -> None:
    """Of JPEGs with random bytes in the header or after it, each is a JPEG or is refused."""
    random, data = Random(seed), textured(seed)
    outcomes = set()
    for _ in range(60):
        damaged = bytearray(data)
        for _ in range(random.choice((1, 5))):
            damaged[random.randrange(2, random.choice((700, len(data))))] = random.randrange(256)
        try:
            outcomes.add(rewritten(bytes(damaged), 4)[:2] == START)
        except Refused as refusal:
            outcomes.add(str(refusal))
    assert len(outcomes) > 5 and False not in outcomes
    assert same_coefficients(rewritten(data, 4), data)


def test_verify_compares_with_the_originals(
    folder: Path, convert: Convert, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a folder, a zip or a tar: how many are equal, and how many have no original there."""
    out = convert("folder", folder)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.glob("*/*")}
    del files["a/3.jpg"]
    archive = write_zip(folder.parent / "images.zip", files)
    with tarfile.open(folder.parent / "images.tar", "w") as tar:
        tar.add(folder / "a", "a")
    # The image that was turned upright is a new one.
    for source, bytes_, coefficients, without in [
        (folder, 4, 13, 1),
        (archive, 4, 12, 2),
        (Path(tar.name), 1, 7, 10),
    ]:
        capsys.readouterr()
        main(["verify", str(out), "--source", str(source), "--workers", "1"])
        line = (
            f"{source}: {bytes_} images have the bytes of their originals, {coefficients} with"
            f" restart tiles have their coefficients, {without} have no original there"
        )
        assert line in capsys.readouterr().out
    main(["verify", str(out), "--source", str(folder), "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert (printed["same_bytes"], printed["same_coefficients"]) == (4, 13)
    assert (printed["without_original"], printed["faults"]) == (1, [])
    plain = convert("folder", folder, "--no-tiles", out="plain")
    main(["verify", str(plain), "--source", str(folder)])
    assert "17 images have the bytes of their originals, 0 with" in capsys.readouterr().out


def test_verify_names_a_source_that_is_none(folder: Path, convert: Convert) -> None:
    """Not every file is a source."""
    out = convert("folder", folder)
    with pytest.raises(UsageError, match="a folder, a zip or a tar"):
        main(["verify", str(out), "--source", str(folder / "a/0.jpg")])


def with_tiles_of(data: bytes, claimed: bytes) -> bytes:
    """Return an image with tiles that claims to be made of another."""
    made = tiled(data)
    digests = (sha256(each).digest() for each in (data, claimed))
    return made.replace(*digests)


def test_verify_names_an_image_of_other_coefficients(tmp_path: Path, convert: Convert) -> None:
    """Also where all checksums are right: a foreign image, and a list that does not fit."""
    real, better = textured(1, quality=80), textured(1, quality=81)
    broken = bytearray(tiled(textured(2)))
    broken[frame_of(bytes(broken)).tiles_at + 60] ^= 1
    stored = {"a/1.jpg": with_tiles_of(better, real), "b/1.jpg": bytes(broken)}
    many = {f"{kind}/x{n}.jpg": textured(30 + n) for kind in "ab" for n in range(2)}
    out = convert("folder", write_files(tmp_path / "stored", stored | many))
    originals = write_files(tmp_path / "originals", {"one.jpg": real})
    source = Originals.of(originals)
    faults = []
    for sample in everything(out):
        try:
            compared(sample, "here", True, source)
        except DataError as error:
            faults.append(str(error))
    assert sorted(faults) == [
        "here: sample a_1: its coefficients are not those of one.jpg",
        "here: sample b_1: its list of tiles does not fit it",
    ]
    with pytest.raises(DataError, match="2 faults"):
        main(["verify", str(out), "--source", str(originals)])
