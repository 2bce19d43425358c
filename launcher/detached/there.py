"""The way to a detached run: the hosts that may know it, and the one that keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launcher.conversation import Answer, Conversation
from launcher.detached import desk
from launcher.errors import AccessRefused, HostUnreachable, LauncherError, UsageError
from launcher.hosts import Host, read_hosts
from launcher.job import RUN_ID_BYTES
from launcher.memory import host_of, remembered
from launcher.options import Positional
from launcher.place import Place
from rackrun.terminal import one_line

if TYPE_CHECKING:
    from launcher.ssh import Network

HOSTS_FILE = Path("hosts.txt")


@dataclass(frozen=True)
class RunOptions:
    """What leads to a run."""

    run: Positional[str]
    """Id of the run, as --detach printed it; its first characters are enough. With stop also
    that of a run that ended here, and left hosts that nobody could verify."""
    hosts: str = ""
    """The host file of the run, on a machine where it was not started."""
    ssh_config: str = ""
    """An ssh_config file to use in place of your own and the system's."""
    accept_new: bool = False
    """Record the keys of hosts that are not in known_hosts; changed keys are refused still."""


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
def talk_to(place: Place, python: str | None) -> Iterator[Conversation]:
    """A conversation with the desk of a host, closed afterwards."""
    talk = Conversation(place, desk, python or "")
    try:
        yield talk
    finally:
        talk.close()


def in_short(error: LauncherError, host: Host) -> str:
    """The first line of an error of a host, which is named already."""
    return one_line(str(error).partition("\n")[0].removeprefix(f"{host.label}: "))
