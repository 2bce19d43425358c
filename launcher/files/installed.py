"""The code of an installed rackrun, which --sync brings to hosts beside the user's project."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.files.working_tree import WorkingTree
from launcher.remote.files import INSTALLED, file_digest
from rackrun.contract import PLATFORM, TASKS

_LOCK = "base.txt"
_MODE = 0o644


def with_installed(code: WorkingTree) -> WorkingTree:
    """Return the code and, where it is not rackrun's own repository, the installed packages."""
    ours = Path(__file__).parents[2]
    if code.root.resolve() == ours:
        return code
    sources = {f"{INSTALLED}/{path}": source for path, source in _files(ours)}
    return replace(
        code,
        files={**code.files, **_digests(sources)},
        modes={**code.modes, **dict.fromkeys(sources, _MODE)},
        sources=sources,
    )


def _files(ours: Path) -> Iterator[tuple[str, Path]]:
    """Yield path and source of all files of the packages, and of the lock that venv.sh reads."""
    for package in (*PLATFORM, *TASKS):
        for source in sorted((ours / package).rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts and source.name != _LOCK:
                yield str(source.relative_to(ours)), source
    yield f"requirements/{_LOCK}", (ours / "launcher" / _LOCK).resolve()


def _digests(sources: Mapping[str, Path]) -> dict[str, str]:
    return {path: file_digest(str(source)) for path, source in sources.items()}
