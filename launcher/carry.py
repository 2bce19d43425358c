"""Brings the working tree to the hosts before a run, and the results back after it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath

from launcher import porter
from launcher.code import Code
from launcher.conversation import Conversation
from launcher.errors import LauncherError, PreflightRefused
from launcher.parallel import all_or_raise, each
from launcher.place import Place
from launcher.plan import HostPlan, Plan

Say = Callable[[str], object]


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
        for path in files:
            _fetch(talk, plan.folder, path, folder)
        return sorted(files)
    finally:
        talk.close()


def has_checkpoint(places: Sequence[Place], plan: Plan) -> bool:
    """Whether a run left a checkpoint on any of its hosts that can be asked."""

    def ask(number: int) -> bool:
        talk = Conversation(places[number], porter, plan.hosts[number].agent_python)
        try:
            return bool(talk.ask("checkpoints", folder=plan.hosts[number].folder)["some"])
        finally:
            talk.close()

    return any(answer is True for answer in each(ask, range(len(places))))


def _bring(code: Code, destination: Destination, say: Say) -> None:
    name = destination.place.name
    talk = Conversation(destination.place, porter, destination.python)
    try:
        there = talk.ask("differences", root=destination.workdir, files=dict(code.files))
        _check(name, there.get("error"))
        for number, path in enumerate(there["paths"], start=1):
            _send(talk, code.root / path, there["root"], path, name)
            if number == len(there["paths"]) or number % 500 == 0:
                say(f"{name}: {number} of {len(there['paths'])} files brought to {there['root']}")
        if there["paths"]:
            _check(
                name, talk.ask("finish", root=there["root"], paths=list(code.files)).get("error")
            )
        _make_environment(talk, there["root"], name, say)
    finally:
        talk.close()


def _send(talk: Conversation, source: Path, root: str, path: str, name: str) -> None:
    link = source.is_symlink()
    content = os.fsencode(source.readlink()) if link else source.read_bytes()
    mode = 0o755 if not link and os.access(source, os.X_OK) else 0o644
    words = {"root": root, "path": path, "size": len(content), "mode": mode, "link": link}
    _check(name, talk.ask_with(content, "write", **words).get("error"))


def _make_environment(talk: Conversation, root: str, name: str, say: Say) -> None:
    answer = talk.ask("environment", root=root)
    last = ""
    while "said" in answer:
        last = answer["said"]
        say(f"{name}: {last}")
        answer = talk.answer()
    if answer.get("code"):
        raise PreflightRefused(f"{name}: no environment could be made in {root}: {last}")


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
    with incomplete.open("wb") as file:
        for piece in talk.receive(answer["size"]):
            file.write(piece)
    talk.answer()
    incomplete.replace(target)


def _check(name: str, error: str | None) -> None:
    if error:
        raise PreflightRefused(f"{name}: the code could not be brought there: {error}")
