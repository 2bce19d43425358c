"""The programs of a detached run: the controller on its first host, a relay on every other."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launcher.detached.answers import RunSummary, StartAnswer, parsed_answer
from launcher.detached.controller import RunOrder
from launcher.errors import HostUnreachable, PreflightRefused
from launcher.remote import relay
from launcher.run.hosts import Host
from launcher.transport.base import Transport
from launcher.transport.rpc import Answer, RpcClient
from rackrun.terminal import clean_lines

_PACKAGES = ("launcher", "rackrun")


def start_controller(client: RpcClient, order: RunOrder, python: str, workdir: str) -> int:
    """Start the controller, and return the port at which it awaits the relays."""
    labels, jobs = tuple(host.label for host in order.hosts), order.settings.jobs
    summary = RunSummary(
        run=order.run,
        name=jobs.name or order.work.name,
        hosts=labels,
        checkpoint_seconds=jobs.limits.checkpoint_seconds,
        at=time.time(),
        task=order.work.name,
    )
    reply = client.call(
        "start",
        summary=asdict(summary),
        python=python,
        workdir=workdir,
        code=sources(),
        order=order.plain,
    )
    return checked(labels[0], reply).port


def start_relay(call: Mapping[str, Any], target: tuple[Host, Transport, str, Answer]) -> None:
    """Start a relay on a host, which calls the controller and stays."""
    host, transport, token, facts = target
    client = RpcClient(transport, relay, facts["python"])
    try:
        checked(host.label, client.call("stay", token=token, **call))
    finally:
        client.close()


def checked(name: str, reply: Answer) -> StartAnswer:
    """Return the answer; raise HostError when it is an error."""
    outcome = parsed_answer(name, reply, StartAnswer)
    if outcome.error:
        kind = HostUnreachable if outcome.code == HostUnreachable.exit_code else PreflightRefused
        why = clean_lines(outcome.error)
        raise kind(f"{name}: no detached run could be started: {why}")
    return outcome


def sources() -> dict[str, str]:
    """Return the code that a controller needs: path below the repository -> text."""
    root = Path(__file__).parents[2]
    paths = (path for package in _PACKAGES for path in (root / package).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}
