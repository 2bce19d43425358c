"""Data of tests: images, archives in all layouts, small shard folders, real digits."""

import gzip
import io
import json
import random
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from rackrun.catdog.demo import write_archive
from rackrun.shards.index import (
    Manifest,
    Row,
    Split,
    index_name,
    serialize_index,
    shard_name,
)
from rackrun.shards.open import open_source
from rackrun.shards.samples import Sample, samples
from rackrun.shards.source import Source
from rackrun.shards.writer import write_shard
from tests.lab.run import run, write

ORIENTATION = 0x0112
DEVKIT = "ILSVRC2012_devkit_t12"
TREE = "ILSVRC/Data/CLS-LOC"
SYNSETS = Path(__file__).parents[2] / "convert" / "synsets.txt"
TEXTURES = ("rows", "columns", "squares", "disc")
HUES = (0, 35, 90, 160, 220)  # of 256
TRAINED_ON, TESTED_ON = 1437, 360
SIDES = (28, 28)


def encoded(image: Image.Image, form: str = "JPEG", **options: object) -> bytes:
    """Return the image as the bytes of a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def drawn(
    seed: object, size: tuple[int, int] = (48, 36), format: str = "JPEG", **save: Any
) -> bytes:
    """Return an image of a few shapes; `mode` and the arguments of Pillow's save may be given."""
    draw = random.Random(str(seed))
    image = Image.new("RGB", size, _color(draw))
    for _ in range(6):
        x, y = draw.randrange(size[0]), draw.randrange(size[1])
        ImageDraw.Draw(image).ellipse((x, y, x + 14, y + 10), fill=_color(draw))
    return encoded(image.convert(save.pop("mode", "RGB")), format, **save)


def textured(seed: int, size: tuple[int, int] = (300, 200), **save: Any) -> bytes:
    """Return a JPEG with details everywhere, as in photographs; options as for `drawn`."""
    grain = np.random.default_rng(seed).integers(256, size=(size[1] // 3, size[0] // 3, 3))
    image = Image.fromarray(grain.astype(np.uint8)).resize(size, Image.Resampling.BICUBIC)
    return encoded(image.convert(save.pop("mode", "RGB")), save.pop("format", "JPEG"), **save)


def rotated(seed: object, orientation: int = 6) -> bytes:
    """Return a JPEG whose EXIF orientation turns it by 90 degrees."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return drawn(seed, exif=exif)


def photograph(seed: int, height: int, width: int) -> Image.Image:
    """Return an image with the spectrum of a photograph, in color, with a few hard edges."""
    draw = np.random.default_rng(seed)
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    frequency[0, 0] = 1
    noise = draw.standard_normal((3, height, width))
    planes = np.fft.irfft2(np.fft.rfft2(noise) / frequency**1.2, s=(height, width))
    planes /= planes.std(axis=(1, 2), keepdims=True) + 1e-9
    for plane in planes:
        top, left = draw.integers(0, height), draw.integers(0, width)
        plane[top : top + height // 3, left : left + width // 3] += draw.normal()
    pixels = np.clip(128 + planes * np.array([50, 20, 20])[:, None, None], 0, 255)
    return Image.fromarray(pixels.astype(np.uint8).transpose(1, 2, 0), "YCbCr").convert("RGB")


def kaggle(count: int) -> dict[str, bytes]:
    """Return names and images as in Kaggle's train.zip, `count` of each class."""
    return {
        f"train/{kind}.{number}.jpg": drawn(f"{kind} {number}")
        for kind in ("cat", "dog")
        for number in range(count)
    }


def zipped(files: Mapping[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    """Return a zip of these files."""
    stored = io.BytesIO()
    with zipfile.ZipFile(stored, "w", how) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return stored.getvalue()


def write_zip(path: Path, files: Mapping[str, bytes], deflated: bool = False) -> Path:
    """Write a zip of these files."""
    path.write_bytes(zipped(files, zipfile.ZIP_DEFLATED if deflated else zipfile.ZIP_STORED))
    return path


def _color(draw: random.Random) -> tuple[int, int, int]:
    return draw.randrange(256), draw.randrange(256), draw.randrange(256)


Members = Iterable[tuple[str, bytes]]
"""Names and contents; a name may come twice."""


def tar(files: Mapping[str, bytes] | Members, layout: str = "gnu") -> bytes:
    """Return a tar of these files: official (gnu), as tarfile makes it (pax), or packed (w:gz)."""
    buffer = io.BytesIO()
    mode = layout if ":" in layout else "w"
    form = tarfile.GNU_FORMAT if layout == "gnu" else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=buffer, mode=mode, format=form) as archive:
        for name, data in files.items() if isinstance(files, Mapping) else files:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1_340_000_000.5 if form == tarfile.PAX_FORMAT else 1_340_000_000
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write_tar(path: Path, members: Members, layout: str = "gnu") -> Path:
    """Write a tar of these members, padded to 10,240 bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(tar(members, layout))
    return path


def by_webdataset(folder: Path) -> dict[str, int]:
    """Write tars as webdataset-imagenet does: with TarWriter, a number in .cls."""
    import webdataset

    labels = {}
    for split, counts in (("train", (5, 7)), ("val", (4,))):
        for number, count in enumerate(counts):
            name = folder / f"imagenet-{split}-{number:06d}.tar"
            with name.open("wb") as file, webdataset.TarWriter(file) as sink:
                for n in range(count):
                    key = f"{split}{number}_{n}"
                    labels[key] = (number + n) % 3
                    sink.write({"__key__": key, "jpg": drawn(key), "cls": labels[key]})
    return labels


def as_hugging_face(folder: Path) -> dict[str, int]:
    """Write tars like imagenet-1k-wds: four digits, .json beside, folders with dots in keys."""
    labels = {}
    for split, counts in (("train", (4, 3)), ("validation", (3,))):
        for number, count in enumerate(counts):
            members = []
            for n in range(count):
                key = f"{'deep.er/' * 20}{split}{number}_{n}"
                labels[key] = n % 2
                extra = json.dumps({"label": n % 2, "width": 48}).encode()
                kind, suffix = (("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp"))[n % 3]
                members += [(f"{key}.json", extra), (f"{key}.{suffix}", drawn(key, format=kind))]
                members += [(f"{key}.seg.npy", b"of no use here")] * (n == 1)
            name = folder / f"imagenet1k-{split}-{number:04d}.tar"
            write_tar(name, members, "pax")
    return labels


def by_name(folder: Path) -> dict[str, int]:
    """Write tars whose folders are splits, with class names in .txt and the image last."""
    labels = {}
    for split in ("train", "test"):
        members = [("__readme__.txt", b"hello")]
        for n in range(4):
            labels[f"{split}{n}"] = n % 2
            name = ("oak tree", "pine")[n % 2].encode()
            members += [
                (f"{split}{n}.txt", name + b"\n"),
                (f"{split}{n}.jpeg", drawn(split + str(n))),
            ]
        write_tar(folder / split / "00000.tar", members)
    return labels


def tars_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*.tar"))}


@dataclass(frozen=True)
class Original:
    """An image and what it shows."""

    stem: str
    wnid: str
    data: bytes


@cache
def synsets() -> dict[str, str]:
    """Return the words of ImageNet's classes by wnid, in the order of the devkit's numbers."""
    return dict(line.split(" ", 1) for line in SYNSETS.read_text().splitlines())


@dataclass(frozen=True)
class SmallImageNet:
    """Images of a few classes of ImageNet."""

    train: list[Original]
    val: list[Original]

    @property
    def wnids(self) -> list[str]:
        return sorted({image.wnid for image in self.train})

    def archives(self, root: Path, layout: str = "pax") -> Path:
        """Write the two official tars and the devkit."""
        train = {
            f"{wnid}.tar": tar(
                {f"{image.stem}.JPEG": image.data for image in self.train if image.wnid == wnid},
                layout,
            )
            for wnid in reversed(self.wnids)
        }
        root.mkdir(parents=True, exist_ok=True)
        (root / "ILSVRC2012_img_train.tar").write_bytes(tar(train, layout))
        val = {f"{image.stem}.JPEG": image.data for image in self.val}
        (root / "ILSVRC2012_img_val.tar").write_bytes(tar(val, layout))
        (root / f"{DEVKIT}.tar.gz").write_bytes(
            tar({f"{DEVKIT}/data/{name}": data for name, data in self.devkit().items()}, "w:gz")
        )
        return root

    def folders(self, root: Path, flat: bool = False) -> Path:
        """Write class folders; with `flat`, the validation set in one, with the devkit."""
        files = self.tree(flat=flat)
        if flat:
            files |= {f"{DEVKIT}/data/{name}": data for name, data in self.devkit().items()}
        return write(root, files)

    def kaggle(self) -> dict[str, bytes]:
        """Write the files of Kaggle's competition."""
        solution = "ImageId,PredictionString\n" + "".join(
            f"{image.stem},{image.wnid} 1 2 3 4 {image.wnid} 5 6 7 8 \n" for image in self.val
        )
        return {
            "LOC_val_solution.csv": solution.encode(),
            "ILSVRC/Annotations/CLS-LOC/train/n01440764/n01440764_1.xml": b"<annotation/>",
            "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG": self.train[0].data,
            **{f"{TREE}/{name}": data for name, data in self.tree(flat=True).items()},
        }

    def kaggle_zip(self, path: Path) -> Path:
        return write_zip(path, self.kaggle(), deflated=True)

    def tree(self, flat: bool) -> dict[str, bytes]:
        files = {f"train/{image.wnid}/{image.stem}.JPEG": image.data for image in self.train}
        for image in self.val:
            files[f"val/{'' if flat else image.wnid + '/'}{image.stem}.JPEG"] = image.data
        return files

    def devkit(self) -> dict[str, bytes]:
        """Return the ground truth in the devkit's numbers, and what nobody reads."""
        numbers = {wnid: number for number, wnid in enumerate(synsets(), 1)}
        truth = "".join(f"{numbers[image.wnid]}\n" for image in self.val)
        return {
            "meta.mat": b"of no use",
            "ILSVRC2012_validation_ground_truth.txt": truth.encode(),
            "readme.txt": b"the development kit",
        }

    @staticmethod
    def words(wnid: str) -> str:
        """Return the words of a class; two of them have the same, as in the real set."""
        return synsets()[wnid]


def twenty_classes(train: int, val: int) -> SmallImageNet:
    """Return twenty classes that a small model can learn: a hue and a texture each, under noise."""
    draw = np.random.default_rng(1)
    wnids = draw.choice([*synsets()], 20, replace=False).tolist()
    variants = [(hue, texture) for hue in HUES for texture in TEXTURES]
    images = [
        (wnid, number, _patterned(draw, *variant))
        for wnid, variant in zip(wnids, variants, strict=True)
        for number in range(train + val)
    ]
    shown = [(wnid, data) for wnid, number, data in images if number >= train]
    order = draw.permutation(len(shown))
    return SmallImageNet(
        train=[
            Original(f"{wnid}_{number}", wnid, data)
            for wnid, number, data in images
            if number < train
        ],
        val=[
            Original(f"ILSVRC2012_val_{index:08d}", *shown[number])
            for index, number in enumerate(order, 1)
        ],
    )


def _patterned(draw: np.random.Generator, hue: int, texture: str) -> bytes:
    """Return a JPEG of 80 x 64 with a texture in a hue."""
    down, across = np.mgrid[:64, :80] + draw.integers(0, 64, (2, 1, 1))
    period = int(draw.integers(10, 16))
    light = {
        "rows": down % period < period / 2,
        "columns": across % period < period / 2,
        "squares": (down % period < period / 2) ^ (across % period < period / 2),
        "disc": np.hypot(down - down.mean(), across - across.mean()) < 2 * period,
    }[texture]
    tones = np.stack(
        [
            np.full(light.shape, (hue + draw.integers(-6, 7)) % 256),
            np.full(light.shape, 200),
            np.where(light, 230, 90) + draw.integers(-25, 26, light.shape),
        ],
        axis=2,
    )
    return encoded(Image.fromarray(tones.astype(np.uint8), "HSV").convert("RGB"), quality=90)


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return images, uint8 (1797, 28, 28), and labels, in a fixed random order."""
    from sklearn.datasets import load_digits

    result = load_digits()
    images = [Image.fromarray((image * 255 / 16).astype(np.uint8)) for image in result.images]
    larger = [np.asarray(image.resize(SIDES, Image.Resampling.BICUBIC)) for image in images]
    order = np.random.default_rng(0).permutation(len(larger))
    return np.stack(larger)[order], result.target[order].astype(np.uint8)


def mnist(train: int = TRAINED_ON, test: int = TESTED_ON, packed: bool = False) -> dict[str, bytes]:
    """Return name and content of the four files in which MNIST is published."""
    images, labels = digits()
    result = {}
    for part, first, count in (("train", 0, train), ("t10k", TRAINED_ON, test)):
        rows = slice(first, first + count)
        heads = struct.pack(">4L", 2051, count, *SIDES), struct.pack(">2L", 2049, count)
        result[f"{part}-images-idx3-ubyte"] = heads[0] + images[rows].tobytes()
        result[f"{part}-labels-idx1-ubyte"] = heads[1] + labels[rows].tobytes()
    if packed:
        return {f"{name}.gz": gzip.compress(data) for name, data in result.items()}
    return result


@dataclass(frozen=True)
class Tiny:
    """A shard folder, and what is in it."""

    folder: Path
    samples: list[list[Sample]]  # by shard

    @property
    def all(self) -> list[Sample]:
        """Return every sample, in the order of the shards."""
        return [sample for shard in self.samples for sample in shard]


def everything(source: Source, split: str = "train") -> list[Sample]:
    """Return every sample of a split, verified, in the order of the shards."""
    shards = source.manifest.split(split).shards
    return [sample for number in range(len(shards)) for sample in samples(source, split, number)]


def every_sample(location: Path | str, cache: str = "") -> list[Sample]:
    """Return the samples of all splits of a shard folder, each verified, in order."""
    source = open_source(str(location), cache)
    return [each for split in source.manifest.splits for each in everything(source, split.name)]


def write_tiny(
    folder: Path,
    shards: int = 3,
    samples: int = 10,
    size: int = 2000,
    seed: int = 0,
    splits: tuple[str, ...] = ("train",),
) -> Tiny:
    """Write a folder of random "images" of about this many bytes, readable by everyone."""
    dice = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o755)
    made: list[list[Sample]] = []
    parts = tuple(_write_split(folder, name, dice, shards, samples, size, made) for name in splits)
    (folder / "dataset.json").write_bytes(Manifest("tiny", ("cat", "dog"), parts).serialize())
    return Tiny(folder, made)


def _write_split(
    folder: Path,
    split: str,
    dice: random.Random,
    shards: int,
    samples: int,
    size: int,
    made: list[list[Sample]],
) -> Split:
    entries, rows = [], []
    for number in range(shards):
        inside = [_sample(dice, f"s{number}_{location}", size) for location in range(samples)]
        with write_shard(folder / shard_name("tiny", split, number)) as writer:
            for sample in inside:
                position = writer.add(sample.key, sample.label, sample.image)
                rows.append(_row(number, position, sample))
            entries.append(writer.close())
        made.append(inside)
    index, name = serialize_index(rows), index_name("tiny", split)
    (folder / name).write_bytes(index)
    return Split(split, len(rows), name, sha256(index).hexdigest(), tuple(entries))


def _sample(dice: random.Random, key: str, size: int) -> Sample:
    length = dice.randrange(size // 2, size * 3 // 2)
    return Sample(key, dice.randbytes(length), "jpg", dice.randrange(2))


def _row(number: int, position: tuple[int, int, int], sample: Sample) -> Row:
    offset, length, image_offset = position
    crc = zlib.crc32(sample.image)
    size = len(sample.image)
    return (number, offset, length, image_offset, size, sample.label, 8, 8, crc, b"jpg")


def numbered(image: bytes, number: int) -> bytes:
    """Return a JPEG with a comment, so that no other one has the same bytes."""
    comment = b"%d" % number
    return image[:2] + b"\xff\xfe" + struct.pack(">H", len(comment) + 2) + comment + image[2:]


def drawn_shards(folder: Path, images: int = 40, *options: str) -> Path:
    """Return real shards of a few images."""
    archive, shards = folder / f"train-{images}.zip", folder / f"drawn-{images}"
    write_archive(archive, images)
    done = run(["rackrun", "convert", "catdog", str(archive), str(shards), *options], folder)
    assert done.code == 0, done
    return shards
