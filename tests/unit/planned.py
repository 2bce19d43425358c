"""A plan as a launch makes it, for what takes one."""

from pathlib import Path

from rackrun.launcher.run.job import Command, Job, Work
from rackrun.launcher.run.plan import Plan, make_plan
from rackrun.launcher.run.planned_host import PlannedHost
from rackrun.run_folder import RunFolder

PROGRAM = Command(("x",))


def plan_of(*names: str, slots: int = 1, work: Work = PROGRAM, **about: object) -> Plan:
    """Return the plan of a run on hosts of these names."""
    hosts = [
        PlannedHost(name, f"10.0.0.{n}", slots, "python", "/", "/x", **about)
        for n, name in enumerate(names)
    ]
    return make_plan(Job(work, RunFolder(Path("/x"))), hosts, 1)
