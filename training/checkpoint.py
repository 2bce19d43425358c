"""Checkpoints: files of torch.save that are complete or absent, with an identity and a digest.

A file ends with the SHA-256 of its content (torch ignores bytes after its data), since torch.load
does not notice a flipped byte. It is written under a hidden name, synced to the disk and renamed.
Only plain data and tensors are read back, never code.
"""

import copy
import hashlib
import io
import os
import re
from argparse import Namespace
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any
from zipfile import ZIP_STORED, ZipFile

import numpy as np
import torch

from rackrun.atomic import (
    atomic_write,
    partial_path,
    partials,
    sync_folder,
    translated_os_errors,
    write_whole,
)
from rackrun.errors import SaveError
from rackrun.run_folder import RunFolder
from rackrun.terminal import clean, say
from rackrun.training.weights_file import FOOTER, FOOTER_BYTES, ZIP, kind_of

Content = dict[str, Any]
REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""In torch's refusal of a pickle: what it will not call."""


def _plain_data() -> list[Any]:
    # What other programs save beside weights: their arguments, and numbers of numpy.
    scalar = np.float64(0).__reduce__()[0]
    kinds = [np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64]
    dtypes = [type(np.dtype(kind)) for kind in kinds]
    return [Namespace, scalar, (scalar, "numpy.core.multiarray.scalar"), np.dtype, *dtypes]


PLAIN_DATA = _plain_data()


def write(path: Path, content: Content) -> None:
    """Write plain data and tensors to a file, whole or not at all; raise SaveError on failure."""
    # In memory first, as a digest has to be of what was meant, not of what the disk made of it.
    data = pack(content)
    footer = b"sha256:%s\n" % hashlib.sha256(data).hexdigest().encode()
    with atomic_write(path) as file, translated_os_errors(path):
        file.write(data)
        file.write(footer)


def read(path: Path) -> Content:
    """Return what `write` wrote; raise SaveError for a damaged or foreign file."""
    return parse(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a checkpoint, verified against their digest."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SaveError(f"{path}: cannot be read: {error.strerror}") from None
    footer = FOOTER.fullmatch(data[-FOOTER_BYTES:])
    if not footer:
        raise SaveError(
            f"{path}: cut short, or not a checkpoint ({len(data)} bytes); type a run folder, its"
            " final.pt, or a file of its checkpoints/"
        )
    if hashlib.sha256(memoryview(data)[:-FOOTER_BYTES]).hexdigest().encode() != footer[1]:
        raise SaveError(f"{path}: damaged: its digest is not that of its bytes")
    return data


def parse(data: bytes, path: Path) -> Content:
    """Return the content in a file's bytes: plain data and tensors only, on the CPU."""
    try:
        if data.startswith(ZIP):
            # torch stores, never packs: a packed file of a few KB could ask for all memory.
            with ZipFile(io.BytesIO(data)) as entries:
                if any(entry.compress_type != ZIP_STORED for entry in entries.infolist()):
                    raise ValueError("compressed")
        content = unpack(data)
    except Exception as error:  # a damaged pickle leads torch to errors of any kind
        refused = REFUSED.search(str(error))
        why = kind_of(data, clean(refused[1])[:100] if refused else "")
        raise SaveError(f"{path}: not a file of weights and plain data: {why}") from None
    if not isinstance(content, dict):
        raise SaveError(f"{path}: holds no named weights")
    return content


def pack(content: dict[str, Any]) -> bytes:
    """Return plain data and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """Return what was packed, on the CPU; code in it is not run but refused."""
    with torch.serialization.safe_globals(PLAIN_DATA):
        content: dict[str, Any] = torch.load(  # noqa: TID251
            io.BytesIO(data), map_location="cpu", weights_only=True
        )
    return content


def save(folder: RunFolder, content: Content, keep: int, best: bool) -> Path:
    """Write the checkpoint of a step, mark it as the best if it is, drop all but the last ones."""
    path = folder.checkpoint(content["state"]["step"])
    # torch.save in place on a full disk would destroy the last checkpoint: hence `write`.
    write(path, content)
    if best:
        _link(path, folder.best)
    # After the new file is whole: whenever this is interrupted, there is one to resume from.
    for old in steps_in(folder.checkpoints)[:-keep]:
        with suppress(FileNotFoundError):
            old.unlink()
    return path


class BackgroundSaves:
    """Saves checkpoints in the background: a thread writes one copy of the state at a time.

    The error of a failed save is raised by the next call of `ended` or `wait`.
    """

    def __init__(self, folder: RunFolder, keep: int) -> None:
        self._folder = folder
        self._keep = keep
        self._snapshot = Snapshot()
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # 307 MB held up steps for 1.5 s
        self._save: Future[Path] | None = None
        self._step = 0

    def begin(self, content: Content, best: bool) -> None:
        """Copy the state and begin to save it; the previous save must have ended."""
        assert not self._save
        self._step = content["state"]["step"]
        # The next step changes these tensors in place while the thread still writes.
        copied = self._snapshot.take(content)
        self._save = self._thread.submit(save, self._folder, copied, self._keep, best)

    def ended(self) -> int:
        """Return the step of a save that has ended since the last call; 0 if none has."""
        if not self._save or not self._save.done():
            return 0
        done, self._save = self._save, None
        done.result()
        return self._step

    def wait(self) -> int:
        """Wait for the current save and return its step; 0 if there is none."""
        if self._save:
            wait([self._save])
        return self.ended()

    def end(self, failure: type[BaseException]) -> None:
        """End with the run: an error waits for the current save, a second Ctrl-C does not."""
        if not issubclass(failure, Exception):
            self.abandon()
            return
        with suppress(SaveError):  # of two failures the first one counts
            self.wait()

    def abandon(self) -> None:
        """Remove the file of the current save, so that it fails and leaves nothing."""
        remove_partials(self._folder)


class Snapshot:
    """Copies of plain data and tensors in CPU memory, which each copy takes over from the last."""

    def __init__(self) -> None:
        self._memory: dict[tuple[object, ...], torch.Tensor] = {}

    def take(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a copy that stays as it is until the next one is taken."""
        copied: dict[str, Any] = self._copied(content, ())
        return copied

    def _copied(self, value: Any, path: tuple[object, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return self._room(value, path).copy_(value)
        if isinstance(value, dict):
            parts = {key: self._copied(part, (*path, key)) for key, part in value.items()}
            copied = copy.copy(value)  # with the versions of modules, which torch keeps beside
            copied.update(parts)
            return copied
        if isinstance(value, list):
            return [self._copied(part, (*path, number)) for number, part in enumerate(value)]
        return value

    def _room(self, value: torch.Tensor, path: tuple[object, ...]) -> torch.Tensor:
        kept = self._memory.get(path)
        if kept is None or (kept.shape, kept.dtype) != (value.shape, value.dtype):
            # Pinned memory lets a copy leave the GPU at the speed of the bus, and is slow to get:
            # hence the same for every save.
            kept = torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
            self._memory[path] = kept
        return kept


def remove_partials(folder: RunFolder) -> None:
    """Remove the files that interrupted saves have left."""
    for rubbish in partials(folder.checkpoints):
        rubbish.unlink(missing_ok=True)


def keep_best(earlier: RunFolder, folder: RunFolder) -> None:
    """Take over the best checkpoint of the run that this one continues."""
    if earlier.best.exists() and not folder.best.exists():
        write_whole(folder.best, earlier.best.read_bytes())


def _link(path: Path, name: Path) -> None:
    # A second name for the same bytes; a copy where the file system has no links.
    partial = partial_path(name)
    try:
        os.link(path, partial)
        with translated_os_errors(name):
            partial.rename(name)
            sync_folder(name.parent)
    except OSError:
        write_whole(name, path.read_bytes())
    finally:
        # Nodes that share the folder do this to the same file at the same time, and renaming one
        # name of a file to another name of it does nothing at all (POSIX): `partial` is left.
        partial.unlink(missing_ok=True)


def steps_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, the newest last."""
    return sorted(folder.glob("step-*.pt"))


def newest_valid(folder: Path) -> tuple[Path, bytes]:
    """Return the newest intact checkpoint in a folder; report every damaged one.

    Raise SaveError if none is intact: starting from scratch must be the user's decision.
    """
    for path in reversed(steps_in(folder)):
        try:
            return path, read_bytes(path)
        except SaveError as problem:
            say(f"passed over: {problem}")
    raise SaveError(f"{folder}: no checkpoint in it is whole; leave out --resume to start over")
