"""What --sync brings beside the user's project: the code of an installed rackrun, and wheels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from launcher.files.working_tree import WorkingTree
from launcher.remote.files import INSTALLED, file_digest
from rackrun.contract import variables
from rackrun.contract.tasks import PLATFORM, TASKS
from rackrun.cuda import BASE
from rackrun.errors import UsageError

_LOCKS = ("base.txt", "cuda12.txt")
_MODE = 0o644


def with_installed(code: WorkingTree) -> WorkingTree:
    """Return the code and, where it is not rackrun's own repository, the installed packages."""
    ours = Path(__file__).parents[2]
    if code.root.resolve() == ours:
        return code
    return _beside(code, dict(_files(ours)))


def with_wheels(code: WorkingTree, folder: Path) -> WorkingTree:
    """Return the code and the wheels of a folder, from which venv.sh then installs.

    Raises UsageError where the folder holds none.
    """
    wheels = {f"wheels/{path.name}": path for path in sorted(folder.glob("*.whl"))}
    if not wheels:
        lock = f"requirements/{os.environ.get(variables.LOCK) or BASE}.txt"
        raise UsageError(
            f"--sync-wheels {folder}: holds no wheel; type: python3 -m pip download"
            f" --require-hashes --only-binary :all: -r {lock} -d {folder}"
        )
    return _beside(code, wheels)


def _beside(code: WorkingTree, files: Mapping[str, Path]) -> WorkingTree:
    """Return the code and files of other folders, which come to lie below .rackrun/."""
    sources = {f"{INSTALLED}/{path}": source for path, source in files.items()}
    return replace(
        code,
        files={**code.files, **_digests(sources)},
        modes={**code.modes, **dict.fromkeys(sources, _MODE)},
        sources={**code.sources, **sources},
    )


def _files(ours: Path) -> Iterator[tuple[str, Path]]:
    """Yield path and source of all files of the packages, and of the locks that venv.sh reads."""
    for package in (*PLATFORM, *TASKS):
        for source in sorted((ours / package).rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts and source.name not in _LOCKS:
                yield str(source.relative_to(ours)), source
    for lock in _LOCKS:
        yield f"requirements/{lock}", (ours / "launcher" / lock).resolve()


def _digests(sources: Mapping[str, Path]) -> dict[str, str]:
    return {path: file_digest(str(source)) for path, source in sources.items()}
