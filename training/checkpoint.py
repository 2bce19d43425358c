"""Checkpoints as files: those of torch.save, complete or absent, verified by their own checksums.

torch.save writes a zip with a CRC-32 of each entry, which torch.load does not look at: it loads a
flipped byte. A file is written under a hidden name, synced to the disk and renamed. Only plain data
and tensors are read back, never code.
"""

import io
import os
import re
import struct
import warnings
import zlib
from argparse import Namespace
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

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
from rackrun.training.weights_file import ZIP, kind_of

Content = dict[str, Any]
REFUSED = re.compile(r"GLOBAL ([\w.]+)")
"""Finds in torch's refusal of a pickle what it would not call."""
OTHER_FILE = "type a run folder, its final.pt, or a file of its checkpoints/"
UNREADABLE = (  # what zipfile and torch raise for bytes that nobody has meant to be read
    *(BadZipFile, UnpicklingError, zlib.error, struct.error, ImportError, MemoryError),
    *(ArithmeticError, AssertionError, AttributeError, EOFError, LookupError, NotImplementedError),
    *(OSError, RuntimeError, TypeError, ValueError),
)


def _plain_data() -> list[Any]:
    # What other programs save beside weights: their arguments, paths, times, and numpy's numbers.
    scalar = np.float64(0).__reduce__()[0]
    kinds = [np.bool_, np.int32, np.int64, np.float16, np.float32, np.float64]
    dtypes = [type(np.dtype(kind)) for kind in kinds]
    return [
        *(Namespace, type(Path()), datetime, scalar, (scalar, "numpy.core.multiarray.scalar")),
        *(np.dtype, *dtypes),
    ]


PLAIN_DATA = _plain_data()


def write(path: Path, content: Content) -> None:
    """Write plain data and tensors to a file, whole or not at all; raise SaveError on failure."""
    # In memory first: checksums have to be of what was meant, not of what the disk made of it.
    data = pack(content)
    with atomic_write(path) as file, translated_os_errors(path):
        file.write(data)


def read(path: Path) -> Content:
    """Return what `write` wrote; raise SaveError for a damaged or foreign file."""
    return content_of(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a checkpoint, verified; raise SaveError for a damaged or foreign file."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SaveError(f"{path}: cannot be read: {error.strerror}") from None
    if not data.startswith(ZIP):
        raise SaveError(f"{path}: cut short, or no checkpoint ({len(data)} bytes); {OTHER_FILE}")
    _verify(data, path)
    return data


def _verify(data: bytes, path: Path) -> None:
    try:
        with ZipFile(io.BytesIO(data)) as entries:
            # torch stores, never packs: a packed file of a few KB could ask for all memory.
            is_packed = any(entry.compress_type != ZIP_STORED for entry in entries.infolist())
            is_program = any("/code/" in entry.filename for entry in entries.infolist())
            damaged = None if is_packed else entries.testzip()
    except UNREADABLE:
        raise SaveError(f"{path}: cut short or damaged: its list of entries is lost") from None
    if is_packed:
        what = (
            "a program (TorchScript); save its state_dict()" if is_program else "it is compressed"
        )
        raise SaveError(f"{path}: not a file of weights and plain data: {what}")
    if damaged:
        entry = clean(damaged)[:100]
        raise SaveError(f"{path}: damaged: the checksum of {entry} is not that of its bytes")


def parse(data: bytes, path: Path) -> Content:
    """Return the content of any file of torch.save; a zip is verified first."""
    if data.startswith(ZIP):
        _verify(data, path)
    return content_of(data, path)


def content_of(data: bytes, path: Path) -> Content:
    """Return the content in verified bytes: plain data and tensors only, on the CPU."""
    try:
        content = unpack(data)
    except UNREADABLE as error:
        refused = REFUSED.search(str(error))
        why = kind_of(data, clean(refused[1])[:100] if refused else "")
        raise SaveError(f"{path}: not a file of weights and plain data: {why}") from None
    if not isinstance(content, dict):
        raise SaveError(f"{path}: holds no named weights")
    return content


def pack(content: Content) -> bytes:
    """Return plain data and tensors as bytes."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Content:
    """Return what was packed, on the CPU; code in it is not run but refused."""
    with torch.serialization.safe_globals(PLAIN_DATA), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd bytes, which are refused in our own words
        content: Content = torch.load(  # noqa: TID251
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
    # A run that resumes from an earlier step in the same folder has later ones beside its own.
    for old in [each for each in steps_in(folder.checkpoints) if each <= path][:-keep]:
        with suppress(FileNotFoundError):
            old.unlink()
    return path


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


def keep_best(earlier: RunFolder, folder: RunFolder) -> None:
    """Take over the best checkpoint of the run that this one continues."""
    if earlier.best.exists() and not folder.best.exists():
        write_whole(folder.best, earlier.best.read_bytes())


def remove_partials(folder: RunFolder) -> None:
    """Remove the files that interrupted saves have left."""
    for rubbish in partials(folder.checkpoints):
        rubbish.unlink(missing_ok=True)


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
            say(f"skipped: {problem}")
    raise SaveError(f"{folder}: no checkpoint in it is intact; leave out --resume to start over")
