"""A small ImageNet in all published layouts of the large image."""

import io
import random
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

DEVKIT = "ILSVRC2012_devkit_t12"
TREE = "ILSVRC/Data/CLS-LOC"


@dataclass(frozen=True)
class Original:
    """An image and what it shows."""

    stem: str
    wnid: str
    data: bytes


@dataclass(frozen=True)
class SmallImageNet:
    """Images of a few classes, and the devkit's own numbers of these classes."""

    train: list[Original]
    val: list[Original]
    devkit_numbers: dict[str, int]  # wnid -> ILSVRC2012_ID, in another order than the wnids

    @property
    def wnids(self) -> list[str]:
        return sorted(self.devkit_numbers)

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
        return written(root, files)

    def kaggle(self) -> dict[str, bytes]:
        """Write the files of Kaggle's competition."""
        solution = "ImageId,PredictionString\n" + "".join(
            f"{image.stem},{image.wnid} 1 2 3 4 {image.wnid} 5 6 7 8 \n" for image in self.val
        )
        mapping = "".join(f"{wnid} {self.words(wnid)}\n" for wnid in self.wnids)
        return {
            "LOC_val_solution.csv": solution.encode(),
            "LOC_synset_mapping.txt": mapping.encode(),
            "ILSVRC/Annotations/CLS-LOC/train/n01440764/n01440764_1.xml": b"<annotation/>",
            "ILSVRC/Data/CLS-LOC/test/ILSVRC2012_test_00000001.JPEG": self.train[0].data,
            **{f"{TREE}/{name}": data for name, data in self.tree(flat=True).items()},
        }

    def kaggle_zip(self, path: Path) -> Path:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, data in self.kaggle().items():
                archive.writestr(name, data)
        return path

    def tree(self, flat: bool) -> dict[str, bytes]:
        files = {f"train/{image.wnid}/{image.stem}.JPEG": image.data for image in self.train}
        for image in self.val:
            files[f"val/{'' if flat else image.wnid + '/'}{image.stem}.JPEG"] = image.data
        return files

    def devkit(self) -> dict[str, bytes]:
        """Return meta.mat with leaves and inner nodes, and the ground truth in its numbers."""
        truth = "".join(f"{self.devkit_numbers[image.wnid]}\n" for image in self.val)
        return {
            "meta.mat": self.meta(),
            "ILSVRC2012_validation_ground_truth.txt": truth.encode(),
            "readme.txt": b"the development kit",
        }

    def meta(self) -> bytes:
        from scipy.io import savemat

        leaves = sorted((number, wnid) for wnid, number in self.devkit_numbers.items())
        rows = [(number, wnid, self.words(wnid), "a thing", 0) for number, wnid in leaves]
        inner = [(len(rows) + 1, "n00001740", "entity", "that which is", 2)]
        names = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children"]
        table = np.array([[row] for row in rows + inner], dtype=[(name, object) for name in names])
        buffer = io.BytesIO()
        savemat(buffer, {"synsets": table}, do_compression=True)
        return buffer.getvalue()

    @staticmethod
    def words(wnid: str) -> str:
        """Return class names, of which two are the same, as in the real set."""
        return "crane" if wnid in ("n02012849", "n03126707") else f"thing {wnid[-3:]}, whatnot"


def tar(files: dict[str, bytes], layout: str = "pax") -> bytes:
    """Return a tar of these files: official (GNU), or as tarfile makes it with odd dates."""
    buffer = io.BytesIO()
    mode = layout if ":" in layout else "w"
    form = tarfile.GNU_FORMAT if layout == "gnu" else tarfile.PAX_FORMAT
    with tarfile.open(fileobj=buffer, mode=mode, format=form) as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            info.mtime = 1_340_000_000.5 if form == tarfile.PAX_FORMAT else 1_340_000_000
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def written(root: Path, files: dict[str, bytes]) -> Path:
    """Write the files below the root."""
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def drawn(draw: random.Random, form: str = "JPEG", mode: str = "RGB") -> bytes:
    """Return a small image that is unlike all others."""
    noise = np.random.default_rng(draw.getrandbits(32)).integers(0, 256, (12, 16, 3), np.uint8)
    image = Image.fromarray(noise).resize((40, 30), Image.Resampling.BICUBIC).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, form)
    return buffer.getvalue()


TEXTURES = ("rows", "columns", "squares", "disc")
HUES = (0, 35, 90, 160, 220)  # of 256


def twenty_classes(train: int, val: int) -> SmallImageNet:
    """Return twenty classes that a small model can learn: a hue and a texture each, under noise."""
    draw = np.random.default_rng(1)
    wnids = [f"n{number:08d}" for number in draw.choice(10**8, 20, replace=False)]
    variants = [(hue, texture) for hue in HUES for texture in TEXTURES]
    images = [
        (wnid, number, textured(draw, *variant))
        for wnid, variant in zip(wnids, variants, strict=True)
        for number in range(train + val)
    ]
    shown = [(wnid, data) for wnid, number, data in images if number >= train]
    order, numbers = draw.permutation(len(shown)), draw.permutation(20)
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
        devkit_numbers={wnid: 1 + int(n) for wnid, n in zip(wnids, numbers, strict=True)},
    )


def textured(draw: np.random.Generator, hue: int, texture: str) -> bytes:
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
    buffer = io.BytesIO()
    Image.fromarray(tones.astype(np.uint8), "HSV").convert("RGB").save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
