"""Checks of every host before a run starts: written as data, evaluated, and shown.

A check reads one fact of a host, and returns what is wrong with it, looking at the other
hosts where it must: one more check is one more entry. A host that fails one is not started on,
unless the check only warns, or `--ignore-check` names it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.errors import Problem, UsageError
from rackrun.launcher.errors import AccessRefused, DataRefused, HostUnreachable, PreflightRefused
from rackrun.launcher.preflight import gpus
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, first_responding
from rackrun.launcher.remote import probe
from rackrun.launcher.run.host_names import grouped
from rackrun.runs import SHORT_ID
from rackrun.shard_folder import why_no_splits
from rackrun.terminal import clean_lines, one_line
from rackrun.units import gibibytes

Level = Literal["ok", "warning", "refused"]

LEAST_DISK = 1 << 30
LEAST_OPEN_FILES = 1024
CLOCK_SECONDS = 10.0
SHARDS, SPLITS, LOCK, DRAINED = "shards", "splits", "lock", "drained"
BUSY = "in use by another run"
QUEUED = "others wait for it"
ENVIRONMENT = ("python", "torch", "cuda")
"""Checks of the interpreter of the ranks, and of what is installed for it."""

_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Check:
    """One thing to check."""

    name: str
    show: Callable[[HostFacts], str]
    """What was found, for the table; empty when it was not looked at."""
    wrong: Callable[[HostFacts, ClusterFacts], str] = lambda host, cluster: ""
    """Why the host is not fit; empty when it is."""
    hint: str = ""
    """What to type, or where to look."""
    hint_after_sync: str = ""
    """The same where --sync has been typed; empty: no other."""
    warns: bool = False
    """It never keeps a run from starting."""
    needed: bool = False
    """The plan depends on its reply, so --ignore-check cannot name it."""


@dataclass(frozen=True)
class TableRow:
    """Result of one check on one host."""

    check: str
    host: str
    level: Level
    found: str
    problem: str = ""
    hint: str = ""

    @property
    def is_busy(self) -> bool:
        """Return True for a host that another run uses, or waits for."""
        is_refused = self.check == LOCK and self.level == "refused"
        return is_refused and self.problem.startswith((BUSY, QUEUED))


def examine(
    cluster: ClusterFacts,
    checks: Sequence[Check],
    allowed: Collection[str] = (),
    pending: Mapping[str, str] = _NOTHING,
) -> tuple[TableRow, ...]:
    """Run every check on every host; leave out the checks of a host without a reply.

    What `pending` checks find wrong will be right once the launch has done what is given there.
    """
    rows = []
    for facts in cluster.hosts:
        if facts.error is not None:
            text = clean_lines(str(facts.error).removeprefix(f"{facts.host.label}: "))
            rows.append(TableRow("reachable", facts.host.label, "refused", "", text))
            continue
        rows.append(TableRow("reachable", facts.host.label, "ok", "yes"))
        rows_of_host = (_row(check, facts, cluster, allowed, pending) for check in checks)
        rows += [row for row in rows_of_host if row is not None]
    return tuple(rows)


def refusal(cluster: ClusterFacts, rows: Sequence[TableRow]) -> Problem | None:
    """Return the error that keeps the run from starting, a line per host and check, or None."""
    refused = [row for row in rows if row.level == "refused"]
    if not refused:
        return None
    text = "\n".join(lines_of(refused))
    hosts = {row.host for row in refused}
    errors = [facts.error for facts in cluster.hosts if facts.error is not None]
    if any(isinstance(error, AccessRefused) for error in errors):
        return AccessRefused(text, hosts)
    if errors:
        return HostUnreachable(text, hosts)
    only_data = all(row.check in (SHARDS, SPLITS) for row in refused)
    return DataRefused(text, hosts) if only_data else PreflightRefused(text, hosts)


def are_only_busy(rows: Sequence[TableRow]) -> bool:
    """Return True if the only reason against a start is that other runs use the hosts."""
    return all(row.is_busy for row in rows if row.level == "refused")


def check_allowed(names: Collection[str]) -> None:
    """Raise UsageError for what --ignore-check cannot name."""
    optional = [check.name for check in CHECKS if not check.needed]
    if unknown := set(names) - set(optional):
        name = min(unknown)
        is_check = any(check.name == name for check in CHECKS)
        reason = "no run can do without it" if is_check else "no such check"
        raise UsageError(f"--ignore-check {name}: {reason}; there are: {', '.join(optional)}")


def warnings(rows: Sequence[TableRow]) -> list[str]:
    """Return warnings, one line each."""
    return lines_of([row for row in rows if row.level == "warning"])


def _row(
    check: Check,
    facts: HostFacts,
    cluster: ClusterFacts,
    allowed: Collection[str],
    pending: Mapping[str, str],
) -> TableRow | None:
    value, problem = one_line(check.show(facts)), one_line(check.wrong(facts, cluster))
    if not value and not problem:
        return None
    is_own = check.name in ENVIRONMENT and facts.host.python
    if problem and check.name in pending and not is_own:
        return TableRow(check.name, facts.host.label, "ok", pending[check.name])
    mild = check.warns or check.name in allowed
    level: Level = "ok" if not problem else "warning" if mild else "refused"
    hint = (cluster.requirements.synced and check.hint_after_sync) or check.hint
    return TableRow(check.name, facts.host.label, level, value, problem, hint if problem else "")


def lines_of(rows: Sequence[TableRow]) -> list[str]:
    """Return a line per check and problem, with its hosts together, and its hint once."""
    hosts: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        hosts.setdefault((row.check, row.problem), []).append(row.host)
    hint_of = {row.check: row.hint for row in rows}
    lines = []
    for (check, problem), names in hosts.items():
        hint = hint_of.pop(check, "")
        lines.append(f"{grouped(names)}: {check}: {problem}{f'; {hint}' if hint else ''}")
    return lines


# -- the checks


def _field(question: str, name: str) -> Callable[..., str]:
    """Return a function that reads a field of a reply, to be shown, or as the problem itself."""
    return lambda host, cluster=None: str(host[question].get(name, ""))


def _interpreter(name: str) -> Callable[[HostFacts], str]:
    return lambda host: str(host["look"]["interpreter"].get(name, ""))


def _same(read: Callable[[HostFacts], str]) -> Callable[[HostFacts, ClusterFacts], str]:
    """Return a judge that objects where a host differs from the first one, if that has any."""

    def wrong(host: HostFacts, cluster: ClusterFacts) -> str:
        first = first_responding(cluster)
        expected = read(first)
        if expected in ("", read(host)):
            return ""
        return f"differs from {first.host.label}: {expected}"

    return wrong


_version, _torch, _cuda = map(_interpreter, ("version", "torch", "cuda"))
_image = _field("image", "id")


def _cuda_of_torch(host: HostFacts) -> str:
    return _torch(host) and (_cuda(host) or "none")


def _not_shown(host: HostFacts) -> str:
    return ""


def _is_inspected(host: HostFacts, cluster: ClusterFacts) -> bool:
    """Return True if the interpreter was inspected here and on the first host."""
    return all(facts["look"]["interpreter"] for facts in (host, first_responding(cluster)))


def _no_interpreter(host: HostFacts, cluster: ClusterFacts) -> str:
    if not _is_inspected(host, cluster):
        return ""
    error = str(host["look"]["interpreter"].get("error", ""))
    return error or _same(lambda facts: _version(facts).rpartition(".")[0])(host, cluster)


def _no_torch(host: HostFacts, cluster: ClusterFacts) -> str:
    if not _is_inspected(host, cluster):
        return ""
    if not _torch(host):
        python = host["look"]["python"]
        return "" if "error" in host["look"]["interpreter"] else f"{python} has no torch"
    return _same(_torch)(host, cluster)


def _code(host: HostFacts) -> str:
    return "" if not host["code"] else "differs" if host["code"].get("count") else "as here"


def _code_differs(host: HostFacts, cluster: ClusterFacts) -> str:
    code = host["code"]
    if not code.get("count"):
        return str(code.get("error", ""))
    files = [f"{path} is missing" for path in code["missing"]] + list(code["different"])
    more = f" and {code['count'] - 3} more" if code["count"] > 3 else ""
    return f"{', '.join(files[:3])}{more}"


def _clock(host: HostFacts) -> str:
    offset, uncertainty = host["clock"]["offset"], host["clock"]["uncertainty"]
    return "in step" if abs(offset) <= max(2.0, uncertainty) else f"{offset:+.1f} s"


def _clock_off(host: HostFacts, cluster: ClusterFacts) -> str:
    offset, uncertainty = host["clock"]["offset"], host["clock"]["uncertainty"]
    is_off = abs(offset) - uncertainty > CLOCK_SECONDS
    return f"the clock is {offset:+.0f} s off this machine's" if is_off else ""


def _network(host: HostFacts) -> str:
    address = host.host.address or str(host["route"].get("address", ""))
    return " ".join(filter(None, (host["route"].get("interface", ""), address)))


def _no_route(host: HostFacts, cluster: ClusterFacts) -> str:
    if "error" in host["address"]:
        return str(host["address"]["error"])
    return f"no route to {cluster.master}: {error}" if (error := host["route"].get("error")) else ""


def _master_problem(host: HostFacts, cluster: ClusterFacts) -> str:
    if host["listen"].get("error"):
        return f"cannot listen there: {host['listen']['error']}"
    if host["reach"].get("error"):
        return f"{cluster.master} port {cluster.port} cannot be reached: {host['reach']['error']}"
    return ""


def _public(host: HostFacts, cluster: ClusterFacts) -> str:
    """Return the objection once, for the first host that would connect to a public address."""
    for facts in cluster.hosts:
        # A name is taken as the host itself resolves it.
        address = str(facts["route"].get("master") or cluster.master)
        try:
            is_public = ipaddress.ip_address(address.partition("%")[0]).is_global
        except ValueError:
            is_public = False  # a name, or nothing: the host has no route there
        if is_public:
            return f"ranks would meet at the public address {address}" if facts is host else ""
    return ""


def _absent_splits(host: HostFacts, cluster: ClusterFacts) -> str:
    shards = host["shards"]
    if "splits" not in shards:
        return ""
    return why_no_splits(shards["dataset"], cluster.requirements.task.splits, shards["splits"])


def _packages(host: HostFacts, cluster: ClusterFacts) -> str:
    task = cluster.requirements.task
    is_first = host is first_responding(cluster)  # trackers run beside the first rank
    missing = _missing(host, (*task.packages, *(task.trackers if is_first else ())))
    return f"{host['look']['python']} has no {', '.join(missing)}" if missing else ""


def _modules(host: HostFacts, cluster: ClusterFacts) -> str:
    if missing := _missing(host, cluster.requirements.task.modules):
        return f"no module {', '.join(missing)} in {host['look']['workdir']} or installed"
    return ""


def _missing(host: HostFacts, needed: Sequence[str]) -> list[str]:
    return [name for name in host["look"]["interpreter"].get("missing", ()) if name in needed]


def _machine_again(host: HostFacts, cluster: ClusterFacts) -> str:
    address = host["look"]["address"].partition("%")[0]
    if address and ipaddress.ip_address(address).is_loopback:
        return ""  # several sshd on loopback addresses: hosts to try things on
    answered = [facts for facts in cluster.hosts if facts.error is None]
    for other in answered[: answered.index(host)]:
        if other["look"]["machine"] == host["look"]["machine"]:
            return f"is the same machine as {other.host.label}"
    return ""


def _no_tmp(host: HostFacts, cluster: ClusterFacts) -> str:
    error = host["hold"].get("error")
    unlocked = f"{host['look']['lock']} cannot be locked: {error}" if error else ""
    return str(host["look"]["tmp_problem"] or host["look"]["lock_problem"] or unlocked)


def _held(host: HostFacts, cluster: ClusterFacts) -> str:
    # Another launch may have locked the first host after our first look.
    lock = host["hold"] if host["hold"].get("holder") else host["look"]
    if not lock.get("holder"):
        return ""
    if lock.get("queued"):
        return f"{QUEUED}: {lock['holder']}"
    run = lock.get("run", "")[:SHORT_ID]
    ends = f"; it ends with Ctrl-C in its terminal, or {called('stop')} {run} if detached"
    return f"{BUSY}: {lock['holder']}{ends if run else ''}"


CHECKS = (
    Check(
        "python",
        _version,
        _no_interpreter,
        "name another with python= in hosts.txt, or make one with --sync",
        "name another with python= in hosts.txt; --sync makes one where none is named",
    ),
    Check(
        "torch",
        _torch,
        _no_torch,
        "install the same on all hosts, or let --sync do it; in a project with a uv.lock type: "
        "uv add torch",
        "--sync leaves an interpreter of python= as it is, and uses a torch that is there: install "
        f"the same on all hosts, or leave out python= and type {variables.OWN_TORCH}=1 before the "
        "command; in a project with a uv.lock type: uv add torch",
    ),
    Check(
        "cuda",
        _cuda,
        lambda host, cluster: _same(_cuda_of_torch)(host, cluster) if _torch(host) else "",
        "install the same torch on all hosts",
    ),
    Check(
        "packages",
        _not_shown,
        _packages,
        "install rackrun there with that interpreter's pip (an extra as rackrun[NAME]), or, in a "
        "project with a uv.lock, with uv add, or name "
        "another interpreter with python= in hosts.txt",
    ),
    Check(
        "modules",
        _not_shown,
        _modules,
        "type MODULE:NAME, as my_module:Net for Net in my_module.py of this folder",
    ),
    Check(
        "weights",
        _not_shown,
        _field("look", "weights_problem"),
        "--weights names a file of each host; copy it there, or name a URL",
    ),
    Check(
        "cache",
        _not_shown,
        _field("look", "cache_problem"),
        "name another folder with --cache; each host makes its own",
    ),
    Check(
        "image",
        _image,
        lambda host, cluster: str(host["image"].get("error", "")) or _same(_image)(host, cluster),
    ),
    Check("gpus", gpus.models, gpus.wrong_count),
    Check("driver", gpus.driver, gpus.unusable, gpus.ON_CPU),
    Check("gpu health", gpus.temperature, gpus.sick, gpus.SICK_HINT),
    Check(
        "gpu clocks",
        _not_shown,
        gpus.throttled,
        "see nvidia-smi -q -d PERFORMANCE",
        warns=True,
    ),
    Check("gpu kind", _not_shown, gpus.odd_one_out, "ranks wait for the slowest", warns=True),
    Check("gpu use", gpus.memory, gpus.busy, "look with nvidia-smi", warns=True),
    Check(
        "code",
        _code,
        _code_differs,
        "copy it from here with --sync",
        "it has changed since --sync copied it; type the same command again",
    ),
    Check(
        "workdir",
        _field("look", "workdir"),
        _field("look", "workdir_problem"),
        "name another with workdir= in hosts.txt, or make it with --sync",
        "name another with workdir= in hosts.txt",
    ),
    Check(
        "disk",
        lambda host: f"{gibibytes(host['look']['disk_free'])} free",
        lambda host, cluster: "almost full" if host["look"]["disk_free"] < LEAST_DISK else "",
        "make room",
    ),
    Check(
        "tmp",
        _not_shown,
        _no_tmp,
        "an agent keeps its files and its lock in /tmp: make room there, or let every account "
        "write to it (chmod 1777 /tmp)",
    ),
    Check(
        "open files",
        _field("look", "open_files"),
        lambda host, cluster: (
            "too few" if 0 <= host["look"]["open_files"] < LEAST_OPEN_FILES else ""
        ),
        f"at least {LEAST_OPEN_FILES}: see ulimit -n and /etc/security/limits.conf",
    ),
    Check(
        "shared memory",
        _not_shown,
        _field("look", "shared_memory_problem"),
        "loader workers and NCCL need more: mount -o remount,size=16g /dev/shm, or start the "
        "container that sshd runs in with --shm-size 16g",
        warns=True,
    ),
    Check(
        "locked memory",
        _not_shown,
        _field("look", "locked_memory_problem"),
        "NCCL needs all it asks for on InfiniBand: see ulimit -l and /etc/security/limits.conf "
        "(memlock unlimited)",
        warns=True,
    ),
    Check("clock", _clock, _clock_off, "start a time service there", warns=True),
    Check(
        "network",
        _network,
        _no_route,
        "name one with address= or interface= in hosts.txt",
        needed=True,
    ),
    Check(
        "master",
        lambda host: "reached" if "error" not in host.replies.get("reach", {"error": ""}) else "",
        _master_problem,
        "see the firewall, or address= of the first host",
        needed=True,
    ),
    Check("public", _not_shown, _public, "name a private one with address= in hosts.txt"),
    Check(
        SHARDS,
        _field("shards", "dataset"),
        _field("shards", "error"),
        f"name others with --data; to make some, type: {called('convert')} --help; those of this "
        "machine: see --serve-address, the firewall",
    ),
    Check(
        SPLITS,
        _not_shown,
        _absent_splits,
        f"name another with --eval-split; to hold one out, type: {called('convert')} --help",
    ),
    Check(
        LOCK,
        lambda host: "free",
        _held,
        "type --wait to start when it is free; --include takes hosts and GPUs that are free",
    ),
    Check(
        DRAINED,
        _not_shown,
        _field("look", "drained"),
        f"leave it out with --exclude; root there removes {probe.DRAINED} to use it again",
    ),
    Check("machine", _not_shown, _machine_again, "for more processes write slots=N"),
)
"""In the order of the table."""
