"""A file server that is down: a FUSE file system that does not answer."""

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.needs import need

NOSUID_NODEV = 6
MNT_DETACH = 2


@contextmanager
def silent_disk(folder: Path) -> Iterator[Path]:
    """Mount a disk that does not answer: who reads it waits until this ends."""
    need("root")
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    replies = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    text = f"fd={replies},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    target = os.fsencode(folder)
    assert not libc.mount(b"silent", target, b"fuse", NOSUID_NODEV, text), ctypes.get_errno()
    try:
        yield folder
    finally:
        os.close(replies)  # ends all that wait
        assert not libc.umount2(target, MNT_DETACH), ctypes.get_errno()
