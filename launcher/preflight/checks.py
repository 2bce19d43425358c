"""The checks of every host before a run starts: one more check is one more row."""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.errors import UsageError, install_command
from rackrun.launcher.errors import DataRefused
from rackrun.launcher.preflight import gpus
from rackrun.launcher.preflight.examine import Check, Fault
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, first_responding, is_loopback
from rackrun.launcher.preflight.replies import (
    Basics,
    Code,
    Hold,
    Image,
    Listen,
    Route,
    Shards,
)
from rackrun.launcher.remote import probe
from rackrun.runs import SHORT_ID
from rackrun.shard_folder import why_no_splits
from rackrun.units import data_size, gibibytes

LEAST_DISK = 1 << 30
RANK_BYTES = 500_000_000
"""What a rank of a task takes at least: torch alone takes 372 MiB, and its loader has processes."""
CLOCK_SECONDS = 10.0
LOCK, DRAINED = "lock", "drained"
INSTALL_HERE = (
    "install it (in a project with a uv.lock: uv add), or name another interpreter with --python"
)
EXTRAS = frozenset(("timm", "wandb", "mlflow"))
"""Packages that an option needs, and that the extra of the same name installs."""

Faults = Iterator[Fault]
CheckFaults = Callable[[HostFacts, ClusterFacts], Faults]
Read = Callable[[HostFacts], str]


def check_allowed(names: Collection[str]) -> None:
    """Raise UsageError for what --ignore-check cannot name."""
    optional = [check.name for check in CHECKS if not check.needed]
    if unknown := set(names) - set(optional):
        name = min(unknown)
        is_check = any(check.name == name for check in CHECKS)
        reason = "no run can do without it" if is_check else "no such check"
        raise UsageError(f"--ignore-check {name}: {reason}; there are: {', '.join(optional)}")


def _differs(host: HostFacts, cluster: ClusterFacts, read: Read) -> str:
    """Return in what a host differs from the first one, if that has any."""
    first = first_responding(cluster)
    expected = read(first)
    return "" if expected in ("", read(host)) else f"differs from {first.host.label}: {expected}"


# -- the interpreter of the ranks, and what is installed for it


def _is_inspected(host: HostFacts, cluster: ClusterFacts) -> bool:
    """Return True if the interpreter was inspected here and on the first host."""
    of_both = (facts.basics.interpreter for facts in (host, first_responding(cluster)))
    return all(interpreter.version or interpreter.error for interpreter in of_both)


def _version(host: HostFacts) -> str:
    return host.basics.interpreter.version


def _torch(host: HostFacts) -> str:
    return host.basics.interpreter.torch


def _error(host: HostFacts) -> str:
    return host.basics.interpreter.error


def _python(host: HostFacts, cluster: ClusterFacts) -> Faults:
    hint = "name another with python= in hosts.txt, or make one with --sync"
    if cluster.requirements.synced:
        hint = "name another with python= in hosts.txt; --sync makes one where none is named"
    if _is_inspected(host, cluster) and (
        problem := _error(host)
        or _differs(host, cluster, lambda facts: _version(facts).rpartition(".")[0])
    ):
        yield Fault(problem, hint, hint_here="name another with --python")


def _same_torch(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if not _is_inspected(host, cluster) or _error(host):
        return
    project = "in a project with a uv.lock type: uv add torch"
    hint = f"install the same on all hosts, or let --sync do it; {project}"
    if cluster.requirements.synced:
        hint = (
            "--sync leaves an interpreter of python= as it is, and uses a torch that is there:"
            " install the same on all hosts, or leave out python= and type"
            f" {variables.OWN_TORCH}=1 before the command; {project}"
        )
    if not _torch(host):
        others = _missing_packages(host, cluster) if cluster.requirements.is_here else []
        missing = ", ".join(("torch", *others))
        yield Fault(f"{host.basics.python} has no {missing}", hint, hint_here=INSTALL_HERE)
    elif problem := _differs(host, cluster, _torch):
        yield Fault(problem, hint)
    elif problem := _differs(host, cluster, _cuda_of_torch):
        yield Fault(f"CUDA {problem}", hint)


def _torch_and_cuda(host: HostFacts) -> str:
    cuda = host.basics.interpreter.cuda
    return f"{_torch(host)}, CUDA {cuda}" if cuda else _torch(host)


def _cuda_of_torch(host: HostFacts) -> str:
    return _torch(host) and (host.basics.interpreter.cuda or "none")


def _packages(host: HostFacts, cluster: ClusterFacts) -> Faults:
    task, basics = cluster.requirements.task_needs, host.basics
    missing = _missing_packages(host, cluster)
    if missing and (_torch(host) or not cluster.requirements.is_here):
        yield Fault(
            f"{basics.python} has no {', '.join(missing)}",
            "install rackrun there with that interpreter's pip (an extra as rackrun[NAME]), or, in"
            " a project with a uv.lock, with uv add, or name another interpreter with python= in"
            " hosts.txt",
            hint_here=_install_here(basics.python, missing),
        )
    if missing := _missing(host, task.modules):
        yield Fault(
            f"no module {', '.join(missing)} in {basics.workdir} or installed",
            "type MODULE:NAME, as my_module:Net for Net in my_module.py of this folder",
        )


def _install_here(python: str, missing: Collection[str]) -> str:
    """Return what to type on this machine; the whole command if the interpreter is this one."""
    if Path(python).parent == Path(sys.executable).parent and EXTRAS.issuperset(missing):
        return f"type: {install_command(','.join(missing))}"
    return INSTALL_HERE


def _missing_packages(host: HostFacts, cluster: ClusterFacts) -> list[str]:
    task = cluster.requirements.task_needs
    is_first = host is first_responding(cluster)  # trackers run beside the first rank
    return _missing(host, (*task.packages, *(task.trackers if is_first else ())))


def _missing(host: HostFacts, needed: Sequence[str]) -> list[str]:
    return [name for name in host.basics.interpreter.missing if name in needed]


def _image(host: HostFacts) -> str:
    return host[Image].id


def _same_image(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if problem := host[Image].error or _differs(host, cluster, _image):
        yield Fault(problem)


# -- files and limits


def _found_there(about: str, hint: str, hint_here: str = "", warns: bool = False) -> CheckFaults:
    """Return a check for a problem that the host itself finds (`problems` in `remote.probe`)."""

    def faults(host: HostFacts, cluster: ClusterFacts) -> Faults:
        if problem := host.basics.problems.get(about):
            yield Fault(problem, hint, warns, hint_here=hint_here)

    return faults


def _code(host: HostFacts) -> str:
    return "" if Code not in host.replies else "differs" if host[Code].count else "as here"


def _same_code(host: HostFacts, cluster: ClusterFacts) -> Faults:
    code, hint = host[Code], "copy it from here with --sync"
    if cluster.requirements.synced:
        hint = "it has changed since --sync copied it; type the same command again"
    if code.error:
        yield Fault(code.error, hint)
    elif code.count:
        files = [f"{path} is missing" for path in code.missing] + list(code.different)
        more = f" and {code.count - 3} more" if code.count > 3 else ""
        yield Fault(f"{', '.join(files[:3])}{more}", hint)


def _workdir(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if problem := host.basics.problems.get("workdir"):
        hint = "name another with workdir= in hosts.txt"
        yield Fault(
            problem, hint if cluster.requirements.synced else f"{hint}, or make it with --sync"
        )


def _disk(host: HostFacts, cluster: ClusterFacts) -> Faults:
    basics, held = host.basics, host[Hold].error
    if basics.disk_free < LEAST_DISK:
        yield Fault("almost full", "make room")
    unlocked = f"{basics.lock} cannot be locked: {held}" if held else ""
    if problem := basics.problems.get("tmp") or basics.lock_problem or unlocked:
        yield Fault(
            problem,
            "an agent keeps its files and its lock in /tmp: make room there, or let every account"
            " write to it (chmod 1777 /tmp)",
        )


def _memory(host: HostFacts, cluster: ClusterFacts) -> Faults:
    """Object to more ranks of a task than fit: the kernel would kill them, and other programs."""
    basics = host.basics
    ranks = host.host.processes(basics.gpus)
    least, memory = ranks * RANK_BYTES, basics.memory
    if not cluster.requirements.own_command and ranks > 1 and 0 < memory < least:
        needed = f"{ranks} ranks need {data_size(least)}, at least {data_size(RANK_BYTES)} each"
        yield Fault(
            f"{needed}, and there are {data_size(memory)}",
            "write slots=N after the host's name",
            hint_here=f"type --nproc {basics.cores}, a rank per core",
        )


def _clock(host: HostFacts) -> str:
    ahead = host.clock_ahead
    return "in step" if abs(ahead) <= max(2.0, host.clock_error) else f"{ahead:+.1f} s"


def _clock_off(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if abs(host.clock_ahead) - host.clock_error > CLOCK_SECONDS:
        problem = f"the clock is {host.clock_ahead:+.0f} s off this machine's"
        yield Fault(problem, "start a time service there", warns=True)


_weights = _found_there(
    "weights",
    "--weights names a file of each host; copy it there, or name a URL",
    "name another with --weights, or a URL",
)
_cache = _found_there(
    "cache",
    "name another folder with --cache; each host makes its own",
    "name another folder with --cache",
)
_open_files = _found_there(
    "open files", "at least 1,024: see ulimit -Hn and /etc/security/limits.conf"
)
_shared_memory = _found_there(
    "shared memory",
    "loader workers and NCCL need more: mount -o remount,size=16g /dev/shm, or start the container"
    " that sshd runs in with --shm-size 16g",
    warns=True,
)
_locked_memory = _found_there(
    "locked memory",
    "NCCL must be able to lock memory for InfiniBand: see ulimit -l and /etc/security/limits.conf"
    " (memlock unlimited)",
    warns=True,
)


# -- the network between the hosts


def _network(host: HostFacts) -> str:
    route = host[Route]
    return " ".join(filter(None, (route.interface, host.host.address or route.address)))


def _no_route(host: HostFacts, cluster: ClusterFacts) -> Faults:
    problem = host.basics.problems.get("interface", "")
    if not problem and (error := host[Route].error):
        problem = f"no route to {cluster.master}: {error}"
    if problem:
        yield Fault(problem, "name one with address= or interface= in hosts.txt")


def _reached(host: HostFacts) -> str:
    route = host[Route]
    return "" if not route.address or route.unreached or host[Listen].error else "reached"


def _master(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if error := host[Listen].error:
        hint = "name another port with --port, or leave it out; else see address= of the first host"
        yield Fault(f"cannot listen there: {error}", hint)
    elif error := host[Route].unreached:
        problem = f"{cluster.master} port {cluster.port} cannot be reached: {error}"
        yield Fault(problem, "see the firewall, or address= of the first host")


def _public(host: HostFacts, cluster: ClusterFacts) -> Faults:
    """Object once, to the first host that would connect to a public address."""
    for facts in cluster.hosts:
        # A name is taken as the host itself resolves it.
        address = facts[Route].master or cluster.master
        try:
            is_public = ipaddress.ip_address(address.partition("%")[0]).is_global
        except ValueError:
            is_public = False  # a name, or nothing: the host has no route there
        if is_public:
            if facts is host:
                problem = f"ranks would meet at the public address {address}"
                yield Fault(problem, "name a private one with address= in hosts.txt")
            return


# -- data, and who else is there


def _shards(host: HostFacts, cluster: ClusterFacts) -> Faults:
    shards = host[Shards]
    if shards.is_older:
        yield Fault(
            f"the rackrun of {host.basics.python} is another version, which cannot check the data",
            "install the same version on all hosts",
        )
    elif error := shards.error:
        if _missing_packages(host, cluster) or host[Image].error:
            return  # nothing there reads shards: the line about the packages or the image says why
        yield Fault(
            error,
            "name others with --data; where this machine serves them, see --serve-address",
            hint_here="name others with --data",
        )
    elif shards.dataset:
        splits = cluster.requirements.task_needs.splits
        if problem := why_no_splits(shards.dataset, splits, shards.splits):
            hold_out = f"to hold one out, type: {called('convert')} --help"
            yield Fault(problem, f"name another with --eval-split; {hold_out}")


def _lock(host: HostFacts, cluster: ClusterFacts) -> Faults:
    # Another launch may have locked the first host after our first look.
    lock: Hold | Basics = host[Hold] if host[Hold].holder else host.basics
    if not lock.holder:
        return
    problem = f"in use by another run: {lock.holder}"
    if isinstance(lock, Basics) and lock.queued:
        problem = f"others wait for it: {lock.holder}"
    elif run := lock.run[:SHORT_ID]:
        problem += f"; it ends with Ctrl-C in its terminal, or {called('stop')} {run} if detached"
    hint = "--include takes hosts and GPUs that are free"
    if not cluster.requirements.waits:
        hint = f"type --wait to start when it is free; {hint}"
    yield Fault(problem, hint, busy=True)


def _drained(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if reason := host.basics.drained:
        hint = f"leave it out with --exclude; root there removes {probe.DRAINED} to use it again"
        yield Fault(reason, hint)


def _machine(host: HostFacts, cluster: ClusterFacts) -> Faults:
    if is_loopback(host.basics.address):
        return  # several sshd on loopback addresses: a test cluster
    answered = [facts for facts in cluster.hosts if facts.error is None]
    for other in answered[: answered.index(host)]:
        if other.basics.machine == host.basics.machine:
            problem = f"is the same machine as {other.host.label}"
            yield Fault(problem, "for more processes write slots=N")
            return


CHECKS = (
    Check("python", _python, _version, of_interpreter=True),
    Check("torch", _same_torch, _torch_and_cuda, of_interpreter=True),
    Check("packages", _packages),
    Check("image", _same_image, _image),
    Check("files", _weights),
    Check("files", _cache),
    Check("gpus", gpus.number_and_kind, gpus.models),
    Check("driver", gpus.unusable, gpus.driver),
    Check("gpu health", gpus.sick, gpus.temperature),
    Check("code", _same_code, _code, of_others=True),
    Check("workdir", _workdir, lambda host: host.basics.workdir),
    Check("disk", _disk, lambda host: f"{gibibytes(host.basics.disk_free)} free"),
    Check("limits", _open_files),
    Check("limits", _shared_memory),
    Check("limits", _locked_memory),
    Check("memory", _memory),
    Check("clock", _clock_off, _clock, of_others=True),
    Check("network", _no_route, _network, needed=True),
    Check("master", _master, _reached, needed=True),
    Check("public", _public, of_others=True),
    Check("shards", _shards, lambda host: host[Shards].dataset, error=DataRefused),
    Check(LOCK, _lock, lambda host: "free", of_others=True),
    Check(DRAINED, _drained, of_others=True),
    Check("machine", _machine, of_others=True),
)
"""The checks, in the order of the table."""

ENVIRONMENT = tuple(check.name for check in CHECKS if check.of_interpreter)
OF_MACHINE = tuple(dict.fromkeys(c.name for c in CHECKS if not (c.of_others or c.needed)))
"""The names of those that a machine passes by itself."""
