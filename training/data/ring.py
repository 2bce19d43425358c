"""The memory of a rank's batches: allocated once, filled and read again and again.

Fresh shared memory costs its page faults, 0.13 ms an image, and putting together what workers have
made costs as much again. So loader workers decode straight into a ring of places, each with room
for a batch: batch n lies in place n modulo their number.

Places are neither sent around nor locked. DataLoader asks a worker for AHEAD batches at most that
the rank has not taken, so nothing is begun that lies further ahead, and the ring has HELD places
more: for a batch in a step, one on its way to the device, and one to spare. A batch is overwritten
once the third one after it is taken.
"""

import math
import os
import shutil
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from rackrun.errors import UsageError
from rackrun.training.data.order import Rows
from rackrun.training.data.transforms import Shape
from rackrun.units import data_size

SHARED = Path("/dev/shm")
AHEAD = 2  # batches per loader worker
HELD = 3  # batches
LABEL_BYTES = 8


class Filled(NamedTuple):
    """What is known of a batch that a loader worker has written into the ring."""

    number: int
    """The number of the batch, in the order in which the rank takes them."""
    shape: Shape
    keys: Sequence[tuple[str, str]]
    """Shard and key of each image."""
    left_out: Sequence[str]
    """Bad samples that are not in it."""
    rows: Rows | None = None
    """The row of each image in the index, if known."""


class Batch(NamedTuple):
    """The images and labels of a step.

    Images lie in memory that is used again: on a CPU they stay until the next but one batch is
    asked for.
    """

    images: torch.Tensor  # uint8 (B, channels, size, size)
    labels: torch.Tensor  # int64 (B,)
    left_out: Sequence[str] = ()  # bad samples that are not in it
    rows: torch.Tensor | None = None  # int64 (B,): their rows in the index, if known
    keys: Sequence[tuple[str, str]] = ()  # shard and key of each; of noise none

    @property
    def skipped(self) -> int:
        """How many bad samples are not in it."""
        return len(self.left_out)

    def split(self, parts: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the images and labels of the parts that are computed one after another."""
        if parts == 1:
            return [(self.images, self.labels)]
        images, labels = self.images.tensor_split(parts), self.labels.tensor_split(parts)
        return list(zip(images, labels, strict=True))


class Ring:
    """Places for batches, in memory that a rank shares with its loader workers."""

    def __init__(
        self, workers: int, samples: int, image_bytes: int, device: torch.device | None = None
    ) -> None:
        """Allocate places for batches of this many samples, pinned if they go to a GPU.

        UsageError where shared memory is too small.
        """
        self._label_bytes = samples * LABEL_BYTES
        batch_bytes = self._label_bytes + -(-samples * image_bytes // LABEL_BYTES) * LABEL_BYTES
        memory = torch.empty((AHEAD * workers + HELD) * batch_bytes, dtype=torch.uint8)
        if workers:
            _check_room(memory.nbytes)
            memory.share_memory_()  # type: ignore[no-untyped-call]
        self._memory = memory.view(-1, batch_bytes)
        if device and device.type == "cuda":
            _pin(self, memory)

    def place(self, number: int, samples: int, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the place of a batch: uint8 (samples, size, size, channels), int64 (samples,)."""
        place = self._memory[number % len(self._memory)]
        labels, images = place[: self._label_bytes], place[self._label_bytes :]
        pixels = images[: samples * math.prod(shape)].view(samples, *shape)
        return pixels, labels.view(torch.int64)[:samples]

    def batch(self, filled: Filled) -> Batch:
        """Return the batch that a worker has written."""
        number, shape, keys, left_out, rows = filled
        images, labels = self.place(number, len(keys), shape)
        indices = None if rows is None else torch.from_numpy(rows)
        return Batch(images.permute(0, 3, 1, 2), labels, left_out, indices, keys)


def _check_room(length: int) -> None:
    # The kernel grants more than there is; a rank that writes beyond it is ended by SIGBUS.
    if not SHARED.exists():
        return
    room, ranks = shutil.disk_usage(SHARED), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if length > room.free or length * ranks > room.total:
        raise UsageError(
            f"{SHARED}: {data_size(length)} for the batches of a rank"
            f"{f', {ranks} ranks on this host' if ranks > 1 else ''}, and {data_size(room.free)} of"
            f" {data_size(room.total)} are free; start the container with --ipc host or --shm-size,"
            " or type fewer --workers"
        )


def _pin(owner: Ring, memory: torch.Tensor) -> None:
    # A GPU copies from pinned memory by itself, while the host goes on.
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if failure := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise UsageError(
            f"--workers: {memory.nbytes / 1e6:,.0f} MB of shared memory for their batches cannot be"
            f" pinned (CUDA error {failure}); type a smaller number, or give /dev/shm more room"
        )
    release = weakref.finalize(owner, cuda.cudaHostUnregister, memory.data_ptr())
    release.atexit = False  # CUDA may be gone by then
