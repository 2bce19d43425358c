"""The contestants of bench/peers.py: each makes batches of 64 x 3 x 224 x 224 for some seconds.

    python bench/peer_loaders.py NAME PLACE SECONDS     measure, one line of JSON
    python bench/peer_loaders.py write-NAME FROM TO     copy a folder of classes into its format

Each runs in its own process, with two workers if it has any, under a Python that may be another,
with the peers that bench/install_peers.sh installs. `stock` is what the peer's own examples do:
Pillow, float32, normalized in the worker. `uint8` is the same loader with the faster parts of
torchvision: its JPEG decoder and its second transforms, and uint8 batches.
"""

import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.utils.data import DataLoader, IterableDataset

SIZE, BATCH, WORKERS = 224, 64, 2
WARM_UP = 32  # batches: by then shuffle buffers are full
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

Transform = Callable[[bytes], torch.Tensor]


def stock() -> Transform:
    """Decode with Pillow and torchvision's first transforms: float32 (3, 224, 224)."""
    from PIL import Image
    from torchvision import transforms

    chain = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    return lambda data: chain(Image.open(io.BytesIO(data)).convert("RGB"))


def uint8() -> Transform:
    """Decode with torchvision's decoder and its second transforms: uint8 (3, 224, 224)."""
    from torchvision.io import ImageReadMode, decode_jpeg
    from torchvision.transforms import v2

    chain = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])

    def transform(data: bytes) -> torch.Tensor:
        encoded = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        return chain(decode_jpeg(encoded, mode=ImageReadMode.RGB))

    return transform


TRANSFORMS = {"stock": stock, "uint8": uint8}


def ours(location: str, exact: bool) -> Iterable[Any]:
    """Load with rackrun, from a folder or a URL."""
    from rackrun.training.data.worker_server import start_worker_server

    start_worker_server("rackrun.imagenet.model")  # as training does before it imports all the rest
    from rackrun.imagenet.model import TASK
    from rackrun.imagenet.recipes import ImageNet
    from rackrun.training.data.open import open_data
    from rackrun.training.ranks import Ranks

    config = ImageNet(
        data=location, workers=WORKERS, batch_size=BATCH, device="cpu", exact_epochs=exact
    )
    ranks = Ranks(0, 1, 0, 1, torch.device("cpu"))
    return open_data(
        config, ranks, [TASK.transforms(config, 0)], TASK.name, TASK.synthetic_classes
    ).training(0)


def webdataset(location: str, transform: Transform) -> Iterable[Any]:
    """Load with webdataset, as in its ImageNet example."""
    import webdataset

    shards = sorted(str(path) for path in Path(location).glob("*-train-*.tar"))
    data = webdataset.WebDataset(shards, resampled=True, shardshuffle=False)
    data = data.shuffle(1000).to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    return webdataset.WebLoader(data, batch_size=None, num_workers=WORKERS)


def image_folder(location: str, transform: Transform) -> Iterable[Any]:
    """Load with torchvision's ImageFolder and torch's DataLoader."""
    from torchvision.datasets import ImageFolder

    data = ImageFolder(location, transform, loader=lambda path: Path(path).read_bytes())
    return loader(data)


def streaming(location: str, transform: Transform) -> Iterable[Any]:
    """Load with MosaicML Streaming."""
    from streaming import StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, number: int) -> Any:
            sample = super().__getitem__(number)
            return transform(sample["jpeg"]), sample["label"]

    data = Images(local=location, shuffle=True, batch_size=BATCH)
    return DataLoader(data, BATCH, num_workers=WORKERS, drop_last=True)


def litdata(location: str, transform: Transform) -> Iterable[Any]:
    """Load with Lightning's litData."""
    from litdata import StreamingDataLoader, StreamingDataset

    class Images(StreamingDataset):
        def __getitem__(self, number: Any) -> Any:
            sample = super().__getitem__(number)
            return transform(sample["jpeg"]), sample["label"]

    data = Images(location, shuffle=True, drop_last=True)
    return StreamingDataLoader(data, batch_size=BATCH, num_workers=WORKERS)


def dali(location: str) -> Iterable[Any]:
    """Load with NVIDIA's DALI on the CPU, which decodes no more than the crop."""
    from nvidia.dali import fn, pipeline_def, types
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    @pipeline_def(batch_size=BATCH, num_threads=WORKERS, device_id=None)
    def images() -> Any:
        encoded, labels = fn.readers.file(file_root=location, random_shuffle=True, name="files")
        crops = fn.decoders.image_random_crop(encoded, device="cpu", output_type=types.RGB)
        resized = fn.resize(crops, size=(SIZE, SIZE), interp_type=types.INTERP_LINEAR)
        return fn.flip(resized, horizontal=fn.random.coin_flip()), labels

    return DALIClassificationIterator(images(), reader_name="files", auto_reset=True)


def spdl(location: str) -> Iterable[Any]:
    """Load with SPDL, in threads of this process, as its ImageNet example does."""
    import random

    import spdl.io
    from spdl.dataloader import DataLoader as ThreadLoader

    paths = [str(path) for path in sorted(Path(location).glob("*/*"))]
    resized = spdl.io.get_video_filter_desc(
        scale_width=256, scale_height=256, crop_width=SIZE, crop_height=SIZE, pix_fmt="rgb24"
    )

    def decoded(batch: list[str]) -> torch.Tensor:
        buffer = spdl.io.load_image_batch(
            batch, width=None, height=None, pix_fmt=None, filter_desc=resized, strict=True
        )
        return spdl.io.to_torch(buffer)

    random.shuffle(paths)
    return ThreadLoader(
        paths, batch_size=BATCH, drop_last=True, aggregator=decoded, num_threads=WORKERS,
        buffer_size=16, timeout=60,
    )  # fmt: skip


def ffcv(location: str) -> Iterable[Any]:
    """Load with FFCV, in threads of this process."""
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage

    pipelines = {
        "image": [
            RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
            RandomHorizontalFlip(),
            ToTensor(),
            ToTorchImage(convert_back_int16=False),
        ],
        "label": [IntDecoder(), ToTensor()],
    }
    order = OrderOption.RANDOM
    return Loader(location, BATCH, WORKERS, order=order, pipelines=pipelines, os_cache=True)


THREADED = {"dali": dali, "spdl": spdl, "ffcv": ffcv}
"""Loaders with threads and transforms of their own."""


class PureDecode(IterableDataset[int]):
    """Nothing but decoding whole images that are in memory: the limit."""

    def __init__(self, location: str) -> None:
        self.images = [path.read_bytes() for path in sorted(Path(location).glob("*/*"))[:400]]

    def __iter__(self) -> Iterator[int]:
        from simplejpeg import decode_jpeg

        while True:
            for start in range(0, len(self.images) - BATCH, BATCH):
                for data in self.images[start : start + BATCH]:
                    decode_jpeg(data)
                yield BATCH


def loader(data: Any) -> Iterable[Any]:
    """Return torch's DataLoader with the usual settings."""
    return DataLoader(data, BATCH, shuffle=True, num_workers=WORKERS, drop_last=True)


def batches(name: str, location: str) -> Iterable[Any]:
    """Yield the batches of a contestant, for an epoch at least."""
    who, _, how = name.partition("-")
    if who == "ours":
        return ours(location, exact=how.startswith("exact"))
    if who == "decode":
        return DataLoader(PureDecode(location), batch_size=None, num_workers=WORKERS)
    if who in THREADED:
        return THREADED[who](location)
    made = {"webdataset": webdataset, "folder": image_folder, "mds": streaming, "lit": litdata}
    return made[who](location, TRANSFORMS[how]())


def write_mds(source: Path, target: Path) -> None:
    """Write the images in the format of MosaicML Streaming."""
    from streaming import MDSWriter

    columns = {"jpeg": "bytes", "label": "int"}
    with MDSWriter(out=str(target), columns=columns, size_limit=1 << 26) as writer:
        for label, data in labeled(source):
            writer.write({"jpeg": data, "label": label})


def write_lit(source: Path, target: Path) -> None:
    """Write the images in the format of litData."""
    from litdata.streaming import Cache

    cache = Cache(str(target), chunk_bytes=1 << 26)
    for number, (label, data) in enumerate(labeled(source)):
        cache[number] = {"jpeg": data, "label": label}
    cache.done()
    cache.merge()


def write_ffcv(source: Path, target: Path, mode: str) -> None:
    """Write the images in the format of FFCV: raw pixels, or JPEGs encoded again."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter
    from torchvision.datasets import ImageFolder

    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
    writer = DatasetWriter(str(target), fields, num_workers=WORKERS)
    writer.from_indexed_dataset(ImageFolder(str(source)))


def labeled(source: Path) -> Iterator[tuple[int, bytes]]:
    """Yield label and bytes of every image in a folder of class folders."""
    for label, folder in enumerate(sorted(source.iterdir())):
        for path in sorted(folder.iterdir()):
            yield label, path.read_bytes()


WRITERS = {
    "write-mds": write_mds,
    "write-lit": write_lit,
    "write-ffcv-raw": partial(write_ffcv, mode="raw"),
    "write-ffcv-q90": partial(write_ffcv, mode="jpg"),
}


def measure(name: str, location: str, seconds: float) -> dict[str, float]:
    """Return images per second, and milliseconds of CPU an image, after a short warm-up."""
    begin = time.perf_counter()
    made = batches(name, location)  # once: FFCV compiles its decoder for every loader
    supply = chain.from_iterable(repeat(made))  # epoch after epoch
    next(supply)
    first = time.perf_counter() - begin
    for _ in range(WARM_UP):
        next(supply)
    start, cpu = time.perf_counter(), family_cpu_seconds()
    count, passed = 0, 0.0
    while passed < seconds:
        next(supply)
        count += BATCH
        passed = time.perf_counter() - start
    return {
        "rate": count / passed,
        "cpu_ms": (family_cpu_seconds() - cpu) / count * 1000,
        "first_batch_seconds": first,
    }


def family_cpu_seconds() -> float:
    """Return the CPU seconds of this process and all that descend from it, ended ones included."""
    seconds = 0.0
    for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
        with suppress(psutil.Error):
            seconds += sum(process.cpu_times()[:4])
    return seconds


def main(name: str, location: str, last: str) -> None:
    """Write a format, or measure a contestant."""
    warnings.simplefilter("ignore")
    if write := WRITERS.get(name):
        write(Path(location), Path(last))
    else:
        print(json.dumps(measure(name, location, float(last))), flush=True)
    os._exit(0)  # without waiting for workers, which have nothing left to do


if __name__ == "__main__":
    main(*sys.argv[1:4])
