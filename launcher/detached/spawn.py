"""The programs of a detached run: the controller on its first host, a relay on every other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.detached.answers import StartAnswer, parsed_answer
from launcher.errors import HostUnreachable, PreflightRefused
from launcher.remote import relay
from launcher.run.hosts import Host
from launcher.transport.base import Transport
from launcher.transport.rpc import Answer, RpcClient
from rackrun.terminal import clean_lines

_PACKAGES = ("launcher", "rackrun")


def start_controller(client: RpcClient, order: Mapping[str, Any], python: str, workdir: str) -> int:
    """Start the controller, and return the port at which it awaits the relays."""
    labels = [host["label"] for host in order["hosts"]]
    jobs = order["settings"]["jobs"]
    summary = {
        "run": order["run"],
        "name": jobs["name"] or order["name"],
        "task": order["name"],
        "hosts": labels,
        "checkpoint_seconds": jobs["limits"]["checkpoint_seconds"],
        "at": time.time(),
    }
    words = {"summary": summary, "python": python, "workdir": workdir, "code": sources()}
    return checked(labels[0], client.call("start", order=order, **words)).port


def start_relay(call: Mapping[str, Any], host: tuple[Host, Transport, str, Answer]) -> None:
    """Start a relay on a host, which calls the controller and stays."""
    there, place, word, seen = host
    client = RpcClient(place, relay, seen["python"])
    try:
        checked(there.label, client.call("stay", word=word, **call))
    finally:
        client.close()


def checked(name: str, answer: Answer) -> StartAnswer:
    """Return the answer; raise HostError when it is an error."""
    told = parsed_answer(name, answer, StartAnswer)
    if told.error:
        kind = HostUnreachable if told.code == HostUnreachable.exit_code else PreflightRefused
        why = clean_lines(told.error)
        raise kind(f"{name}: no detached run could be started: {why}")
    return told


def sources() -> dict[str, str]:
    """Return the code that a controller needs: path below the repository -> text."""
    root = Path(__file__).parents[2]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}
