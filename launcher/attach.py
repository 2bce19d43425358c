"""`./run-ssh attach|status|logs|stop RUN-ID`: look after a detached run, from any machine.

The first host of the run has its record, and its keeper if it still runs (see `desk`). The hosts
are those that were written down here when the run was started, or those of --hosts FILE.
"""

from __future__ import annotations

import fcntl
import json
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import tyro

from launcher import desk, wire
from launcher.carry import fetch_results
from launcher.conversation import Answer, Conversation
from launcher.errors import AccessRefused, HostLost, HostUnreachable, LauncherError, UsageError
from launcher.hosts import Host, read_hosts
from launcher.job import RUN_ID_BYTES, Job
from launcher.lines import one_line
from launcher.memory import host_of, remembered
from launcher.options import parse
from launcher.parallel import each
from launcher.place import Place
from launcher.plan import Plan
from launcher.record import Entry, plan_of, result_of
from launcher.replay import LogScreen, Replay
from launcher.screen import Screen, clock, last_line, say
from launcher.session import open_screen

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from launcher.ssh import Network

QUEUED_ENTRIES = 256
TURN_SECONDS = 0.1
LOOK_SECONDS = 0.5
KEEPER_SECONDS = 60.0  # for a keeper to end a run, besides the time for a checkpoint
LINGER_SECONDS = 20.0  # for agents without a keeper: lease, grace, and what a busy host needs
HOSTS_FILE = Path("hosts.txt")
EARLIER = ("", "connecting", "starting")  # what a keeper may still say of a host whose ranks run
LEASE = ("heard_seconds_ago", "lease_seconds")


@dataclass(frozen=True)
class RunOptions:
    """What leads to a run."""

    run: tyro.conf.Positional[str]
    """Id of the run, as --detach printed it; its first characters are enough. With stop also
    that of a run that ended here, and left hosts that nobody could verify."""
    hosts: str = ""
    """The host file of the run, on a machine where it was not started."""
    ssh_config: str = ""
    """An ssh_config file to use in place of your own and the system's."""
    accept_new: bool = False
    """Record the keys of hosts that are not in known_hosts; changed keys are refused still."""


@dataclass(frozen=True)
class AttachOptions(RunOptions):
    """Options of `./run-ssh attach`."""

    runs: str = ""
    """Folder for the results; by default that of the start, or runs."""
    plain: bool = False
    """Plain lines instead of the board."""


@dataclass(frozen=True)
class StatusOptions(RunOptions):
    """Options of `./run-ssh status`."""

    json: bool = False
    """Print it as JSON."""


@dataclass(frozen=True)
class LogsOptions(RunOptions):
    """Options of `./run-ssh logs`."""

    host: tuple[str, ...] = ()
    """Only this host; may be given several times."""
    rank: tuple[int, ...] = ()
    """Only this rank; may be given several times."""
    follow: bool = False
    """Wait for more, until the run ends."""


@dataclass(frozen=True)
class StopOptions(RunOptions):
    """Options of `./run-ssh stop`."""

    now: bool = False
    """Kill every process at once, without a checkpoint."""


def main(verb: str, args: Sequence[str]) -> int:
    """What `./run-ssh VERB ARGS` does."""
    settings, work, about = VERBS[verb]
    options = parse(settings, f"./run-ssh {verb}", args, about)
    if not re.fullmatch(r"[0-9a-f]{1,32}", options.run):
        raise UsageError(f"{options.run!r} is no run id: --detach printed one, such as 3fa81c02")
    return work(options)


# -- attach


def attach(options: AttachOptions) -> int:
    """Show the run from its beginning until its end, or until Ctrl-C."""
    with reached(options) as there, hearing_the_end():
        fetch = partial(bring_here, there, options.runs)
        try:
            with Replay(open_screen, options.plain, fetch) as replay:
                watch(there, replay, on=True)
        except KeyboardInterrupt as interrupt:
            say("detached, the run goes on")
            say(f"come back: ./run-ssh attach {there.run}; end it: ./run-ssh stop {there.run}")
            return int(interrupt.args[0]) if interrupt.args else 0
        return verdict(there, replay)


def verdict(there: There, replay: Replay) -> int:
    """The exit code of a run that was watched to its end."""
    if replay.gone:
        return 128 + signal.SIGPIPE
    if replay.code is None:
        say(f"the keeper on {there.host.label} is gone, and its hosts have ended the run")
        say(f"what is left: ./run-ssh status {there.run}")
        return HostLost.exit_code
    if replay.error:
        sys.stderr.write(f"error: {replay.error}\n")
    return replay.code


def watch(there: There, replay: Replay, on: bool) -> None:
    """Feed all entries to a replay, until there are no more, or nobody reads."""
    entries: queue.Queue[tuple[Entry, bytes]] = queue.Queue(QUEUED_ENTRIES)
    reader = partial(read_entries, there, on, entries)
    threading.Thread(target=reader, daemon=True).start()
    while not replay.gone:
        try:
            entry, data = entries.get(timeout=TURN_SECONDS)
        except queue.Empty:
            replay.wait()
            continue
        if "lost" in entry:
            hint = f"the run goes on; come back: ./run-ssh attach {there.run}"
            raise HostLost(f"{there.host.label}: {entry['lost']}; {hint}")
        if "alive" in entry:
            return
        replay.take(entry, data)


def read_entries(there: There, on: bool, entries: queue.Queue[tuple[Entry, bytes]]) -> None:
    """On a thread of its own: the entries of a record and the bytes of outputs, as they come."""
    try:
        entry = dict(there.talk.ask("follow", run=there.run, on=on))
        while True:
            size = entry["output"][3] if "output" in entry else 0
            entries.put((entry, b"".join(there.talk.receive(size))))
            if "alive" in entry:
                return
            entry = dict(there.talk.answer())
    except LauncherError:
        entries.put(({"lost": "the connection broke"}, b""))


def bring_here(there: There, runs: str, attempt: dict[str, Any]) -> Path:
    """Copy the run folder of an attempt, logs and all but for checkpoints; our folder of it."""
    source = Path(attempt["folder"])
    target = Path(runs or there.runs).resolve() / source.name
    plan = plan_of(attempt).hosts[0]
    try:
        target.mkdir(parents=True, exist_ok=True)
        with alone_in(target):
            if not is_same(there, source, target):
                fetch_results(there.place, plan, "", target, heavy=("checkpoints",))
    except (LauncherError, OSError) as error:
        say(f"the results are still on {there.host.label}, in {source}: {one_line(str(error))}")
        return source
    return target


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Keep other attached launchers out of a folder meanwhile, where folders can be locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def is_same(there: There, source: Path, target: Path) -> bool:
    """Whether the host and we have this folder in common: it sees what we put in."""
    mark = target / f".seen-{os.getpid()}-{time.time_ns()}"
    mark.touch()
    try:
        with talk_to(there.place, there.host.python) as talk:  # the other one is following
            return bool(talk.ask("exists", path=str(source / mark.name))["exists"])
    finally:
        mark.unlink()


@contextmanager
def talk_to(place: Place, python: str | None) -> Iterator[Conversation]:
    """A conversation with the desk of a host, closed afterwards."""
    talk = Conversation(place, desk, python or "")
    try:
        yield talk
    finally:
        talk.close()


# -- logs


def logs(options: LogsOptions) -> int:
    """Print what the ranks wrote."""

    def screens(job: Job, plan: Plan, plain: bool) -> AbstractContextManager[Screen]:
        if unknown := set(options.host) - {host.name for host in plan.hosts}:
            names = ", ".join(host.name for host in plan.hosts)
            raise UsageError(f"--host {min(unknown)}: there are: {names}")
        if strange := set(options.rank) - set(range(plan.world_size)):
            raise UsageError(f"--rank {min(strange)}: there are: 0 to {plan.world_size - 1}")
        screen = LogScreen(plan)
        screen.hosts, screen.ranks = options.host, options.rank
        return screen

    with reached(options) as there, hearing_the_end():
        try:
            with Replay(screens, True, lambda attempt: Path(attempt["folder"])) as replay:
                watch(there, replay, on=options.follow)
                if isinstance(replay.screen, LogScreen):
                    replay.screen.let_out()
                    replay.draw()
        except KeyboardInterrupt as interrupt:
            return int(interrupt.args[0]) if interrupt.args else 128 + signal.SIGINT
        return 128 + signal.SIGPIPE if replay.gone else 0


# -- stop


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


# -- status


def status(options: StatusOptions) -> int:
    """Say what really runs on every host."""
    with reached(options, need_keeper=False) as there:
        hosts = look_at_all(there)
    told = report(there, hosts)
    sys.stdout.write(f"{json.dumps(told, indent=2)}\n" if options.json else describe(told))
    return HostUnreachable.exit_code if there.error else 0


@dataclass(frozen=True)
class Looked:
    """What was found on a host."""

    name: str
    place: Place | None
    python: str = ""
    """The interpreter that answered there."""
    processes: tuple[dict[str, Any], ...] = ()
    """Those of the run, with what each is there for."""
    error: str = ""


def look_at_all(there: There) -> list[Looked]:
    """Ask every host of the run what runs there."""
    hosts = [host for host in there.hosts if host.label in (there.labels or (host.label,))]
    if not there.places:
        there.places = there.network.try_each(hosts)
    pairs = list(zip(hosts, there.places, strict=True))
    answers = each(partial(look_at, there.run), pairs)
    looked = [
        Looked(host.label, None, error=in_short(answer, host))
        if isinstance(answer, LauncherError)
        else answer
        for host, answer in zip(hosts, answers, strict=True)
    ]
    return without_namesakes(there, looked)


def in_short(error: LauncherError, host: Host) -> str:
    """The first line of an error of a host, which is named already."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))


def look_at(run: str, pair: tuple[Host, Place | LauncherError]) -> Looked:
    """What one host answers."""
    host, place = pair
    if isinstance(place, LauncherError):
        raise place
    with talk_to(place, host.python) as talk:
        found = talk.ask("processes", run=run)
    return Looked(host.label, place, found["python"], tuple(found["processes"]))


def without_namesakes(there: There, looked: Sequence[Looked]) -> list[Looked]:
    """Of hosts that are one machine, each with its own processes only."""
    state = there.found.get("state", {})
    names = [host["name"] for host in state.get("hosts", ())]
    scratch = f"/tmp/rackrun-{state.get('run_id')}"
    owners: dict[str, str] = {f"{scratch}-{node}": name for node, name in enumerate(names)}

    def owner(process: dict[str, Any], default: str) -> str:
        if process["role"] == "keeper":
            return there.host.label
        return owners.get(process.get("scratch", ""), default)

    return [
        replace(
            host, processes=tuple(p for p in host.processes if owner(p, host.name) == host.name)
        )
        for host in looked
    ]


def report(there: There, hosts: Sequence[Looked]) -> dict[str, Any]:
    """All that is known, as `--json` has it."""
    found = there.found
    state = found.get("state", {})
    known = {host["name"]: host for host in state.get("hosts", ())}
    return {
        "run": there.run,
        "name": found.get("card", {}).get("name", ""),
        "keeper": {"host": there.host.label, "alive": found.get("alive"), "error": there.error},
        "exit_code": found.get("end"),
        "error": found.get("error", ""),
        "verdict": found.get("finish", {}).get("verdict", ""),
        "cause": found.get("finish", {}).get("cause", ""),
        "folder": state.get("folder", ""),
        "seconds": state.get("seconds"),
        "hosts": [reported(host, known.get(host.name, {})) for host in hosts],
    }


def reported(host: Looked, known: dict[str, Any]) -> dict[str, Any]:
    """One host: what runs there, and what its ranks said last."""
    steps = list(known.get("steps", {}).values()) or [0]
    agents = [process for process in host.processes if process["role"] == "agent"]
    ranks = [process for process in host.processes if process["role"] == "rank"]
    return {
        "name": host.name,
        "error": host.error,
        "state": state_of(host, bool(ranks), known),
        "step": min(steps) if ranks and known.get("phases") else None,
        "phases": known.get("phases", []) if ranks else [],
        "seconds": max((process["seconds"] for process in ranks), default=None),
        "lease": {name: agents[0][name] for name in LEASE} if agents else None,
        "processes": host.processes,
    }


def state_of(host: Looked, has_ranks: bool, known: dict[str, Any]) -> str:
    """What a host is doing, by its processes first and by its keeper's words second."""
    if host.error:
        return "not reached"
    if has_ranks:
        told = str(known.get("state", ""))
        return told if told not in EARLIER else "running"
    busy = [process for process in host.processes if process["role"] != "keeper"]
    return "starting or ending" if busy else "nothing"


def describe(told: dict[str, Any]) -> str:
    """The same for people."""
    keeper = told["keeper"]
    lines = [f"run {told['run']} {told['name']}: {headline(told)}"]
    if told["folder"]:
        lines.append(f"folder {told['folder']} on {keeper['host']}")
    width = max([4, *(len(host["name"]) for host in told["hosts"])])
    lines.append(f"\n{'host':{width}}  state       step      since     lease       processes")
    for host in told["hosts"]:
        lines.append(f"{host['name']:{width}}  {one_host(host)}".rstrip())
    return "\n".join(lines) + "\n"


def headline(told: dict[str, Any]) -> str:
    """In which state the run is."""
    keeper = told["keeper"]
    if keeper["error"]:
        return f"its keeper's host does not answer: {keeper['error']}"
    if keeper["alive"]:
        seconds = told["seconds"]
        since = "" if seconds is None else f" for {clock(seconds)}"
        return f"runs{since}, kept by {keeper['host']}"
    if told["exit_code"] is None:
        return f"its keeper on {keeper['host']} is gone; the hosts end it by themselves"
    why = told["error"] or told["cause"]
    return f"ended with {told['exit_code']}: {one_line(why)}"


def one_host(host: dict[str, Any]) -> str:
    """A row of the table, behind the name."""
    if host["error"]:
        return f"not reached: {host['error']}"
    counts: dict[str, int] = {}
    for process in host["processes"]:
        counts[process["role"]] = counts.get(process["role"], 0) + 1
    names = ", ".join(role if n == 1 else f"{n} x {role}" for role, n in counts.items())
    lease = host["lease"]
    held = f"{lease['heard_seconds_ago']:.0f} of {lease['lease_seconds']:.0f} s" if lease else "-"
    since = "-" if host["seconds"] is None else clock(host["seconds"])
    step = "-" if host["step"] is None else f"{host['step']:,}"
    return f"{host['state']:10}  {step:8}  {since:8}  {held:10}  {names or 'none'}"


# -- the way there


@dataclass
class There:
    """A run, and the first host of it."""

    run: str
    network: Network
    hosts: Sequence[Host]
    host: Host
    runs: str
    place: Any = None
    talk: Any = None
    found: Answer = None  # type: ignore[assignment]
    error: str = ""
    """Why the first host does not answer."""
    places: Sequence[Place | LauncherError] = ()

    @property
    def labels(self) -> list[str]:
        """The names of the run's hosts."""
        return list((self.found or {}).get("card", {}).get("hosts", ()))


@contextmanager
def reached(
    options: RunOptions, need_keeper: bool = True, need_record: bool = True
) -> Iterator[There]:
    """Find the run, and talk with the host that keeps it; nobody keeps one that was attached."""
    run, memo = remembered(options.run)
    was_attached = len(run) == 2 * RUN_ID_BYTES  # --detach gives shorter ones
    if was_attached and need_record:
        raise UsageError(f"run {run} was attached and is over; type: ./run-ssh stop {run}")
    hosts = hosts_of(options, memo)
    from launcher.ssh import Access, Network  # Fabric takes as long to import as --help may

    config = options.ssh_config or memo.get("ssh_config", "")
    network = Network(
        Access(config=Path(config) if config else None, accept_new=options.accept_new)
    )
    with ExitStack() as stack:
        stack.callback(network.close)
        there = There(run, network, hosts, hosts[0], memo.get("runs", "runs"))
        if was_attached:
            there.found = {}
        else:
            find(there, bool(memo), need_keeper)
        if there.talk is not None:
            stack.callback(there.talk.close)
        yield there


def find(there: There, is_remembered: bool, need_keeper: bool) -> None:
    """Ask the first host, and where nothing was written down all others, for the run."""
    candidates = there.hosts[:1] if is_remembered else there.hosts
    errors: list[LauncherError] = []
    for host, place in zip(candidates, there.network.try_each(candidates), strict=True):
        if isinstance(place, LauncherError):
            errors.append(place)
            continue
        try:
            talk = Conversation(place, desk, host.python or "")
            found = talk.ask("find", run=there.run)
        except LauncherError as error:
            errors.append(error)
            continue
        if "card" in found:
            there.run, there.found = found["card"]["run"], found
            there.host, there.place, there.talk = host, place, talk
            return
        talk.close()
        if "error" in found:
            raise UsageError(found["error"])
    if errors and is_remembered and not need_keeper:
        there.found, there.error = {}, in_short(errors[0], there.host)
        return
    raise not_found(there, candidates, errors)


def not_found(
    there: There, asked: Sequence[Host], errors: Sequence[LauncherError]
) -> LauncherError:
    """What to say when no host knows the run."""
    names = ", ".join(host.label for host in asked)
    if not errors:
        return UsageError(f"no run {there.run} on {names}; --detach printed its id")
    refused = [error for error in errors if isinstance(error, AccessRefused)]
    kind = AccessRefused if refused else HostUnreachable
    lines = [f"run {there.run} was not found: not every host answers", *map(str, errors)]
    return kind("\n".join(lines))


def hosts_of(options: RunOptions, memo: dict[str, Any]) -> tuple[Host, ...]:
    """The hosts to ask."""
    if options.hosts or (not memo and HOSTS_FILE.exists()):
        return read_hosts(Path(options.hosts or HOSTS_FILE))
    if memo:
        return tuple(host_of(told) for told in memo["hosts"])
    hint = "type: --hosts FILE, with the host file that it was started with"
    raise UsageError(f"run {options.run} was not started from here; {hint}")


@contextmanager
def hearing_the_end() -> Iterator[None]:
    """TERM and HUP end what is shown as Ctrl-C does, with codes of their own."""

    def end(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


Verb = tuple[type[Any], Callable[[Any], int], str]

VERBS: dict[str, Verb] = {
    "attach": (
        AttachOptions,
        attach,
        "Show a detached run from its first line on; Ctrl-C detaches.",
    ),
    "status": (StatusOptions, status, "Show what of a detached run really runs on every host."),
    "logs": (LogsOptions, logs, "Print what the ranks of a detached run wrote."),
    "stop": (StopOptions, stop, "End a detached run as Ctrl-C would, and look at every host."),
}
