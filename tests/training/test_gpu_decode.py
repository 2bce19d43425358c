"""JPEGs that workers leave to the GPU: TorchCodec decodes them on the CPU here, in its place."""

import io
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torchcodec.decoders
from PIL import Image

from convert.folder import FolderOfClasses
from convert.options import Packing
from imagenet.model import TASK
from imagenet.recipes import ImageNet
from rackrun.errors import DataError, UsageError
from shards.open import open_source
from tests.training.test_decode import SAME, SAME_ON_AVERAGE, encoded, photograph
from training.data import gpu_decode
from training.data import open as data_open
from training.data.decode import ORIENTATION, Box, draw_box
from training.data.gpu_decode import GpuDecoder, gpu_decoder, jpegs_in, preparing
from training.data.loader import DECODING, made_in_thread, on_device
from training.data.open import open_data
from training.data.samples import Batch, JpegCrop, LeftToGpu
from training.data.transforms import Transforms
from training.ranks import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)
ON_GPU = replace(ALONE, device=torch.device("cuda", 0))
SIDE = 48
CROPS = Transforms(SIDE, crop_area=0.08)
IN_PLACE = GpuDecoder(CPU, "bilinear")


def settings(folder: Path, **options: object) -> ImageNet:
    """Return settings for training on the CPU."""
    return ImageNet(
        data=str(folder), batch_size=8, image_size=SIDE, device="cpu", epochs=2,
        **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of 41 images, all but three of them for the GPU."""
    root = tmp_path_factory.mktemp("photographs")
    for number in range(40):
        path = root / "images" / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = photograph(number, 100 + number, 150 - number)
        image = image.convert("L") if number == 7 else image
        path.write_bytes(encoded(image, quality=50, progressive=number in (3, 4)))
    (root / "images/a/one.png").write_bytes(encoded(photograph(0, 30, 40), "PNG"))
    FolderOfClasses(root / "images", root / "shards", packing=Packing(shards=2, workers=1)).run()
    return root / "shards"


@pytest.mark.parametrize("exact_epochs", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_that_workers_decode(
    photographs: Path, exact_epochs: bool, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same samples, crops and mirrors over two epochs, within the tolerance of the loader."""
    config = settings(photographs, exact_epochs=exact_epochs, workers=workers)

    def batches() -> Iterator[tuple[Batch, torch.Tensor]]:
        data = open_data(config, ALONE, partial(TASK.transforms, config), TASK.name, 2)
        for batch in islice(data.training(1), 2 * data.epoch_steps):
            yield batch, batch.images.clone()

    usual = list(batches())
    monkeypatch.setattr(data_open, "gpu_decoder", lambda *_: (IN_PLACE, ""))
    left, differences = 0, []
    for (batch, images), (expected, pixels) in zip(batches(), usual, strict=True):
        assert batch.labels.tolist() == expected.labels.tolist()
        left += len(batch.left)
        for image, other in zip(images.int(), pixels.int(), strict=True):
            differences.append(float((image - other).abs().float().mean()))
    assert left > 0.85 * len(differences) > 50
    assert max(differences) < SAME
    assert np.mean(differences) < SAME_ON_AVERAGE


def adobe(data: bytes) -> bytes:
    """Return a JPEG with Adobe's marker behind its first segment, as Photoshop writes it."""
    return data[:20] + b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x01" + data[20:]


def unmarked(data: bytes) -> bytes:
    """Return a JPEG without Adobe's marker: only the names of its components tell its colours."""
    start = data.index(b"\xff\xee")
    return data[:start] + data[start + 2 + int.from_bytes(data[start + 2 : start + 4]) :]


SMALL = photograph(1, 60, 80)


def turned(data: bytes) -> bytes:
    """Return a JPEG whose EXIF says that it lies on its side."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    return encoded(Image.open(io.BytesIO(data)), quality=80, exif=exif)


FOR_WORKERS: dict[str, Callable[[], bytes]] = {
    "progressive": lambda: encoded(SMALL, quality=80, progressive=True),
    "PNG": lambda: encoded(photograph(1, 30, 40), "PNG"),
    "CMYK": lambda: encoded(SMALL.convert("CMYK"), quality=80),
    "turned by its EXIF": lambda: turned(encoded(SMALL, quality=80)),
    "of Adobe": lambda: adobe(encoded(SMALL, quality=80)),
    "red, green and blue": lambda: encoded(SMALL, quality=80, keep_rgb=True),
    "named R, G and B": lambda: unmarked(encoded(SMALL, quality=80, keep_rgb=True)),
    "longer than its pixels": lambda: encoded(photograph(1, 150, 150), quality=98),
    "large": lambda: encoded(Image.new("RGB", (192, 5600)), quality=50),
    "decoded at a half": lambda: encoded(Image.new("RGB", (192, 192)), quality=80),
    "gray, by the model": lambda: encoded(SMALL, quality=80),
}


@pytest.mark.parametrize("kind", FOR_WORKERS)
def test_what_the_gpu_cannot_decode_is_decoded_by_the_worker(kind: str) -> None:
    """As without a GPU, to the last bit, with the same random numbers."""
    data = FOR_WORKERS[kind]()
    transforms = Transforms(SIDE, crop_area=0.08)
    if kind.startswith("gray"):
        transforms = replace(transforms, channels=1, mean=(0.5,), deviation=(0.5,))
    position = np.zeros(transforms.training_shape, np.uint8)
    crop = preparing(transforms, on_gpu=True)(data, np.random.default_rng(5)).decode()(position)
    assert crop is None
    assert np.array_equal(position, transforms.for_training(data, np.random.default_rng(5)))


def test_a_jpeg_cut_short_is_left_to_the_worker_which_refuses_it() -> None:
    """nvJPEG might fill the rest with gray."""
    data = encoded(SMALL, quality=80)
    with pytest.raises(DataError, match="not a whole image"):
        preparing(CROPS, on_gpu=True)(data[:-400], np.random.default_rng(5)).decode()


@pytest.mark.parametrize("marker", [0xC0, 0xC2, 0xC9])
def test_a_jpeg_with_two_frame_headers_is_left_to_the_worker_which_refuses_it(marker: int) -> None:
    """nvJPEG might take the first one, of 13 gigabytes, where the limits hold for the second."""
    data = encoded(SMALL, quality=80)
    sides = (65_500).to_bytes(2) * 2
    first = bytes((0xFF, marker, 0, 17, 8, *sides, 3, 1, 0x22, 0, 2, 0x11, 1, 3, 0x11, 1))
    with pytest.raises(DataError):
        preparing(CROPS, on_gpu=True)(
            data[:2] + first + data[2:], np.random.default_rng(5)
        ).decode()


def batch_of(*datas: bytes) -> Batch:
    """Return a batch whose images are left to the GPU, as workers leave them."""
    images, left = torch.zeros((len(datas), SIDE, SIDE, 3), dtype=torch.uint8), []
    for number, (index, data) in enumerate(zip(images.numpy(), datas, strict=True)):
        crop = preparing(CROPS, on_gpu=True)(data, np.random.default_rng(number)).decode()(index)
        assert crop is not None
        left.append(LeftToGpu(number, f"shard-0.tar: image {number}", crop))
    return Batch(images.permute(0, 3, 1, 2), torch.arange(len(datas)), left=left)


def refusing(monkeypatch: pytest.MonkeyPatch, refused: Callable[[torch.Tensor], bool]) -> list[int]:
    """Have the decoder refuse some JPEGs, and with them all of a call; return what it is given."""
    decode, calls = torchcodec.decoders.decode_jpeg, list[int]()

    def stand_in(jpegs: list[torch.Tensor], mode: str, device: torch.device) -> object:
        assert all(jpeg.dtype == torch.uint8 and jpeg.ndim == 1 for jpeg in jpegs)
        calls.append(len(jpegs))
        if any(map(refused, jpegs)):
            raise RuntimeError("Error while decoding JPEG images: 5")
        return decode(jpegs, mode=mode, device=device)

    monkeypatch.setattr(torchcodec.decoders, "decode_jpeg", stand_in)
    return calls


def test_what_the_decoder_refuses_is_decoded_by_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others of the batch are decoded one by one; the images are the same."""
    datas = [encoded(photograph(seed, 60, 80), quality=80) for seed in range(4)]
    whole, partly = batch_of(*datas), batch_of(*datas)
    IN_PLACE(whole, whole.images)
    second = jpegs_in(partly)[2].clone()
    calls = refusing(monkeypatch, lambda jpeg: torch.equal(jpeg, second))
    IN_PLACE(partly, partly.images)
    assert calls == [4, 1, 1, 1, 1]
    assert torch.equal(whole.images, partly.images)


def test_a_damaged_jpeg_ends_the_run_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to type: only workers leave images out."""
    batch = batch_of(*[encoded(photograph(seed, 60, 80), quality=80) for seed in range(2)])
    damaged = jpegs_in(batch)[1]
    damaged[2:20] = 0
    refusing(monkeypatch, lambda jpeg: jpeg.data_ptr() == damaged.data_ptr())
    with pytest.raises(DataError, match=r"shard-0.tar: image 1: .*type --gpu-decode off"):
        IN_PLACE(batch, batch.images)


def test_bicubic_pixels_do_not_wrap_around() -> None:
    """Beside an edge, the kernel goes below black and beyond white."""
    image = Image.new("L", (64, 64))
    image.paste(255, (32, 0, 64, 64))
    batch = batch_of(encoded(image, quality=95))
    box = draw_box(64, 64, np.random.default_rng(0), (1.0, 1.0), (1.0, 1.0))
    length = batch.left[0].crop.length
    whole = batch._replace(left=[batch.left[0]._replace(crop=JpegCrop(length, box, False))])
    replace(IN_PLACE, interpolation="bicubic")(whole, whole.images)
    row = whole.images[0, 0, 24].int()
    assert max(row[:20]) < 10 and min(row[28:]) > 245


def test_jpegs_are_decoded_before_a_batch_is_handed_over() -> None:
    """Once each, in order, beside the rank's own thread, and only where there are some."""
    calls: list[int] = []
    threads: set[threading.Thread] = set()

    def decoder(batch: Batch, images: torch.Tensor) -> None:
        threads.add(threading.current_thread())
        calls.append(batch.left[0].batch_index)
        images += batch.left[0].batch_index

    def given() -> Iterator[Batch]:
        for number in range(4):
            images = torch.zeros((1, 3, 2, 2), dtype=torch.uint8)
            left = [LeftToGpu(number, "", JpegCrop(0, Box(0, 0, 1, 1), False))] if number else []
            yield Batch(images, torch.zeros(1), left=left)

    batches = [batch.images.unique().tolist() for batch in on_device(given(), CPU, decoder)]
    assert (batches, calls) == ([[0], [1], [2], [3]], [1, 2, 3])
    assert len(threads) == 1 and threading.current_thread() not in threads


def decoding_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == DECODING]


def test_the_thread_makes_no_more_than_two_batches_ahead() -> None:
    """Their memory would be overwritten; it ends with the one that it is making."""
    begun, asked = list[int](), threading.Semaphore(0)

    def numbers() -> Iterator[int]:
        for number in range(100):
            begun.append(number)
            asked.release()
            yield number

    made = made_in_thread(numbers())
    assert next(made) == 0
    for _ in range(3):  # what is in use, and two more
        asked.acquire()
    assert not asked.acquire(timeout=0.1)
    assert begun == [0, 1, 2]
    made.close()
    assert not decoding_threads() and len(begun) < 5


def test_an_error_of_the_thread_is_raised_after_the_batches_before_it() -> None:
    """The error itself, and once; the thread has ended."""
    error = DataError("image 2 is damaged")

    def numbers() -> Iterator[int]:
        yield from range(2)
        raise error

    made, numbers_made = made_in_thread(numbers()), list[int]()
    with pytest.raises(DataError) as raised:
        numbers_made.extend(made)
    assert raised.value is error and numbers_made == [0, 1]
    assert not decoding_threads()


@pytest.fixture
def chosen(photographs: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[bool, str]]:
    """Choose on a machine whose GPU is the CPU, with a decoder of another speed."""

    def choose(
        expected: str, by_worker: float, by_gpu: float, others: int = 0, **options: object
    ) -> tuple[bool, str]:
        """Take seconds for all 37 images in one worker, and for those left to the GPU."""
        config = settings(photographs, gpu_decode=expected, workers=4)
        taken = iter((by_worker, by_gpu))

        def seconds(work: Callable[[], object]) -> float:
            work()
            return next(taken)

        monkeypatch.setattr(gpu_decode, "_seconds", seconds)
        monkeypatch.setattr(gpu_decode, "GpuDecoder", lambda device, kind: GpuDecoder(CPU, kind))
        monkeypatch.setattr(Ranks, "all_reduce_max", lambda self, number: max(number, others))
        transforms = replace(TASK.transforms(config, 0), **options)
        decoder, remark = gpu_decoder(config, ON_GPU, transforms, open_source(str(photographs)))
        return decoder is not None, remark

    return choose


def test_auto_chooses_what_is_faster(chosen: Callable[..., tuple[bool, str]]) -> None:
    """One rate against that of all workers of a rank; all ranks choose the same."""
    on_gpu, remark = chosen("auto", 4.0, 0.5)
    assert on_gpu and remark.startswith("JPEGs are decoded on the GPU: ")
    assert remark.endswith(" images/s, loader workers (4) 37 (--gpu-decode auto)"), remark
    assert chosen("auto", 4.0, 4.0)[0] is False
    assert chosen("auto", 4.0, 0.5, others=1)[0] is False
    on_gpu, remark = chosen("on", 4.0, 4.0)
    assert on_gpu and "auto" not in remark
    assert chosen("off", 4.0, 0.5) == (False, "")


def test_auto_leaves_to_workers_what_only_they_do(
    chosen: Callable[..., tuple[bool, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """--gpu-decode on is refused there, with the reason."""
    for options, why in (
        ({"erase": 0.1, "rand_augment": 9}, "needed for --rand-augment and --random-erasing"),
        ({"crop_area": 1.0}, "does not train on random crops in colour"),
    ):
        on_gpu, remark = chosen("auto", 4.0, 0.5, **options)
        assert (on_gpu, why in remark) == (False, True), remark
        with pytest.raises(UsageError, match=f"^--gpu-decode on: .*{why}; type --gpu-decode off$"):
            chosen("on", 4.0, 0.5, **options)
    refusing(monkeypatch, lambda jpeg: True)
    assert "TorchCodec cannot: Error while decoding" in chosen("auto", 4.0, 0.5)[1]
    with pytest.raises(UsageError, match="TorchCodec cannot"):
        chosen("on", 4.0, 0.5)


def test_settings_that_gpu_decoding_cannot_have_are_refused(photographs: Path) -> None:
    """A CPU is no GPU, and only workers leave out damaged images."""
    config = settings(photographs, gpu_decode="on", workers=0)
    with pytest.raises(UsageError, match="--gpu-decode on: ranks compute on the CPU"):
        open_data(config, ALONE, partial(TASK.transforms, config), TASK.name, 2)
    config = replace(config, gpu_decode="auto")
    data = open_data(config, ALONE, partial(TASK.transforms, config), TASK.name, 2)
    assert "by loader workers: ranks compute on the CPU" in data.remark
    with pytest.raises(UsageError, match="--gpu-decode auto and --bad-samples quarantine exclude"):
        replace(config, bad_samples="quarantine")
