"""What the nodes of a run must have in common before they train together, and what differs."""

from __future__ import annotations

import hashlib
import platform
import shlex
from collections.abc import Sequence
from importlib import metadata

from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.rendezvous.gather import NodeInfo, NodeWork
from rackrun.launcher.run.job import Work, run_name
from rackrun.terminal import one_line

SHOWN = 60  # characters of an argument
CHECKS = {
    "name": ("command", "another --name"),
    "environment": ("command", "other --env"),
    "code": ("code", "other code in this folder"),
    "python": ("versions", "Python"),
    "torch": ("versions", "torch"),
}
"""Part of a node's work -> what --ignore-check calls it, and what messages do."""


def work_here(work: Work, options: NodeOptions) -> NodeWork:
    """Return what this node would run, to be compared with the other nodes."""
    code = code_here(options.runs) if "code" not in options.ignore_check else None
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = ""
    return NodeWork(
        command=tuple(map(_digest, work.argv("python"))),
        name=run_name(options, work),
        environment=_digest(repr(sorted(options.environment))),
        code=_digest(repr(sorted(code.files.items()))) if code and code.files else "",
        python=platform.python_version().rpartition(".")[0],
        torch=torch[:64],
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]


def refuse_other_work(
    nodes: Sequence[NodeInfo], work: Work, ignored_checks: Sequence[str] = ()
) -> None:
    """Raise PreflightRefused where a node would run something else than node 0, which runs this."""
    first = nodes[0]
    for node in nodes[1:]:
        if why := _difference(first, node, work, ignored_checks):
            check, problem = why
            raise PreflightRefused(
                f"{node.name} (node {node.node}) has {problem}, unlike {first.name} (node 0);"
                f" start the same on every node, or type --ignore-check {check}"
            )


def _difference(
    first: NodeInfo, node: NodeInfo, work: Work, ignored_checks: Sequence[str]
) -> tuple[str, str] | None:
    if node.work.command != first.work.command and "command" not in ignored_checks:
        return "command", f"another command{_place(first, node, work)}"
    for part, (check, problem) in CHECKS.items():
        ours, theirs = getattr(first.work, part), getattr(node.work, part)
        if ours == theirs or check in ignored_checks or (part == "code" and not (ours and theirs)):
            continue
        return check, f"{problem} {theirs}, not {ours}" if check == "versions" else problem
    return None


def _place(first: NodeInfo, node: NodeInfo, work: Work) -> str:
    """Return the first word of this node's command that the other node has not."""
    words = work.argv("python")
    for index, word in enumerate(words):
        if node.work.command[index : index + 1] != first.work.command[index : index + 1]:
            option = words[index - 1] if index and words[index - 1].startswith("-") else ""
            shown = one_line(shlex.join(filter(None, (option, word))))[:SHOWN]
            return f" from {shown} on"
    return " (more words)"
