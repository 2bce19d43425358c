"""`./run-ssh stop RUN-ID`: end a run as Ctrl-C would, and look at every host afterwards."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from launcher import wire
from launcher.conversation import Answer
from launcher.detached.look import Looked, look_at_all
from launcher.detached.record import result_of
from launcher.detached.there import RunOptions, There, reached, talk_to
from launcher.errors import HostLost, LauncherError
from launcher.parallel import each
from launcher.screen import last_line, say
from rackrun.terminal import one_line

LOOK_SECONDS = 0.5
KEEPER_SECONDS = 60.0  # for a keeper to end a run, besides the time for a checkpoint
LINGER_SECONDS = 20.0  # for agents without a keeper: lease, grace, and what a busy host needs


@dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `./run-ssh stop`."""

    now: bool = False
    """Kill every process at once, without a checkpoint."""


def stop(options: StopOptions) -> int:
    """End the run as Ctrl-C would, and look at every host afterwards."""
    with reached(options, need_record=False) as there:
        if there.talk is not None:
            interrupt(there, options.now)
        left = verify(there)
    return HostLost.exit_code if left else 0


def interrupt(there: There, now: bool) -> None:
    """End a detached run, and say how it has ended."""
    if there.talk.ask("interrupt", run=there.run)["done"]:
        say("stopping" if now else "stopping; the ranks may save a checkpoint first")
    else:
        say("it does not run any more")
    found = wait_for_end(there, now)
    if "finish" in found:
        result = result_of(found["finish"], Path(found["finish"]["folder"]))
        say(last_line(result))


def wait_for_end(there: There, now: bool) -> Answer:
    """What is known of the run once its keeper has ended; `now`: tell it again and again."""
    patience = KEEPER_SECONDS + (0 if now else there.found["card"]["checkpoint_seconds"])
    deadline = time.monotonic() + patience
    found = there.found
    while found["alive"]:
        time.sleep(LOOK_SECONDS)
        is_late = time.monotonic() > deadline
        if is_late:
            say("the keeper does not answer: killing it")
        if now or is_late:  # two signals at once may arrive as one
            there.talk.ask("interrupt", run=there.run, kill=is_late)
        found = there.talk.ask("find", run=there.run)
    return found


def verify(there: There) -> bool:
    """Look at every host for what is left, and end it; whether something may still be there."""
    deadline = time.monotonic() + LINGER_SECONDS
    hosts = look_at_all(there)
    while any(host.processes for host in hosts) and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        hosts = look_at_all(there)
    if left := [host for host in hosts if host.processes]:
        outcomes = each(partial(sweep, there.run), left)
        failed = {host.name: outcome for host, outcome in zip(left, outcomes, strict=True)}
        hosts = [with_failure(host, failed.get(host.name)) for host in look_at_all(there)]
    unclean = [host for host in hosts if host.error or host.processes]
    for host in unclean:
        names = ", ".join(str(process["pid"]) for process in host.processes)
        say(f"{host.name}: {host.error or f'still running: {names}'}")
    say(
        f"{len(hosts) - len(unclean)} of {len(hosts)} hosts clean: nothing of the run is left there"
    )
    return bool(unclean)


def with_failure(host: Looked, failure: LauncherError | None) -> Looked:
    """What was found after the sweep, with why that failed where something is left."""
    return replace(host, error=one_line(str(failure))) if failure and host.processes else host


def sweep(run: str, host: Looked) -> None:
    """End what is left on a host: its outposts, and by an agent what an earlier one has left."""
    assert host.place is not None
    with talk_to(host.place, host.python) as talk:
        talk.ask("sweep", run=run)
    for scratch in {process.get("scratch", "") for process in host.processes} - {""}:
        channel = host.place.open(wire.bootstrap(host.python))
        channel.send(wire.opening(wire.order(do="sweep", scratch=scratch)))
        while channel.receive():
            pass
