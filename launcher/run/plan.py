"""From a job and the facts about its hosts to what is started on each: pure, and no quoting.

What `--dry-run` prints is what runs: the agent of a host gets the `HostPlan` of that host and
nothing else. Command lines and environments are lists of strings all the way to `execve`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.launcher.run.job import START_SECONDS, TRAINING, Job, is_on_cpu, value_in
from rackrun.terminal import clean_lines
from rackrun.units import plural

Environment = tuple[tuple[str, str], ...]

OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "from torch.distributed.run import main; main()"


@dataclass(frozen=True)
class PlannedHost:
    """Facts about a host that the plan needs; `local` or the preflight finds them."""

    name: str
    """As the user wrote it."""
    address: str
    """The address at which the other hosts reach it."""
    processes: int
    """Ranks to start: one per GPU, or `slots` of hosts.txt."""
    python: str
    """The interpreter that has torch, an absolute path."""
    workdir: str
    """Where the ranks start, an absolute path: the code on that host."""
    folder: str
    """The run folder on that host, an absolute path; the agent makes it if it is not there."""
    cores: int = 1
    """CPU cores that the ranks share."""
    interface: str = ""
    """The network device towards the master; empty: the libraries choose."""
    env: Environment = ()
    """Set on this host only."""
    setup: tuple[str, ...] = ()
    """What goes before the command line of torchrun: a shell that sets its environment."""
    agent_python: str = "python3"
    """What starts the agent there: any Python from 3.8 on."""
    container: tuple[str, ...] = ()
    """What goes before the agent's own command line, so that it runs in a container."""
    locks: tuple[tuple[str, bool], ...] = ()
    """Files that the agent locks, so that no other run uses the host; True: others may share it."""
    gpus: bool = False
    """The ranks were counted by the GPUs here, and are to use them."""
    gpu_model: str = ""
    """The model of the GPUs that its ranks use; empty: none, or not known."""
    signalled_together: bool = False
    """The scheduler sends signals to every process of this host, not to the launcher alone.

    So agent, torchrun and shims leave signals to the launcher, which gets them too; ranks ignore
    all but SIGTERM, which the launcher sends them.
    """


@dataclass(frozen=True, kw_only=True)
class HostPlan(PlannedHost):
    """All that happens on one host: what is known of it, and what starts there."""

    node: int
    first_rank: int
    torchrun: tuple[str, ...]
    command: tuple[str, ...]
    """What the shim that torchrun starts runs in its turn, once per rank."""
    environment: Environment
    """Set for torchrun and the ranks, whatever the host had."""
    defaults: Environment
    """Set where the host has nothing of that name."""
    scratch: str
    """The agent's private folder on the host: sockets, pipes, the shim."""
    share: bool = False
    """Other accounts may read the run folder."""


@dataclass(frozen=True)
class Plan:
    """A run, host by host, in node rank order."""

    run_id: str
    world_size: int
    hosts: tuple[HostPlan, ...]
    """All of them; or, for a launcher of one node, those that it looks after."""

    @property
    def task(self) -> str:
        """The task that the ranks train; empty for a command of the user."""
        return next(iter(self._task_words), "")

    @property
    def has_first_rank(self) -> bool:
        """Whether the rank that reports for all is on one of these hosts."""
        return self.hosts[0].first_rank == 0

    @property
    def uses_gpus(self) -> bool:
        """Whether ranks are to use GPUs."""
        return any(host.gpus for host in self.hosts)

    @property
    def own_model(self) -> str:
        """The model of the user's own, MODULE:NAME, that the task trains; else nothing."""
        named = value_in(self._task_words, "--model")
        return named if ":" in named and not named.startswith("timm:") else ""

    @property
    def _task_words(self) -> tuple[str, ...]:
        command = self.hosts[0].command if self.hosts else ()
        program, args = command[1 : 1 + len(TRAINING)], command[1 + len(TRAINING) :]
        return args if program == TRAINING else ()

    def host(self, node: int) -> HostPlan:
        """Return the host with this node rank."""
        return self.hosts[node - self.hosts[0].node]

    def part(self, node: int) -> Plan:
        """Return the part of the plan that the launcher of one node needs."""
        return replace(self, hosts=(self.host(node),))


def make_plan(job: Job, hosts: Sequence[PlannedHost], port: int) -> Plan:
    """Lay the ranks out over the hosts in their order; `port` is free on the first of them."""
    _check_environment(job.options.environment)
    world_size = sum(host.processes for host in hosts)
    plans: list[HostPlan] = []
    first_rank = 0
    for node, host in enumerate(hosts):
        plans.append(_host_plan(job, hosts, node, first_rank, port, world_size))
        first_rank += host.processes
    return Plan(job.run_id, world_size, tuple(plans))


def _host_plan(
    job: Job,
    hosts: Sequence[PlannedHost],
    node: int,
    first_rank: int,
    port: int,
    world_size: int,
) -> HostPlan:
    host = hosts[node]
    _check_environment(host.env)
    scratch = scratch_folder(job.run_id, node)
    uses_gpus = host.gpus and not is_on_cpu(job.work)
    return HostPlan(
        **vars(host if uses_gpus else replace(host, gpu_model="")),
        node=node,
        first_rank=first_rank,
        torchrun=torchrun(job, hosts, node, port, scratch),
        command=job.work.argv(host.python),
        environment=environment(job, host, world_size, scratch),
        defaults=defaults(host),
        scratch=scratch,
        share=job.options.share,
    )


def scratch_folder(run_id: str, node: int) -> str:
    """Return the private folder of an agent: short, as the path of a socket has 107 bytes."""
    return f"/tmp/rackrun-{run_id}-{node}"


def torchrun(
    job: Job, hosts: Sequence[PlannedHost], node: int, port: int, scratch: str
) -> tuple[str, ...]:
    """Return the command line of torchrun on a host."""
    host, limits = hosts[node], job.options.limits
    shim = f"{scratch}/agent.zip"
    # Longer than the launcher takes to name a host that is missing.
    timeout_seconds = START_SECONDS + 2 * limits.rendezvous_seconds
    return (
        *host.setup,
        *(host.python, "-c", TORCHRUN),
        f"--nnodes={len(hosts)}",
        f"--node-rank={node}",
        f"--nproc-per-node={host.processes}",
        f"--master-addr={hosts[0].address}",
        f"--master-port={port}",
        f"--rdzv-id={job.run_id}",
        "--rdzv-backend=static",  # c10d compares hosts' clocks, and can start a world of one
        f"--rdzv-conf=timeout={timeout_seconds:.0f}",
        "--max-restarts=0",
        f"--log-dir={scratch}",
        "--no-python",
        # The shim starts the ranks' command, in which torchrun would replace `$$` and the like.
        *(host.python, "-I", "-S", "-X", "utf8", shim),
    )


def environment(job: Job, host: PlannedHost, world_size: int, scratch: str) -> Environment:
    """Return the environment of ranks; the host's overrides the user's, the launcher's both."""
    ours: Environment = (
        (variables.RUN_ID, job.run_id),
        (variables.WORLD_SIZE, str(world_size)),
        (variables.RUN_FOLDER, host.folder),
        (variables.RUN_NAME, job.name),
        (variables.REPORTS, f"{scratch}/reports"),
    )
    ours += ((variables.GPUS, "1"),) if host.gpus else ()
    ours += ((variables.COMMIT, job.commit),) if job.commit else ()
    return tuple(dict((*job.options.environment, *host.env, *ours)).items())


def defaults(host: PlannedHost) -> Environment:
    """Return variables for ranks that the host may override.

    torchrun would give each of several ranks a single thread, whatever the number of cores. A
    traceback at a fatal signal names the line of a crash, and of a hang that is ended by SIGABRT.
    """
    threads = max(1, host.cores // host.processes)
    network = (
        (("GLOO_SOCKET_IFNAME", host.interface), ("NCCL_SOCKET_IFNAME", f"={host.interface}"))
        if host.interface
        else ()
    )
    return (
        ("OMP_NUM_THREADS", str(threads)),
        ("PYTHONUNBUFFERED", "1"),
        ("PYTHONFAULTHANDLER", "1"),
        *network,
    )


def _check_environment(pairs: Environment) -> None:
    for name, value in pairs:
        # The kernel cannot carry these.
        if not name or "=" in name or "\0" in name + value:
            raise UsageError(f"not a variable that can be set: {name!r}; type: NAME=VALUE")
        if name in OF_TORCHRUN:
            hint = "for the port type: --port" if name == "MASTER_PORT" else "leave it out"
            raise UsageError(f"{name}={value}: torchrun sets {name} for each rank; {hint}")


def shown(plan: Plan, as_json: bool) -> str:
    """Return the plan as --dry-run prints it, for people or for programs."""
    return f"{json.dumps(asdict(plan), indent=2) if as_json else describe(plan)}\n"


def describe(plan: Plan) -> str:
    """Return the plan for people: what is started where, as a shell would take it."""
    lines = [f"run {plan.run_id}, {plural(plan.world_size, 'rank')}"]
    for host in plan.hosts:
        last = host.first_rank + host.processes - 1
        ranks = f"rank {last}" if host.processes == 1 else f"ranks {host.first_rank}-{last}"
        lines += [
            f"\nhost {host.node}: {host.name} ({host.address}), {ranks}",
            f"  in {host.workdir}, run folder {host.folder}",
            *((f"  container: {shlex.join(host.container)}",) if host.container else ()),
            f"  torchrun: {shlex.join(host.torchrun)}",
            f"  each rank: {shlex.join(host.command)}",
            *(f"  set: {shlex.quote(f'{name}={value}')}" for name, value in host.environment),
            *(f"  unless set: {shlex.quote(f'{name}={value}')}" for name, value in host.defaults),
        ]
    return clean_lines("\n".join(lines))  # hosts have named folders and interpreters
