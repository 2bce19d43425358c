"""Faults of runs that are detached, started once per node, served, or under Slurm."""

from tests.contract.faults.rows_attached import LOST, RETRY, SOON, STOP, goes_on, sends
from tests.lab.fault import Fault


def detached(name, codes, cause, seconds, hurt, **more):
    """Return a row for a detached run."""
    return Fault(name, codes, cause, seconds, hurt, started_as="detached", **more)


DETACHED = [
    goes_on("nothing", lambda run: None, started_as="detached"),
    detached(
        *("controller-KILL", (75,), "./run-ssh stop", LOST + 5, sends("controller", "KILL")),
        loses_result=True,
        short=True,
    ),
    detached(
        *("controller-TERM", (143,), "SIGTERM", STOP + 5, sends("controller", "TERM")),
        short=True,
    ),
    goes_on("controller-HUP", sends("controller", "HUP"), started_as="detached"),
    goes_on("controller-INT", sends("controller", "INT"), started_as="detached"),
    detached(
        *("stop", (130,), "stop", STOP + 10, lambda run: run.type("stop")), weight=2, short=True
    ),
    detached("rank-KILL", (137,), "killed by SIGKILL", LOST, sends("rank", "KILL"), weight=2),
    detached("agent-KILL", (75,), "{victim}", LOST + 5, sends("agent", "KILL")),
    detached("attach-INT", (0, 130, -2), "", SOON, sends("launcher", "INT"), rank_seconds=3.0),
    detached(
        *("power-cut", (75,), "{victim}", LOST + 5, lambda run: run.cut_power()),
        heal=lambda run: run.boot(),
        loses_host=True,
        weight=2,
    ),
    detached(
        *("cable-pulled", (75,), "{victim}", LOST + 8, lambda run: run.pull_cable()),
        heal=lambda run: run.plug_cable(),
        loses_host=True,
        weight=2,
    ),
    detached(
        *("any-killed", (0, 75, 137, 143), "", 40.0, sends("all", "KILL")),
        rank_seconds=3.0,
        weight=2,
    ),
]


def node(name, codes, cause, seconds, hurt, **more):
    """Return a row for a run of which each node has a launcher of its own."""
    return Fault(name, codes, cause, seconds, hurt, started_as="node", **more)


NODE = [
    goes_on("nothing", lambda run: None, started_as="node"),
    node("rank-KILL", (137,), "killed by SIGKILL", LOST, sends("rank", "KILL")),
    node("agent-KILL", (75,), "node", LOST, sends("agent", "KILL")),
    node("launcher-KILL", (75,), "node", LOST, sends("launcher", "KILL"), short=True),
    node("all-TERM", (143,), "SIGTERM", STOP, lambda run: run.send_to_launchers("TERM")),
    node(
        *("cable-pulled", (75,), "node", LOST + 5, lambda run: run.pull_cable()),
        heal=lambda run: run.plug_cable(),
    ),
]


def served(name, hurt, kind="served", **more):
    """Return a row for real training that goes on, on data that the launcher serves."""
    return Fault(name, (0,), "done", 90.0, hurt, started_as=kind, rank_seconds=30.0, **more)


def stop_nginx(run):
    """Stop nginx for some seconds."""
    run.pause("nginx", 5.0)


SERVED = [
    served("nothing", lambda run: None),
    served("nginx-KILL", sends("nginx", "KILL")),
    served("nginx-STOP", stop_nginx),
    served("rank-KILL", sends("rank", "KILL"), options=RETRY),
    served("cable-flaps", lambda run: run.flap()),
    served("nothing", lambda run: None, "cached"),
    served("wrong-bytes", lambda run: run.spoil_cache(), "cached"),
    served("tmp-full", lambda run: run.fill_tmp(), "cached", heal=lambda run: run.empty_tmp()),
    served("cable-flaps", lambda run: run.flap(), "cached"),
]


def slurm(name, codes, hurt, rank_seconds=60.0, **more):
    """Return a row for a job of Slurm, which has a launcher on each node."""
    return Fault(name, codes, "", 60.0, hurt, started_as="slurm", rank_seconds=rank_seconds, **more)


SLURM = [
    slurm("nothing", (0,), lambda run: None, 3.0),
    slurm("rank-KILL", (137,), sends("rank", "KILL")),
    slurm("launcher-KILL", (137,), sends("launcher", "KILL")),
    slurm("scancel", (0, 143), lambda run: run.cancel()),
    slurm("power-cut", (0,), lambda run: run.cut_power(), 6.0, heal=lambda run: run.boot()),
]
"""After a power cut, Slurm queues the job again."""
ROWS = [*DETACHED, *NODE, *SERVED, *SLURM]
