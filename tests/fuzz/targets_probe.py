"""Fuzz targets: answers of a probe, the rendezvous, messages of peers, the command line.

Each takes bytes and returns; any exception is a defect.
"""

import contextlib
import json
from typing import Any

from rackrun.contract.tasks import TASKS
from rackrun.errors import Problem
from rackrun.launcher.commands.node_agreement import check_agreement
from rackrun.launcher.commands.parse import read
from rackrun.launcher.commands.settings import SSH_HEAD, NodeOptions, SshOptions
from rackrun.launcher.preflight import check_table
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import examine, refusal
from rackrun.launcher.preflight.facts import ClusterFacts, Host, HostFacts
from rackrun.launcher.preflight.replies import SHAPES, checked_reply
from rackrun.launcher.rendezvous.gather import Agreement, NodeHello, Rendezvous, RendezvousOutcome
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.url import check_url
from rackrun.launcher.schedulers import find_placement
from rackrun.launcher.schedulers.slurm import allocated, expand
from rackrun.launcher.supervision.peers import PeerMessage
from rackrun.shapes import Misshapen, parsed_json, shaped

QUESTIONS = sorted(SHAPES)
VARIABLES = (
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_NODES", "SLURM_STEP_TASKS_PER_NODE"),
    *("SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_GPUS_ON_NODE"),
    *("SLURM_GPUS_PER_NODE", "SLURM_NTASKS", "SLURM_TASKS_PER_NODE", "SLURM_HET_SIZE"),
    *("SLURMD_NODENAME", "NGC_ARRAY_SIZE", "NGC_ARRAY_INDEX", "NGC_GPUS_PER_NODE", "NGC_JOB_ID"),
    *("NGC_MASTER_ADDR", "PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    *("PET_NPROC_PER_NODE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("NNODES", "NODE_RANK", "NPROC_PER_NODE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
)


def fuzz_probe_answer(data: bytes) -> None:
    """Fuzz any answer to any question: what is accepted can be judged and shown."""
    question = QUESTIONS[data[0] % len(QUESTIONS)] if data else "look"
    with contextlib.suppress(Misshapen):
        reply = checked_reply(question, parsed_json(data[1:], 1 << 20))
        if "error" not in reply:
            json.dumps(shown(question, reply))


LOOK: dict[str, Any] = {
    **{"time": 1.0, "machine": "a", "address": "10.0.0.1", "holder": "", "workdir": "/w"},
    **{"lock": "/tmp/rackrun-a.lock", "workdir_problem": "", "tmp_problem": ""},
    **{"lock_problem": "", "drained": ""},
    **{"python": "/p", "cores": 1, "gpus": 0},
    **{"user": {"uid": 0, "gid": 0, "name": "root"}, "disk_free": 1 << 40, "open_files": -1},
    "interpreter": {"version": "3.11.7", "torch": "2", "cuda": ""},
}


def shown(question: str, reply: Any) -> str:
    """Return the table of a host that has given this answer, beside an honest one."""
    honest = {"look": LOOK, "clock": {"offset": 0.0, "uncertainty": 0.0}}
    theirs = honest if question == "clock" else {**honest, question: reply}
    cluster = ClusterFacts(
        (HostFacts(Host("a"), replies=honest), HostFacts(Host("b"), replies=theirs))
    )
    rows = examine(cluster, CHECKS)
    refusal(cluster, CHECKS, rows)
    return check_table.shown(rows)


def fuzz_roll_call(data: bytes) -> None:
    """Fuzz a node's greeting, and node 0's answer, which is then compared with the options."""
    with contextlib.suppress(Misshapen):
        shaped(parsed_json(data, 1 << 16), NodeHello)
    with contextlib.suppress(Misshapen, Problem):
        outcome: RendezvousOutcome = shaped(parsed_json(data, 1 << 16), RendezvousOutcome)
        agreement = outcome.agreed or Agreement("0" * 32, "20260101-120000-x", ("a",), (1,))
        meeting = Rendezvous(agreement, "10.0.0.2", "10.0.0.1", {})
        check_agreement(meeting, NodeOptions(auto_resume=True, name="x"), Command(("true",)))
    with contextlib.suppress(Misshapen):
        shaped(parsed_json(data, 1 << 16), PeerMessage)


def fuzz_node_list(data: bytes) -> None:
    """Fuzz a list of nodes, as Slurm writes it."""
    with contextlib.suppress(Problem):
        expand(data.decode("utf-8", "surrogateescape"), "SLURM_JOB_NODELIST")


def fuzz_environment(data: bytes) -> None:
    """Fuzz the variables of any scheduler: a letter chooses one, then its value, up to a NUL."""
    environment = {
        VARIABLES[arg[0] % len(VARIABLES)]: arg[1:].decode("utf-8", "surrogateescape")
        for arg in data.split(b"\0")
        if arg
    }
    with contextlib.suppress(Problem):
        find_placement(environment).check()
    with contextlib.suppress(Problem):
        allocated(environment)


def fuzz_data_url(data: bytes) -> None:
    """Fuzz the --data of a task."""
    with contextlib.suppress(Problem):
        check_url(data.decode("utf-8", "surrogateescape"))


def fuzz_command_line(data: bytes) -> None:
    """Fuzz the arguments of ./run-ssh, up to a NUL each; nothing is started."""
    args = [arg.decode("utf-8", "surrogateescape") for arg in data.split(b"\0")]
    args = [arg for arg in args if arg not in TASKS]  # which would answer --help themselves
    with contextlib.suppress(Problem, SystemExit):  # SystemExit: --help
        options = read("ssh", SshOptions, SSH_HEAD, args).options
        assert options.environment is not None and options.secrets is not None
