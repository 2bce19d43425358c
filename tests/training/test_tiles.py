"""Restart tiles in the loader: the pixels of the whole file, from a part of its bytes."""

import io
import struct
from collections.abc import Callable
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import simplejpeg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision.io import decode_image

from convert.folder import FolderOfClasses
from convert.images.tiles import tiled
from convert.options import Packing
from imagenet.model import TASK
from imagenet.recipes import ImageNet
from nginx.serve import serving
from nginx.site import Site
from shards.images import Frame, jpeg_frame
from shards.tiles import grid_of, tile_bounds, window
from tests.training.test_decode import encoded, photograph
from training.data import decode as decoder
from training.data.decode import Box
from training.data.open import open_data
from training.data.pool import training_pool
from training.ranks import Ranks

SIZES = [(150, 203), (333, 96), (97, 512), (256, 256), (129, 65)]  # height and width
LARGE = 3  # of SIZES
KINDS: dict[str, dict[str, object]] = {
    "4:4:4": {"subsampling": "4:4:4"},
    "4:2:2": {"subsampling": "4:2:2"},
    "4:4:0": {},
    "4:2:0": {"subsampling": "4:2:0"},
    "progressive": {"progressive": True},
    "gray": {},
    "gray of two blocks": {"subsampling": "4:2:0"},
}


@cache
def pair(kind: str, number: int) -> tuple[bytes, bytes]:
    """Return a JPEG of a kind and a size, without and with tiles."""
    image = photograph(number, *SIZES[number])
    if kind.startswith("gray"):
        image = image.convert("L")
    if kind == "4:4:0":  # which Pillow does not write
        data = simplejpeg.encode_jpeg(np.asarray(image), 90, colorsubsampling="440")
    else:
        data = encoded(image, quality=90, **KINDS[kind])
    return data, tiled(data)


def frame_of(data: bytes) -> Frame:
    """Return the frame header of a JPEG that has one."""
    frame = jpeg_frame(data)
    assert frame is not None
    return frame


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.integers(0, len(SIZES) - 1),
    st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1), st.floats(0, 1)),
    st.sampled_from([2, 8, 16, 32, 1000]),
)
def test_any_box_has_the_pixels_of_the_whole_file(
    kind: str, number: int, crop: tuple[float, float, float, float], side: int
) -> None:
    """To the last bit, wherever it lies and at any resolution it is decoded at."""
    data, with_tiles = pair(kind, number)
    height, width = SIZES[number]
    across, down = 1 + int(crop[0] * (width - 1)), 1 + int(crop[1] * (height - 1))
    box = Box(int(crop[2] * (width - across)), int(crop[3] * (height - down)), across, down)
    expected = decoder.crop(data, lambda *_: box, side)
    result = decoder.crop(with_tiles, lambda *_: box, side)
    assert result.shrink == expected.shrink
    assert np.array_equal(result.pixels, expected.pixels)


@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_other_programs_read_the_whole_file(kind: str) -> None:
    """torchvision's decoder and Pillow see the same pixels as without tiles."""
    data, with_tiles = pair(kind, 3)
    assert frame_of(with_tiles).tiles_at and not frame_of(data).tiles_at
    of_torchvision, of_pillow = (
        [decode(each) for each in (data, with_tiles)] for decode in (by_torchvision, by_pillow)
    )
    assert np.array_equal(*of_torchvision)
    assert np.array_equal(*of_pillow)


def by_torchvision(data: bytes) -> np.ndarray:
    """Return an image as torchvision decodes it."""
    return decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8)).numpy()


def by_pillow(data: bytes) -> np.ndarray:
    """Return an image as Pillow decodes it."""
    return np.asarray(Image.open(io.BytesIO(data)))


@pytest.mark.parametrize("kind", ["4:2:0", "4:2:2", "4:4:0"])
def test_a_box_at_every_border_between_tiles_has_its_colours(kind: str) -> None:
    """Where chroma is smoothed across a border, the tile beside it is decoded as well."""
    data, with_tiles = pair(kind, 3)
    whole = decoder.decode(data)
    for edge in range(100, 164):
        for box in (Box(edge, 90, 30, 20), Box(90, edge, 20, 30), Box(edge - 40, 90, 40, 20)):
            result = decoder.crop(with_tiles, lambda *_, box=box: box, 1000).pixels
            rows, columns = slice(box.top, box.top + box.height), box.left + np.arange(box.width)
            assert np.array_equal(result, whole[rows, columns]), box


def test_only_tiles_under_the_box_reach_the_decoder() -> None:
    """A box in a corner costs the tiles that it touches, of whatever size the file is."""
    _, data = pair("4:2:0", 3)
    frame = frame_of(data)
    assert grid_of(data, frame) == (8, 16, 32, 16)
    part = window(data, frame, 130, 100, 180, 150)
    assert part is not None
    assert (part.left, part.top, part.width, part.height) == (128, 96, 64, 54)
    assert len(part.data) - frame.scan_at < (len(data) - frame.scan_at) / 8
    assert decoder.decode(bytes(part.data)).shape == (54, 64, 3)


def test_a_box_of_all_columns_from_the_top_is_not_cut_out() -> None:
    """The lowered height does as well there, without a copy."""
    _, data = pair("4:2:0", 3)
    assert window(data, frame_of(data), 0, 0, 256, 99) is None


def _wrong_length(data: bytearray, frame: Frame) -> None:
    data[frame.tiles_at + 60] ^= 1


def _wrong_order(data: bytearray, frame: Frame) -> None:
    first = data.index(b"\xff\xd1", frame.scan_at)
    data[first + 1] = 0xD3


def _no_marker(data: bytearray, frame: Frame) -> None:
    data[data.index(b"\xff\xd1", frame.scan_at)] = 0xFE


def _too_few(data: bytearray, frame: Frame) -> None:
    """Take the last length off the list."""
    at = frame.tiles_at
    (length,) = struct.unpack_from(">H", data, at + 2)
    del data[at + length : at + length + 2]
    struct.pack_into(">H", data, at + 2, length - 2)


def _more_bytes(data: bytearray, frame: Frame) -> None:
    data += b"\xff\xd9"


def _empty_tile(data: bytearray, frame: Frame) -> None:
    """Give the first tile no bytes and the second one those of both."""
    at = frame.tiles_at + 4 + 16 + 32
    first, second = struct.unpack_from("<2H", data, at)
    struct.pack_into("<2H", data, at, 0, first + second)


def _other_interval(data: bytearray, frame: Frame) -> None:
    at = data.index(b"\xff\xdd\x00\x04")
    struct.pack_into(">H", data, at + 4, frame.restart_interval + 1)


@pytest.mark.parametrize(
    "spoil",
    [_wrong_length, _wrong_order, _no_marker, _too_few, _more_bytes, _empty_tile, _other_interval],
)
def test_a_list_that_does_not_fit_is_not_believed(
    spoil: Callable[[bytearray, Frame], None],
) -> None:
    """The whole file is decoded then, as other readers do."""
    _, whole = pair("4:2:0", 3)
    data = bytearray(whole)
    spoil(data, frame_of(whole))
    frame = frame_of(bytes(data))
    grid = grid_of(bytes(data), frame)
    assert grid is None or tile_bounds(bytes(data), frame, grid) is None
    assert window(bytes(data), frame, 130, 100, 180, 150) is None


@pytest.mark.parametrize("spoil", [_wrong_length, _too_few, _empty_tile])
def test_a_wrong_list_changes_no_pixel(spoil: Callable[[bytearray, Frame], None]) -> None:
    """Pixels are those of the scan, whatever its list says."""
    plain, whole = pair("4:2:0", 3)
    data = bytearray(whole)
    spoil(data, frame_of(whole))
    box = Box(130, 100, 50, 50)
    result = decoder.crop(bytes(data), lambda *_: box, 1000).pixels
    assert np.array_equal(result, decoder.crop(plain, lambda *_: box, 1000).pixels)


def test_damage_within_a_tile_leads_to_the_whole_file() -> None:
    """A tile that does not decode cleanly is left to the reader that judges the whole file."""
    _, whole = pair("4:2:0", 3)
    frame = frame_of(whole)
    grid = grid_of(whole, frame)
    assert grid is not None
    bounds = tile_bounds(whole, frame, grid)
    assert bounds is not None
    at = int(bounds[7 * grid.columns + grid.columns // 2])
    data = whole[:at] + b"\xff\x00" * 15 + whole[at + 30 :]  # no Huffman code
    part = window(data, frame, 130, 100, 180, 150)
    assert part is not None
    assert decoder._decoded(part.data, part.width, part.height, 1, strict=True) is None
    box = Box(130, 100, 50, 50)
    without_tiles = decoder._with_turbo(data, frame, box, 154, 1, None)
    result = decoder.crop(data, lambda *_: box, 1000).pixels
    assert np.array_equal(result, without_tiles.pixels)


@pytest.fixture(scope="module")
def two_forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Convert the same images, one of them a PNG, without and with tiles."""
    root = tmp_path_factory.mktemp("forms")
    for number in range(40):
        path = root / "images" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        size = LARGE if number % 3 else number % len(SIZES)  # of most, a conversion makes tiles
        path.write_bytes(pair("4:2:0", size)[0])
    (root / "images/a/one.png").write_bytes(encoded(photograph(0, 150, 203), "PNG"))
    for name, tiles in (("plain", False), ("tiles", True)):
        packing = Packing(tiles=tiles, shards=2, sidecars=True, workers=1, allow=("leaks",))
        FolderOfClasses(root / "images", root / name, name="set", packing=packing).run()
    return root / "plain", root / "tiles"


def batches(location: str, **options: Any) -> list[tuple[bytes, list[int]]]:
    """Return images and labels of some steps of training, and of evaluation."""
    config = ImageNet(
        data=location, batch_size=8, workers=0, device="cpu", image_size=48, **options
    )
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    data = open_data(config, ranks, partial(TASK.transforms, config), TASK.name, 2)
    given = chain(islice(data.training(0), 7), data.evaluation())
    return [(batch.images.numpy().tobytes(), batch.labels.tolist()) for batch in given]


def test_batches_are_those_of_the_originals(two_forms: tuple[Path, Path]) -> None:
    """Every image and label of training, and of evaluation, whichever form is read."""
    plain, with_tiles = two_forms
    assert batches(str(with_tiles)) == batches(str(plain))


@pytest.mark.parametrize("exact_epochs", [False, True])
def test_tiles_come_over_http_and_from_the_cache_of_a_node(
    two_forms: tuple[Path, Path], exact_epochs: bool, tmp_path: Path
) -> None:
    """From a server, by a cache that is empty, and by a full one: the batches of the folder."""
    _, with_tiles = two_forms
    expected = batches(str(with_tiles), exact_epochs=exact_epochs)
    with_tiles.chmod(0o755)
    with serving(Site(with_tiles, port=0, native=True)) as server:
        for cache in ("", str(tmp_path), str(tmp_path)):
            assert batches(server.url, exact_epochs=exact_epochs, cache=cache) == expected
    assert any(tmp_path.iterdir())


def test_an_exact_epoch_has_the_rows_and_images_of_the_originals(
    two_forms: tuple[Path, Path],
) -> None:
    """Each row once; the order follows how many bytes lie side by side, so images are compared
    at the places that they have.
    """
    plain, with_tiles = two_forms

    def config(folder: Path) -> ImageNet:
        return ImageNet(
            data=str(folder), batch_size=8, workers=0, device="cpu", image_size=48,
            exact_epochs=True,
        )  # fmt: skip

    ranks, options = Ranks(0, 1, 0, 1, torch.device("cpu")), config(with_tiles)
    data = open_data(options, ranks, partial(TASK.transforms, options), TASK.name, 2)
    transforms, pool = TASK.transforms(options, 0), training_pool(config(plain))
    calls = list[int]()
    for batch in islice(data.training(0), data.epoch_steps):
        assert batch.rows is not None
        for image, row in zip(batch.images, batch.rows.tolist(), strict=True):
            random = np.random.default_rng((options.seed, 0, len(calls)))
            original = pool.read(row, 1)[row].sample.image
            expected = transforms.for_training(original, random)
            assert np.array_equal(image.permute(1, 2, 0).numpy(), expected)
            calls.append(row)
    assert sorted(calls) == list(range(len(pool.index)))
