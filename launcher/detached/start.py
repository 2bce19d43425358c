"""`--detach`: start a run that needs neither this machine nor this terminal any more.

    1  look at every host, as for any run
    2  desk on the first host: put the launcher's code down, start a keeper
    3  outposts on all others: they call the keeper, and stay
    4  "go": the keeper looks, plans and runs; remember here what it is called

Nothing is left running when one of these steps fails.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from launcher.detached.answers import StartAnswer, understood
from launcher.detached.controller import order_of
from launcher.detached.known_runs import remember
from launcher.detached.locate import RUN_BYTES
from launcher.errors import HostUnreachable, PreflightRefused
from launcher.files.working_tree import Code
from launcher.lifecycle.launch_settings import LaunchSettings
from launcher.lifecycle.planning import look
from launcher.lifecycle.serving import folder_to_serve
from launcher.output.console import say
from launcher.remote import relay, run_manager
from launcher.run.hosts import Host
from launcher.run.job import Work
from launcher.run.settings import Serving
from launcher.transport.base import Transport
from launcher.transport.certificate import new_key
from launcher.transport.parallel import all_or_raise, each
from launcher.transport.rpc import Answer, RpcClient
from rackrun.errors import UsageError
from rackrun.terminal import clean_lines

GATHER_SECONDS = 30.0
PACKAGES = ("launcher", "rackrun")


def detach(
    hosts: Sequence[Host],
    places: Sequence[Transport],
    work: Work,
    settings: LaunchSettings,
    config: str,
    code: Code | None,
) -> str:
    """Start a run and let it go; its id. `config`: an ssh_config file, if a special one."""
    with look(hosts, places, work, settings, code) as found:
        seen, address = [finding["look"] for finding in found.findings], found.master
    run = secrets.token_hex(RUN_BYTES)
    words = [secrets.token_hex(16) for _ in hosts[1:]]
    order = {
        **order_of(work, settings, hosts),
        "run": run,
        "address": address,
        "key": new_key(run),
        "words": words,
        "gather_seconds": GATHER_SECONDS,
    }
    python = (
        "python3" if settings.needs.image else seen[0]["python"]
    )  # an image's is not on the host
    talk = RpcClient(places[0], run_manager, python)
    try:
        port = start_keeper(talk, order, python, seen[0]["workdir"])
        call = {"run": run, "address": address, "port": port, "key": order["key"]}
        calls = list(zip(hosts[1:], places[1:], words, seen[1:], strict=True))
        all_or_raise(each(partial(post, call), calls))
        checked(hosts[0].label, talk.ask("ready"))
        if refusal := remember(run, hosts, settings.jobs.runs, config):
            say(refusal)
        checked(hosts[0].label, talk.ask("go"))
    finally:
        talk.close()
    return run


def start_keeper(talk: RpcClient, order: Mapping[str, Any], python: str, workdir: str) -> int:
    """Start the keeper; the port at which it awaits the outposts."""
    labels = [host["label"] for host in order["hosts"]]
    jobs = order["settings"]["jobs"]
    card = {
        "run": order["run"],
        "name": jobs["name"] or order["name"],
        "hosts": labels,
        "checkpoint_seconds": jobs["limits"]["checkpoint_seconds"],
        "at": time.time(),
    }
    words = {"card": card, "python": python, "workdir": workdir, "code": sources()}
    return checked(labels[0], talk.ask("keep", order=order, **words)).port


def refuse_what_needs_us(work: Work, serving: Serving, addresses: Sequence[str]) -> None:
    """A detached run cannot be given what only this launcher has."""
    if folder_to_serve(work, serving, addresses) is not None:
        raise UsageError(
            "--detach: this launcher would serve the shards, and it does not stay;"
            " serve them yourself (python -m nginx --help) and give --data http://...,"
            " or type --no-serve when every host has the folder"
        )


def post(call: Mapping[str, Any], host: tuple[Host, Transport, str, Answer]) -> None:
    """Leave an outpost on a host."""
    there, place, word, seen = host
    talk = RpcClient(place, relay, seen["python"])
    try:
        checked(there.label, talk.ask("stay", word=word, **call))
    finally:
        talk.close()


def checked(name: str, answer: Answer) -> StartAnswer:
    """The answer, unless it is an error."""
    told = understood(name, answer, StartAnswer)
    if told.error:
        kind = HostUnreachable if told.code == HostUnreachable.exit_code else PreflightRefused
        why = clean_lines(told.error)
        raise kind(f"{name}: no detached run could be started: {why}")
    return told


def sources() -> dict[str, str]:
    """Return the code that a controller needs: path below the repository -> text."""
    root = Path(__file__).parents[2]
    paths = (path for package in PACKAGES for path in (root / package).rglob("*.py"))
    return {str(path.relative_to(root)): path.read_text() for path in paths}
