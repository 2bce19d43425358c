"""The memory of a rank's training batches: allocated once, filled and read again and again.

Fresh shared memory costs its page faults, 0.13 ms an image, and putting together what workers have
made costs as much again. So a rank owns a ring of slots, each with room for a batch, and its loader
workers decode straight into them: batch n lies in slot n modulo their number.

Slots are neither sent around nor locked. DataLoader asks a worker for AHEAD items at most that the
rank has not taken, so nothing is begun that lies further ahead, and the ring has HELD slots more:
for a batch in a step, one on its way to the device, and one to spare. A batch is overwritten once
the third one after it is taken.
"""

import math
import os
import shutil
import weakref
from pathlib import Path
from typing import NamedTuple

import torch
from torch.utils.data import get_worker_info

from rackrun.errors import UsageError
from rackrun.training.data.order import Rows
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Shape, TransformsOfEpoch
from rackrun.units import data_size

SHARED = Path("/dev/shm")
AHEAD = 2  # items per loader worker
HELD = 3  # batches
LABEL_BYTES = 8


class FilledSlot(NamedTuple):
    """All but the images of a batch that a loader worker has decoded into a slot."""

    number: int  # of the batch, in the order in which the rank takes them
    shape: Shape
    labels: list[int]
    left_out: list[str]  # bad samples
    keys: list[tuple[str, str]]  # shard and key of each
    places: list[int] | None = None  # of each in the slot; None: they lie one after the other
    rows: Rows | None = None  # of each in the index, if known


class Slots:
    """A ring of slots for batches, in memory that a rank shares with its loader workers."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        self.pinned = device.type == "cuda"
        _check_room(slots * slot_bytes)
        self._memory = shared_bytes(slots * slot_bytes).view(slots, slot_bytes)
        if self.pinned:
            _pin(self, self._memory)

    def images(self, number: int, samples: int, shape: Shape) -> torch.Tensor:
        """Return the place of a batch: uint8 (samples, size, size, channels)."""
        return self._slot(number)[: samples * math.prod(shape)].view(samples, *shape)

    def batch(self, filled: FilledSlot) -> Batch:
        """Return the batch that a worker has put into a slot."""
        number, shape, labels, left_out, keys, places, rows = filled
        images = self.images(number, max(places, default=-1) + 1 if places else len(labels), shape)
        if len(images) > len(labels):  # there are gaps where samples were left out
            images = images[places]
        return Batch(
            images.permute(0, 3, 1, 2),
            self._labels(number, torch.tensor(labels, dtype=torch.int64)),
            left_out,
            None if rows is None else torch.from_numpy(rows),
            keys,
        )

    def _labels(self, number: int, labels: torch.Tensor) -> torch.Tensor:
        # Those that a GPU reads lie at the end of the slot.
        if not (self.pinned and len(labels)):
            return labels
        return self._slot(number)[-labels.nbytes :].view(torch.int64).copy_(labels)

    def _slot(self, number: int) -> torch.Tensor:
        return self._memory[number % len(self._memory)]


def slots_for(
    samples: int, transforms: TransformsOfEpoch, epochs: int, in_flight: int, device: torch.device
) -> Slots:
    """Return a ring for batches of this many samples, at the largest size of any epoch.

    Beside the images, a slot has room for their labels.

    `in_flight` is how many batches workers may have begun that the rank has not taken.
    """
    largest = max(math.prod(transforms(epoch).training_shape) for epoch in range(epochs))
    images = -(-samples * largest // LABEL_BYTES) * LABEL_BYTES  # labels are aligned
    return Slots(in_flight + HELD, images + samples * LABEL_BYTES, device)


def shared_bytes(length: int) -> torch.Tensor:
    """Return uint8 (length,), whose memory loader workers and their rank share."""
    # Sharing an ordinary tensor would copy it; torch's own default_collate does the same.
    storage = torch.UntypedStorage._new_shared(length)  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def room_for(*shape: int) -> torch.Tensor:
    """Return an empty uint8 tensor, in a loader worker in memory shared with its rank."""
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    return shared_bytes(math.prod(shape)).view(shape)


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


def _pin(owner: Slots, memory: torch.Tensor) -> None:
    # A GPU copies from pinned memory by itself, while the host goes on.
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if failure := int(cuda.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)):
        raise UsageError(
            f"--workers: {memory.nbytes / 1e6:,.0f} MB of shared memory for their batches cannot be"
            f" pinned (CUDA error {failure}); type a smaller number, or give /dev/shm more room"
        )
    release = weakref.finalize(owner, cuda.cudaHostUnregister, memory.data_ptr())
    release.atexit = False  # CUDA may be gone by then
