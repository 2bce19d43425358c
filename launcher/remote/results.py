"""The results of a run on a host: listing them, and sending them back."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import sys
from collections.abc import Callable, Sequence
from typing import Any

from rackrun.launcher.remote.files import PIECE_BYTES, READ, contents, explained, path_below
from rackrun.launcher.remote.service import reply

PLAN_BYTES = 1 << 26


def results(folder: str, run_id: str, kept: Sequence[str], most: int) -> dict[str, Any]:
    """Return the files of a run folder and their sizes; none when that folder is the launcher's.

    Names in `kept` are left out at the top. More files than `most` are an error. Files whose names
    a terminal cannot show are only counted.
    """
    with contextlib.suppress(OSError, ValueError, RecursionError):
        plan = json.loads(contents(os.path.join(folder, "plan.json"), PLAN_BYTES))
        if isinstance(plan, dict) and plan.get("run_id") == run_id:
            return {"files": {}}  # the launcher's own plan: both see the same folder
    sizes: dict[str, int] = {}
    odd = 0
    for parent, folders, names in os.walk(folder):
        stay = kept if parent == folder else ()
        folders[:] = [name for name in folders if name not in stay]
        for name in names:
            path = os.path.join(parent, name)
            try:
                status = os.lstat(path)
            except OSError:  # it has gone meanwhile
                continue
            if name in stay or not stat.S_ISREG(status.st_mode):
                continue
            relative = os.path.relpath(path, folder)
            if relative.isprintable():
                sizes[relative] = status.st_size
            else:
                odd += 1
        if len(sizes) > most:
            return {"error": f"more than {most} files"}
    return {"files": sizes, "odd": odd}


def send(folder: str, paths: list[str]) -> dict[str, Any]:
    """Send files one after the other: for each its size or an error, its bytes, an error or {}."""
    for path in paths:
        try:
            file = os.open(path_below(folder, path), READ)
        except OSError as error:
            reply({"error": explained(OSError(error.errno, error.strerror, path))})
            continue
        with os.fdopen(file, "rb") as stream:
            _send_one(stream)
    return {}


def _send_one(stream: Any) -> None:
    # The size is announced already: zeros replace what cannot be read, and the error follows.
    status = os.fstat(stream.fileno())
    left, error = status.st_size if stat.S_ISREG(status.st_mode) else 0, ""
    reply({"size": left})
    while left:
        piece = b""
        try:
            piece = b"" if error else stream.read(min(left, PIECE_BYTES))
            error = error or ("" if piece else "became shorter while it was read")
        except OSError as problem:
            error = explained(problem)
        piece = piece or bytes(min(left, PIECE_BYTES))
        left -= len(piece)
        sys.stdout.buffer.write(piece)
    reply({"error": error} if error else {})


ORDERS: dict[str, Callable[..., dict[str, Any]]] = {"results": results, "send": send}
