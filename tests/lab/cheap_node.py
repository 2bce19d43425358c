"""`python -m rackrun node` with a stand-in for torchrun, as a program: 0.05 s, not 2."""

import dataclasses
import sys
from collections.abc import Sequence

from rackrun.__main__ import command
from rackrun.launcher.commands import node
from rackrun.launcher.run.job import Job
from rackrun.launcher.run.plan import Plan, make_plan
from rackrun.launcher.run.planned_host import PlannedHost
from tests.lab.hosts import FAKE


def cheap(job: Job, hosts: Sequence[PlannedHost], port: int) -> Plan:
    plan = make_plan(job, hosts, port)
    remote = [
        dataclasses.replace(
            host,
            torchrun=(*FAKE, *host.torchrun[3:]),
            environment=(*host.environment, ("FIRST_RANK", str(host.first_rank))),
        )
        for host in plan.hosts
    ]
    return dataclasses.replace(plan, hosts=tuple(remote))


node.make_plan = cheap
command(["node", *sys.argv[1:]])
