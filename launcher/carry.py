"""Brings the working tree to the hosts before a run, and the results back after it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from launcher import porter
from launcher.code import Code
from launcher.conversation import Answer, Conversation
from launcher.errors import LauncherError, PreflightRefused
from launcher.parallel import all_or_raise, each
from launcher.place import Place
from launcher.plan import HostPlan

Say = Callable[[str], object]

FILES_PER_LINE = 500
BATCH_BYTES = 1 << 18


@dataclass(frozen=True)
class Destination:
    """Where the code goes on one host."""

    place: Place
    workdir: str
    python: str = ""


def bring_code(code: Code, destinations: Sequence[Destination], say: Say) -> None:
    """Make the files of every host equal to ours, all hosts at once; only what differs is sent."""
    all_or_raise(each(partial(_bring, code, say=say), destinations))


def fetch_results(
    place: Place,
    plan: HostPlan,
    run_id: str,
    folder: Path,
    heavy: Sequence[str] = porter.HEAVY,
) -> list[str]:
    """Copy the run folder of a host into ours, but for checkpoints and logs; the files' names."""
    talk = Conversation(place, porter, plan.agent_python)
    try:
        wanted = {"folder": plan.folder, "run_id": run_id, "heavy": heavy}
        files = talk.ask("results", **wanted).get("files", {})
        wanted_files = [path for path in files if _comes(path, heavy)]
        for path in wanted_files:
            _fetch(talk, plan.folder, path, folder)
        return sorted(wanted_files)
    finally:
        talk.close()


def _bring(code: Code, destination: Destination, say: Say) -> None:
    name = destination.place.name
    talk = Conversation(destination.place, porter, destination.python)
    try:
        wanted = {"files": dict(code.files), "programs": code.programs}
        there = talk.ask("differences", root=destination.workdir, **wanted)
        _check(name, there.get("error"))
        if there["paths"] or there["gone"]:
            _send(talk, code, there, partial(_progress, say, name, there))
            _check(name, talk.answer().get("error"))
        _make_environment(talk, there["root"], name, say)
    finally:
        talk.close()


def _send(talk: Conversation, code: Code, there: Answer, sent: Callable[[int], object]) -> None:
    """All files that differ as one stream; `sent` hears how many are on their way."""
    paths, batch = list(code.files), bytearray()
    talk.order("unpack", root=there["root"], gone=there["gone"], paths=paths)
    for number, path in enumerate(there["paths"], start=1):
        source = code.root / path
        link = source.is_symlink()
        content = os.fsencode(source.readlink()) if link else source.read_bytes()
        mode = 0o755 if porter.is_program(os.fspath(source)) else 0o644
        header = {"path": path, "size": len(content), "mode": mode, "link": link}
        batch += json.dumps(header).encode() + b"\n" + content
        if len(batch) > BATCH_BYTES:
            talk.send(bytes(batch))
            batch.clear()
        sent(number)
    talk.send(bytes(batch) + b"\n")


def _progress(say: Say, name: str, there: Answer, number: int) -> None:
    total = len(there["paths"])
    if number == total or number % FILES_PER_LINE == 0:
        say(f"{name}: {number} of {total} files brought to {there['root']}")


def _make_environment(talk: Conversation, root: str, name: str, say: Say) -> None:
    answer = talk.ask("environment", root=root)
    last = ""
    while "said" in answer:
        last = answer["said"]
        say(f"{name}: {last}")
        answer = talk.answer()
    if answer.get("code"):
        raise PreflightRefused(f"{name}: no environment could be made in {root}: {last}")


def _comes(path: str, heavy: Sequence[str]) -> bool:
    """Whether a file may come: not what was to stay, nor what makes git run a host's commands."""
    parts = PurePosixPath(path).parts
    return parts[:1] not in [(name,) for name in heavy] and ".git" not in map(str.lower, parts)


def _fetch(talk: Conversation, source: str, path: str, folder: Path) -> None:
    """One file, whole or not at all, and nowhere but below our folder."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise LauncherError(f"a host offers a file outside of its run folder: {path!r}")
    answer = talk.ask("read", folder=source, path=path)
    if "size" not in answer:
        raise LauncherError(f"{path} could not be fetched: {answer.get('error')}")
    target = folder / path
    target.parent.mkdir(parents=True, exist_ok=True)
    incomplete = target.with_name(f".{target.name}.partial")
    try:
        with incomplete.open("wb") as file:
            for piece in talk.receive(answer["size"]):
                file.write(piece)
        talk.answer()
        incomplete.replace(target)
    finally:
        incomplete.unlink(missing_ok=True)


def _check(name: str, error: str | None) -> None:
    if error:
        raise PreflightRefused(f"{name}: the code could not be brought there: {error}")
