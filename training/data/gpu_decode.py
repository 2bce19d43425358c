"""Decode the JPEGs of training batches on the GPU (--gpu-decode).

Loader workers read and verify samples and draw their crops as ever. What the GPU can decode they
leave as it is, in the place of its pixels, which travels to the rank without a copy:

    worker   bytes -> its place holds the JPEG, and a JpegCrop | its place holds the pixels
    rank     the batch, copied to the GPU -> JPEGs: uint8 (3, height, width) -> the crop, resized,
             in its place

TorchCodec's decode_jpeg, by nvJPEG, decodes whole images at their full resolution, those of a
batch in one call. The rank copies, decodes and resizes in a thread and a stream of their own beside
the steps (on_device in training.data.loader). Workers still decode crops that they would decode at
a fraction of the resolution, JPEGs longer than their pixels or of more than MOST_PIXELS, what
TorchCodec would turn by its EXIF, and all but plain baseline JPEGs: nvJPEG decodes progressive ones
one by one, and may not follow Adobe's marker of other colours. What it refuses, Pillow decodes in
the rank.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import interpolate

from rackrun.errors import DataError, UsageError
from rackrun.terminal import one_line
from shards.images import Frame, jpeg_frame
from shards.source import Source
from training.data.decode import (
    FINE,
    RATIO,
    Interpolation,
    Pixels,
    decode,
    draw_box,
    has_end,
    orientation,
)
from training.data.loader import worker_count
from training.data.pool import TRAIN
from training.data.samples import (
    Batch,
    LeftToGpu,
    Prepare,
    Quarantine,
    filled,
    left_to_gpu,
    rows_of,
)
from training.data.transforms import JpegCrop, Prepared, Transforms
from training.ranks import Ranks
from training.settings.data import DataSettings

MOST_PIXELS = 1 << 20  # of an image: those of a batch of 256 take 0.8 GB of the GPU's memory
MEASURED = 64  # images
EXIF = b"Exif\0\0"  # the segment that may say that the image is to be turned
ADOBE = b"\xff\xee\x00\x0eAdobe"  # the segment that may name other colours than the usual ones
RED_GREEN_BLUE = b"RGB"  # the names of components that may be colours themselves
ON_CPU_ONLY = {
    "vertical_flip": "--vertical-flip",
    "color_jitter": "--color-jitter",
    "trivial_augment": "--trivial-augment",
    "rand_augment": "--rand-augment",
    "augmix": "--augmix",
    "erase": "--random-erasing",
}
"""Changes of training images that loader workers make, and their options."""


@dataclass(frozen=True)
class GpuDecoder:
    """Decodes the JPEGs in a batch into their places among its images on the device."""

    device: torch.device
    interpolation: Interpolation

    def __call__(self, batch: Batch, images: torch.Tensor) -> None:
        """Fill the places of `images`, uint8 (B, 3, size, size), that hold a JPEG in the batch."""
        jpegs = jpegs_in(batch)
        try:
            decoded_images = decoded(jpegs, self.device)
        except RuntimeError:  # one is refused, torchvision does not say which, and all are lost
            decoded_images = [self._alone(*pair) for pair in zip(batch.left, jpegs, strict=True)]
        for left, pixels in zip(batch.left, decoded_images, strict=True):
            images[left.batch_index] = self._resized(pixels, left.crop, images.shape[2:])

    def _alone(self, left: LeftToGpu, jpeg: torch.Tensor) -> torch.Tensor:
        try:
            return decoded([jpeg], self.device)[0]
        except RuntimeError:  # nvJPEG refuses some that Pillow reads
            pass
        try:
            pixels = decode(jpeg.numpy().tobytes())
        except DataError as error:
            also = "type --gpu-decode off --bad-samples quarantine to leave such images out"
            raise DataError(f"{left.name}: {error}; {also}") from None
        return torch.from_numpy(pixels).permute(2, 0, 1).to(self.device)

    def _resized(self, pixels: torch.Tensor, crop: JpegCrop, size: Sequence[int]) -> torch.Tensor:
        box, (height, width) = crop.box, size
        part = pixels[:, box.top : box.top + box.height, box.left : box.left + box.width]
        # Rows before columns, rounded in between, as the kernel for bytes on the CPU does it.
        resized = part[None].float()
        for shape in ((box.height, width), (height, width)):
            resized = interpolate(resized, shape, mode=self.interpolation, antialias=True)
            resized = resized.round_().clamp_(0, 255)  # bicubic goes beyond
        return resized[0].flip(2) if crop.mirror else resized[0]


def gpu_decoder(
    config: DataSettings, ranks: Ranks, transforms: Transforms, source: Source
) -> tuple[GpuDecoder | None, str]:
    """Return what decodes on the GPU, None if loader workers do, and a remark on the choice.

    Raise UsageError if --gpu-decode on cannot be had. With `auto` all ranks choose the same.
    """
    if config.gpu_decode == "off":
        return None, ""
    decoder, faster, remark = GpuDecoder(ranks.device, transforms.interpolation), False, ""
    is_gpu = ranks.device.type == "cuda"
    why_not = _changes(transforms) if is_gpu else "ranks compute on the CPU"
    if not why_not:
        try:
            faster, remark = _compared(decoder, config, ranks, transforms, source)
        except (ImportError, OSError, RuntimeError) as error:
            why_not = f"TorchCodec cannot: {one_line(str(error))}"
    if config.gpu_decode == "on":
        if why_not:
            raise UsageError(f"--gpu-decode on: {why_not}; type --gpu-decode off")
        return decoder, f"JPEGs are decoded on the GPU: {remark}"
    if ranks.all_reduce_max(int(not faster)):
        why = remark or why_not
        return None, f"JPEGs are decoded by loader workers: {why} (--gpu-decode auto)"
    return decoder, f"JPEGs are decoded on the GPU: {remark} (--gpu-decode auto)"


def preparing(transforms: Transforms, on_gpu: bool) -> Prepare:
    """Return what prepares an image for a training batch, or leaves it to the GPU."""
    room = math.prod(transforms.training_shape)

    def left(data: bytes, random: np.random.Generator) -> Prepared:
        frame = jpeg_frame(data)
        if frame is None or len(data) > room or not _is_usual(data, frame, transforms.size):
            return transforms.prepared_for_training(data, random)
        # The crop is the one that a loader worker would draw.
        mirror = random.random() < (0.5 if transforms.flip else 0.0)
        box = draw_box(frame.width, frame.height, random, (transforms.crop_area, 1.0), RATIO)

        def fill(out: Pixels) -> JpegCrop:
            out.reshape(-1)[: len(data)] = np.frombuffer(data, np.uint8)
            return JpegCrop(len(data), box, mirror)

        return Prepared(len(data), lambda: fill)

    return left if on_gpu and not _changes(transforms) else transforms.prepared_for_training


def jpegs_in(batch: Batch) -> list[torch.Tensor]:
    """Return the JPEGs in a batch: uint8 (length,), each where its pixels would be."""
    image_memory = batch.images.permute(0, 2, 3, 1)
    return [image_memory[left.batch_index].view(-1)[: left.crop.length] for left in batch.left]


def decoded(jpegs: list[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Return the pixels of each JPEG on the device: uint8 (3, height, width)."""
    from torchcodec.decoders import decode_jpeg  # loader workers need not import it

    images: list[torch.Tensor] = decode_jpeg(jpegs, mode="RGB", device=device)
    return images


def _is_usual(data: bytes, frame: Frame, size: int) -> bool:
    shorter, components = min(frame.width, frame.height), frame.height_at + 5
    names = data[components : components + 9 : 3]
    return (
        frame.one_scan
        and shorter < 2 * FINE * size  # else the crop may be decoded at a fraction
        and frame.width * frame.height <= MOST_PIXELS
        and names != RED_GREEN_BLUE
        and data.find(ADOBE, 0, frame.scan_at) < 0
        and (data.find(EXIF, 0, frame.scan_at) < 0 or orientation(data) == 1)
        and has_end(data)
    )


def _changes(transforms: Transforms) -> str:
    # Why training on these transforms needs loader workers; empty if the GPU can do it.
    if type(transforms) is not Transforms:
        return "the task has transforms of its own"
    if transforms.channels != 3 or transforms.crop_area >= 1:
        return "the task does not train on random crops in colour"
    options = [option for name, option in ON_CPU_ONLY.items() if getattr(transforms, name)]
    return f"loader workers are needed for {' and '.join(options)}" if options else ""


def _compared(
    decoder: GpuDecoder, config: DataSettings, ranks: Ranks, transforms: Transforms, source: Source
) -> tuple[bool, str]:
    # Whether the GPU decodes faster than this rank's workers, and how fast both are.
    samples = source.manifest.split(TRAIN).samples
    samples_read = list(rows_of(source, TRAIN, range(min(MEASURED, samples))))
    shape = len(samples_read), *transforms.training_shape
    workers = max(worker_count(config, ranks), 1)
    image_memory = torch.empty(shape, dtype=torch.uint8, pin_memory=decoder.device.type == "cuda")

    def fill(on_gpu: bool) -> Batch:
        prepare, quarantine = preparing(transforms, on_gpu), Quarantine(config)
        kept = filled(image_memory, enumerate(samples_read), prepare, (config.seed,), quarantine)
        left = left_to_gpu(kept)
        return Batch(image_memory.permute(0, 3, 1, 2), torch.empty(0), left=left)

    def decode_left() -> None:
        images = batch.images.to(decoder.device, copy=True)
        decoder(batch, images)
        images[0].cpu()  # waits for all of it

    by_workers = len(samples_read) / _seconds(lambda: fill(on_gpu=False)) * workers
    batch = fill(on_gpu=True)
    if not batch.left:
        return False, f"none of the first {len(samples_read)} images is a JPEG that a GPU decodes"
    decoded(jpegs_in(batch), decoder.device)  # raises if it cannot; the first call takes longer
    by_gpu = len(batch.left) / _seconds(decode_left)
    rates = f"{by_gpu:,.0f} images/s, loader workers ({workers}) {by_workers:,.0f}"
    return by_gpu > by_workers, rates


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
