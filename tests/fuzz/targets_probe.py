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
from rackrun.launcher.preflight.replies import REPLIES, Look, checked_reply
from rackrun.launcher.rendezvous.gather import Agreement, NodeHello, Rendezvous, RendezvousOutcome
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.url import check_url
from rackrun.launcher.schedulers import find_placement
from rackrun.launcher.schedulers.slurm import allocated, expand
from rackrun.launcher.supervision.peers import PeerMessage
from rackrun.shapes import Misshapen, parsed_json, shaped
from tests.fuzz.decoders import coded, decoder
from tests.launcher.conftest import HONEST, agreed

QUESTIONS = [shape.question for shape in REPLIES]
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


LOOK: dict[str, Any] = {
    **{"time": 1.0, "machine": "a", "address": "10.0.0.1", "holder": "", "workdir": "/w"},
    **{"lock": "/tmp/rackrun-a.lock", "problems": {"workdir": "x"}},
    **{"lock_problem": "", "drained": ""},
    **{"python": "/p", "cores": 1, "gpus": 0},
    **{"user": {"uid": 0, "gid": 0, "name": "root"}, "disk_free": 1 << 40},
    "interpreter": {"version": "3.11.7", "torch": "2", "cuda": ""},
}
ANSWERS = {
    "look": LOOK,
    "image": {"id": "a1", "interpreter": {"version": "3.11.7"}},
    "gpus": {
        "gpus": [{"name": "H200", "total": 1, "used": 1}],
        "processes": [{"pid": 1, "name": "python"}],
    },
    "code": {"missing": ["a"], "different": ["b"], "count": 2},
    "route": {"address": "10.0.0.1", "interface": "eth0", "master": "10.0.0.2", "unreached": "x"},
    "listen": {"port": 1},
    "shards": {"dataset": "toy"},
    "hold": {"holder": ""},
    "occupancy": {
        **{"time": 1.0, "load": 0.5, "cores": 8, "gpus": 2, "disk_free": 1, "lock_problem": ""},
        "uses": [{"part": ".gpu0", "user": "a", "since": 1.0, "run": "ab" * 16, "name": "x"}],
        "queue": [{"user": "b", "since": 2.0}],
        "drained": "fan is broken",
    },
}


@decoder(*(bytes([QUESTIONS.index(name)]) + coded(reply) for name, reply in ANSWERS.items()))
def fuzz_probe_answer(data: bytes) -> None:
    """Fuzz any answer to any question: what is accepted can be judged and shown."""
    shape = REPLIES[data[0] % len(REPLIES)] if data else Look
    with contextlib.suppress(Misshapen, Problem):
        answer = parsed_json(data[1:], 1 << 20)
        json.dumps(shown(checked_reply(answer if isinstance(answer, dict) else {}, shape, "b")))


def shown(reply: Any) -> str:
    """Return the table of a host that has given this answer, beside an honest one."""
    honest = {Look: checked_reply(LOOK, Look, "a")}
    theirs = {**honest, type(reply): reply}
    cluster = ClusterFacts(
        (HostFacts(Host("a"), replies=honest), HostFacts(Host("b"), replies=theirs))
    )
    rows = examine(cluster, CHECKS)
    refusal(cluster, CHECKS, rows)
    return check_table.shown(rows)


@decoder(
    coded({"hello": HONEST}),
    coded({"agreed": {**agreed(), "resume": "20260101-120000-x", "data": "http://10.0.0.1/"}}),
    coded({"refused": "no", "code": 64}),
    coded({"failed": {"node": 1, "text": "x", "exit_code": 1, "secondary": True}}),
    coded({"hang_limit": {"node": 1, "seconds": 1.0}, "stop": {"node": 1, "signal": 15}}),
)
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


@decoder(b"an[01-29,3]", words=tuple(b"an0129,[]-. x"[at : at + 1] for at in range(13)))
def fuzz_node_list(data: bytes) -> None:
    """Fuzz a list of nodes, as Slurm writes it."""
    with contextlib.suppress(Problem):
        expand(data.decode("utf-8", "surrogateescape"), "SLURM_JOB_NODELIST")


@decoder(
    words=(
        *(b"\0" + bytes([number]) for number in range(len(VARIABLES))),
        *(b"0", b"1", b"2", b"9", b",", b"[", b"]", b"-", b".", b"x", b"(", b")", b"a", b"n", b":"),
    )
)
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


@decoder(
    *(b"http://[::1/", b"http://h:99999/?q#f", b"http://h/\xe9 b/", b"http://xn--\xd9\xa1/"),
    *(b"http://a..b/", b"https://user:hunter2@h:x/"),
    words=(b"http://h/", b"http://[::1]:8080/"),
)
def fuzz_data_url(data: bytes) -> None:
    """Fuzz the --data of a task."""
    with contextlib.suppress(Problem):
        check_url(data.decode("utf-8", "surrogateescape"))


@decoder(
    words=(
        b"\0",
        *(f"\0--{name.replace('_', '-')}\0".encode() for name in SshOptions.__dataclass_fields__),
        *(b"catdog", b"imagenet", b"--data", b"http://[", b"--", b"hosts.txt", b"1,2", b"x=y"),
    )
)
def fuzz_command_line(data: bytes) -> None:
    """Fuzz the arguments of ./run-ssh, up to a NUL each; nothing is started."""
    args = [arg.decode("utf-8", "surrogateescape") for arg in data.split(b"\0")]
    args = [arg for arg in args if arg not in TASKS]  # which would answer --help themselves
    # SystemExit: --help. OSError: a name that no file can have, which `main` makes one line of.
    with contextlib.suppress(Problem, SystemExit, OSError):
        options = read("ssh", SshOptions, SSH_HEAD, args).options
        assert options.environment is not None and options.secrets is not None
