"""Contents of files that a line needs: class folders, archives, links, damage, what a line makes.

A content that is a function is called with the path when the file is written. One that damages a
file stands behind that file's own entry.
"""

import io
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.lab import warm
from tests.lab.data import drawn, tar
from tests.lab.data import zipped as zipped
from tests.lab.run import Content, run, write

Made = Callable[[Path], object]
fifo: Made = os.mkfifo


def classes(count: int, *names: str) -> dict[str, bytes]:
    """Return so many images for each class folder; all images differ."""
    return {f"{name}/{n}.jpg": drawn(f"{name} {n}") for name in names for n in range(count)}


def below(folder: str, files: Mapping[str, Content]) -> dict[str, Content]:
    """Return the same files in a folder."""
    return {f"{folder}/{name}": content for name, content in files.items()}


def tarred(*members: tuple[str, bytes]) -> bytes:
    """Return a tar of these members; a name may be in it twice."""
    return tar(members)


def tar_of(name: str, kind: bytes, target: str) -> bytes:
    """Return a tar of a link or device."""
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        archive.addfile(member)
    return stored.getvalue()


def link(target: str) -> Made:
    """Return a symbolic link."""
    return lambda path: path.symlink_to(target)


def program(text: str) -> Made:
    """Return a script that can be run."""

    def write_program(path: Path) -> None:
        path.write_text(text)
        path.chmod(0o755)

    return write_program


def written(make: Callable[[], bytes]) -> Made:
    """Return a file whose content is made when it is written: for what takes long to make."""
    return lambda path: path.write_bytes(make())


def sparse(size: int) -> Made:
    """Return a file of so many zeros that takes no room."""

    def write_sparse(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write_sparse


def changed(change: Callable[[bytearray], object]) -> Made:
    """Return damage: the file's bytes after a change in place, or those that the change returns."""

    def rewrite(path: Path) -> None:
        data = bytearray(path.read_bytes())
        result = change(data)
        path.write_bytes(result if isinstance(result, (bytes, bytearray)) else data)

    return rewrite


def flipped(at: int) -> Made:
    """Return damage: one bit at this byte."""

    def flip(data: bytearray) -> None:
        data[at] ^= 1

    return changed(flip)


def cut(end: int) -> Made:
    """Return damage: the file ends here."""
    return changed(lambda data: data[:end])


def with_fields(**fields: Any) -> Made:
    """Return damage: a JSON file in which these fields have other values."""
    return changed(lambda data: json.dumps({**json.loads(data), **fields}).encode())


def signed(**fields: Any) -> Made:
    """Return damage: a manifest in which these fields have other values, and the right digest."""

    def sign(data: bytearray) -> bytes:
        manifest = {**json.loads(data), **fields}
        del manifest["sha256"]
        text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
        return json.dumps({**manifest, "sha256": sha256(text.encode()).hexdigest()}).encode()

    return changed(sign)


def in_place(made: Made) -> Made:
    """Return damage: something else lies in the file's place."""

    def exchange(path: Path) -> None:
        path.unlink()
        made(path)

    return exchange


def removed(path: Path) -> None:
    """Remove the file, or the folder with all that is in it."""
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def made_by(*lines: str, name: str, **files: Content) -> Made:
    """Return a copy of what lines leave under this name; they are typed once for all tests."""

    def copy(path: Path) -> None:
        made = _typed(lines, tuple(files.items())) / name
        shutil.copytree(made, path, symlinks=True) if made.is_dir() else shutil.copy(made, path)

    return copy


@cache
def _typed(lines: tuple[str, ...], files: tuple[tuple[str, Content], ...]) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="made-", dir=warm.interpreter().parent))
    write(folder, dict(files))
    for line in lines:
        result = run(line, folder)
        assert result.code == 0, result
    return folder
