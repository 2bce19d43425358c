"""Fuzz targets of the launcher: what hosts, ranks, nodes, schedulers and users say.

Each takes bytes and returns; any exception is a defect.
"""

import atexit
import contextlib
import functools
import io
import json
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rackrun.contract.tasks import TASKS
from rackrun.errors import DataError, Problem, UsageError
from rackrun.launcher.commands.node_agreement import check_agreement
from rackrun.launcher.commands.parse import read as read_line
from rackrun.launcher.commands.settings import SSH_HEAD, NodeOptions, SshOptions
from rackrun.launcher.errors import HostLost
from rackrun.launcher.files.download import fetch_results
from rackrun.launcher.files.sync import Destination, upload_code
from rackrun.launcher.files.working_tree import WorkingTree, with_files
from rackrun.launcher.output.console import progress_words
from rackrun.launcher.output.dashboard import Dashboard
from rackrun.launcher.output.run_view import RunView, view
from rackrun.launcher.preflight import check_table
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import examine, refusal
from rackrun.launcher.preflight.facts import ClusterFacts, Host, HostFacts
from rackrun.launcher.preflight.replies import REPLIES, Basics, checked_reply
from rackrun.launcher.remote import results, run_processes, service, upload
from rackrun.launcher.remote.agent import frames, reports
from rackrun.launcher.rendezvous.gather import Agreement, NodeHello, Rendezvous, RendezvousOutcome
from rackrun.launcher.run.events import AskedToStop, Event, Lost, RankEnded, Stopping, TorchrunEnded
from rackrun.launcher.run.hosts import read_hosts, select
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.run.settings import Limits
from rackrun.launcher.run.state import RunState
from rackrun.launcher.run.url import check_url
from rackrun.launcher.schedulers import find_placement
from rackrun.launcher.schedulers.slurm import allocated, expand
from rackrun.launcher.supervision import hangs
from rackrun.launcher.supervision.agent_protocol import HOST_EVENTS, RANK_EVENTS, Decoder
from rackrun.launcher.supervision.peers import PeerMessage
from rackrun.launcher.supervision.reports import FIELDS, fitting_fields, valid_fields
from rackrun.launcher.supervision.root_cause import Failure, cause_of, find_root_failure
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from rackrun.launcher.transport.ssh.openssh import known_keys
from rackrun.launcher.viewer.reach import RunListing
from rackrun.run_files import RunEnd
from rackrun.run_folder import LAUNCHER_FILES, SUPERVISOR_FILES, RunFolder
from rackrun.run_report.folder import read as read_run
from rackrun.shapes import Misshapen, parsed_json, shaped
from rackrun.terminal import clean
from tests.fuzz.decoders import coded, decoder, example
from tests.unit.planned import plan_of

NOT_SAID = ("node", "rank")  # by an agent: the launcher knows them
EVENTS = [
    {"event": name, **{key: value for key, value in example(shape).items() if key not in NOT_SAID}}
    for name, shape in {**HOST_EVENTS, **RANK_EVENTS}.items()
]
REPORT = coded(
    {"phase": "train"}
    | {name: value for name in FIELDS for value in (1, 0.5) if fitting_fields({name: value})}
)


# -- an agent


PLAN = plan_of("node0", "node1", slots=2)


@decoder(*(frames.HEADER.pack(kind, 0, 9) + b"x" * 9 for kind in range(6)))
def fuzz_agent_frames(data: bytes) -> None:
    """Fuzz the bytes that an agent writes, in two pieces."""
    decoder = Decoder(PLAN.hosts[1])
    with suppress(HostLost):
        for piece in (data[: len(data) // 2], data[len(data) // 2 :]):
            for _ in decoder.feed(piece):
                pass


@decoder(REPORT, b'{"rank": 0, "loss": 1e999}')
def fuzz_agent_reports(data: bytes) -> None:
    """Fuzz a datagram that a rank sends: first for the agent, then for the launcher."""
    json.dumps(reports.report_in(data))
    fields = json.dumps(valid_fields(data) or {}, allow_nan=False)
    assert len(fields) < 6 * reports.REPORT_BYTES + 100


@decoder(*map(coded, EVENTS), b"r" + REPORT, coded({"event": "frozen", "names": ["9" * 5000]}))
def fuzz_agent_events(data: bytes) -> None:
    """Fuzz lines of JSON as events of two hosts, taken through state, screens and verdict.

    A line that begins with "r" is a report of a rank.
    """
    run, troubles = RunState(PLAN, 0.0), list[Failure]()
    streams = [Decoder(host) for host in PLAN.hosts]
    for number, line in enumerate(data.split(b"\n")[:24]):
        is_report = line.startswith(b"r")
        kind, payload = (frames.REPORT, line[1:]) if is_report else (frames.EVENT, line)
        frame = frames.HEADER.pack(kind, number % 3, len(payload)) + payload
        with suppress(HostLost):
            for event in streams[number % 2].feed(frame):
                take(event, run, troubles, float(number))
    show(run)
    hangs.find_unjoined(run, Limits(), 1e6)
    if hang := hangs.find_hang(run, Limits(hang_seconds=1.0), 1e6):
        troubles.append(hangs.split_network(hang, run))
    if troubles:
        failure = find_root_failure(troubles[:1], troubles[1:], lambda *source: "")
        cause_of(failure, lambda *source: "")


def take(event: Event, run: RunState, troubles: list[Failure], now: float) -> None:
    run.take(event, now)
    if isinstance(event, RankEnded | TorchrunEnded | AskedToStop | Lost | Stopping):
        troubles.append(event)


def show(run: RunState) -> None:
    """Draw everything that a screen shows of a run, at the narrowest and at the widest."""
    shown = view(run, "x", RunFolder(Path("/x")), 100.0, {})
    list(progress_words(shown))
    board = Dashboard()
    for width in (20, 200):
        board.console = Console(file=io.StringIO(), force_terminal=True, width=width, height=30)
        board.console.print(board.board(shown))
    assert [host.end_state for host in run.hosts]
    assert run.slow_host is None or run.slow


# -- what is known of a run, and of its processes


def declares(shape: type[Any]) -> None:
    """Make JSON of a shape a target."""

    def fuzz(data: bytes) -> None:
        with suppress(Misshapen):
            shaped(parsed_json(data, 1 << 20), shape, "answer")

    fuzz.__name__, fuzz.__module__ = f"fuzz_{shape.__name__}", __name__
    decoder(coded(example(shape)))(fuzz)


for shape in (RunView, RunEnd, RunListing, NodeHello, PeerMessage):
    declares(shape)


@decoder(coded([1, 2, "pid:[1]"]), b"5", b"[1, 2, {}]")
def fuzz_agent_pid(data: bytes) -> None:
    """Fuzz the file that identifies an agent, in a private folder of this account."""
    run = os.urandom(16).hex()
    folder = Path(f"/tmp/rackrun-{run}-0")
    folder.mkdir(0o700)
    try:
        (folder / "agent.pid").write_bytes(data)
        assert len(run_processes.agents_of(str(folder))) <= 1
    finally:
        (folder / "agent.pid").unlink()
        folder.rmdir()


# -- a probe, and other nodes

ANSWERS = [example(shape) for shape in REPLIES]
for answer in ANSWERS:
    answer.pop("error", None)


@decoder(*(bytes([n]) + coded(answer) for n, answer in enumerate(ANSWERS)))
def fuzz_probe_answer(data: bytes) -> None:
    """Fuzz any answer to any question: what is accepted can be judged and shown."""
    shape = REPLIES[data[0] % len(REPLIES)] if data else Basics
    with suppress(Misshapen, Problem):
        answer = parsed_json(data[1:], 1 << 20)
        json.dumps(shown(checked_reply(answer if isinstance(answer, dict) else {}, shape, "b")))


def shown(reply: Any) -> str:
    """Return the table of a host that has given this answer, beside an honest one."""
    honest = {Basics: checked_reply(ANSWERS[REPLIES.index(Basics)], Basics, "a")}
    theirs = {**honest, type(reply): reply}
    cluster = ClusterFacts(
        (HostFacts(Host("a"), replies=honest), HostFacts(Host("b"), replies=theirs))
    )
    rows = examine(cluster, CHECKS)
    refusal(cluster, CHECKS, rows)
    return check_table.shown(rows)


@decoder(coded(example(RendezvousOutcome)), coded({"agreed": example(Agreement)}))
def fuzz_roll_call(data: bytes) -> None:
    """Fuzz node 0's answer, which is then compared with the options."""
    with suppress(Misshapen, Problem):
        outcome: RendezvousOutcome = shaped(parsed_json(data, 1 << 16), RendezvousOutcome)
        agreement = outcome.agreed or Agreement("0" * 32, "20260101-120000-x", ("a",), (1,))
        meeting = Rendezvous(agreement, "10.0.0.2", "10.0.0.1", {})
        check_agreement(meeting, NodeOptions(auto_resume=True, name="x"), Command(("true",)))


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
    with suppress(Problem):
        find_placement(environment).check()
    with suppress(Problem):
        allocated(environment)


@decoder(b"an[01-29,3]", words=tuple(b"an0129,[]-. x"[at : at + 1] for at in range(13)))
def fuzz_node_list(data: bytes) -> None:
    """Fuzz a list of nodes, as Slurm writes it."""
    with suppress(Problem):
        expand(data.decode("utf-8", "surrogateescape"), "SLURM_JOB_NODELIST")


# -- what a user types


@decoder(
    *(b"http://[::1/", b"http://h:99999/?q#f", b"http://h/\xe9 b/", b"http://xn--\xd9\xa1/"),
    *(b"http://a..b/", b"https://user:hunter2@h:x/"),
    words=(b"http://h/", b"http://[::1]:8080/"),
)
def fuzz_data_url(data: bytes) -> None:
    """Fuzz the --data of a task."""
    with suppress(Problem):
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
    with suppress(Problem, SystemExit, OSError):
        options = read_line("ssh", SshOptions, SSH_HEAD, args).options
        assert options.environment is not None and options.secrets is not None


# -- the files of SSH, which are the user's own

MARKS = [*" \t\n\r\f\0\u2028\x85é\"'\\=,:#|*?![]@-/~%", "%h", "${HOME}", "${", "0", "22"]
HOST_WORDS = ["gpu01", "gpu[01-16]", "jo@", "10.0.0.7", "[2001:db8::7]", "slots=", "env=A=b"]
HOST_WORDS += ["address=", "interface=eth0", "workdir=", "python=", "999999999999", "[1,4-7]"]
KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKRYFGEpbCHDUGg1LpqD3sEWEA6+lqkqgJ4kmpfHRJ5h"
KNOWN_WORDS = ["gpu01", "[10.0.0.7]:2222", KEY, "@revoked ", "@cert-authority ", "|1|"]
KNOWN_WORDS += ["|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= ", "ssh-ed25519"]
KEYWORDS = (
    *("HostName", "User", "Port", "IdentityFile", "IdentityAgent", "CertificateFile", "ProxyJump"),
    *("ProxyCommand", "UserKnownHostsFile", "GlobalKnownHostsFile", "HostKeyAlias", "Ciphers"),
    *("MACs", "KexAlgorithms", "HostKeyAlgorithms", "RekeyLimit", "AddressFamily", "CheckHostIP"),
    *("StrictHostKeyChecking", "RequiredRSASize", "RevokedHostKeys", "PubkeyAuthentication"),
    *("Match", "Host", "Include", "IgnoreUnknown"),
)
CONFIG_WORDS = [f"\n{keyword} " for keyword in KEYWORDS]
CONFIG_WORDS += ["yes", "no", "gpu01", "user", "originalhost", "canonical", "all", "final", "none"]
CONFIG_WORDS += ["aes256-ctr", "^"]
HOSTS = (Host("gpu01"), Host("10.0.0.7", user="jo", port=2222))


def words(*lists: list[str]) -> tuple[bytes, ...]:
    """Return words of a file, and what may stand between them."""
    return tuple(word.encode() for words in (*lists, MARKS) for word in words)


@decoder(words=words(HOST_WORDS))
def fuzz_hosts_txt(data: bytes) -> None:
    """Fuzz a host file: every accepted name is safe in a command line."""
    with suppress(UsageError):
        for host in read_hosts(holding(data)):
            assert host.name and host.name.isascii() and not host.name.startswith("-")
            assert not set(host.name) & set(" \t\r\n;|&$`\"'<>(){}*?!#\\/,")


@decoder(words=words(HOST_WORDS))
def fuzz_selection(data: bytes) -> None:
    """Fuzz `--include` and `--exclude`."""
    include, _, exclude = data.decode(errors="replace").partition("\n")
    with suppress(UsageError):
        assert select(HOSTS, include, exclude)


@decoder(words=words(KNOWN_WORDS))
def fuzz_known_hosts(data: bytes) -> None:
    """Fuzz a known_hosts file that is asked about two hosts: only whole keys come out of it."""
    for name in ("gpu01", "[10.0.0.7]:2222"):
        for key in known_keys(name, [holding(data)]):
            assert key.type.encode() in key.blob
            assert key.line > 0


@decoder(*(word.encode() for word in CONFIG_WORDS), words=words(CONFIG_WORDS))
def fuzz_ssh_config(data: bytes) -> None:
    """Fuzz an ssh_config file, up to the routes to two hosts; `Match exec` runs nothing."""
    if b"exec" in data.lower():
        return
    with suppress(UsageError):
        for route in Network(ConnectSettings(config=holding(data))).routes_to(HOSTS):
            assert route.client.host


@functools.cache
def folder() -> Path:
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made)
    return Path(made)


def holding(data: bytes) -> Path:
    """Write a file with these bytes."""
    file = folder() / "file"
    file.write_bytes(data)
    return file


# -- files that come from a host, and go there

HOST_PLAN = HostPlan(
    *("host", "127.0.0.1", 1, "/python", "/w", "/w/run"),
    **dict.fromkeys(("torchrun", "command", "environment", "defaults"), ()),
    **{"node": 0, "first_rank": 0, "scratch": "/s", "agent_python": ""},
)


class Recorded:
    """A host whose every program says these bytes and ends: a channel, and its own place."""

    name = "host"

    def __init__(self, data: bytes) -> None:
        self.left = service.MARKER + data

    def open(self, argv: object) -> "Recorded":
        return self

    def send(self, data: bytes) -> None:
        pass

    def receive(self, seconds: float | None = None) -> bytes:
        piece, self.left = self.left[:997], self.left[997:]
        return piece

    def complaint(self) -> str:
        return ""

    def close(self) -> None:
        pass


def said(data: bytes) -> bytes:
    """Return what a host says: after a "=" its lines as answers, else the bytes as they are."""
    if not data.startswith(b"="):
        return data
    return b"".join(b"%d\n%s" % (len(line), line) for line in data[1:].split(b"\n"))


NAMES = ("../x", "/etc/x", "", ".", "a/../../x", "plan.json", "logs/x.out", "\x1b]0;x\x07", "a\0b")


@decoder(
    b"=" + coded({"files": {"a.txt": 1}, "odd": 1}, {"path": "a.txt", "size": 1}),
    *(b"=" + coded({"files": {name: 1}}, {"path": name, "size": 1}) for name in NAMES),
    *(b"=" + coded({"files": {"a.pt": size}}) for size in (99_000_000_000, -5, 2**52)),
    b"=" + coded({"error": "\x1b[2J gone"}),
)
def fuzz_results(data: bytes) -> None:
    """Fuzz the transfer of results: they end below our folder, or are refused in one line."""
    with tempfile.TemporaryDirectory() as folder:
        ours = Path(folder) / "runs" / "run"
        ours.mkdir(parents=True)
        with one_line_at_most():
            fetch_results(Recorded(said(data)), HOST_PLAN, "", ours)
        paths = [path for path in Path(folder).rglob("*") if not path.is_dir()]
        assert all(path.is_relative_to(ours) for path in paths)
        assert not {path.name for path in ours.iterdir()} & (LAUNCHER_FILES | SUPERVISOR_FILES)
        assert not list(ours.rglob(".*.partial"))


@decoder(
    b"=" + coded({"root": "/x", "paths": ["a"], "surplus": 1}, {}, {"error": "no"}),
    b"=" + coded({"root": "/x", "paths": ["../../.ssh/id_ed25519"], "surplus": 0}),
    b"=" + coded({"root": "/x", "paths": [], "surplus": 0}, {"line": "\x1b[2Jx"}, {"code": 0}),
)
def fuzz_differences(data: bytes) -> None:
    """Fuzz a host's answers during --sync: it is sent that code or refused."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "a").write_text("code")
        code = with_files(WorkingTree(Path(folder), {}), ["a"], print)
        with one_line_at_most():
            upload_code(code, [Destination(Recorded(said(data)), "x")], shown_as_text)


@decoder(coded(["a", "b/c", "../x", "/etc/x", ""]))
def fuzz_brought(data: bytes) -> None:
    """Fuzz a host's list of files: it names files below its folder, or is refused."""
    with tempfile.TemporaryDirectory() as folder:
        manifest = Path(folder) / upload.MANIFEST
        manifest.parent.mkdir()
        manifest.write_bytes(data)
        with suppress(OSError):
            for path in upload.brought(folder):
                assert not {"", ".", ".."} & set(path.split("/"))


def grid() -> bytes:
    """Return a grid of predictions as numpy writes it."""
    buffer = io.BytesIO()
    np.savez_compressed(
        buffer,
        images=np.arange(24, dtype=np.uint8).reshape(2, 2, 2, 3),
        labels=np.array([0, 1]),
        predicted=np.array([0, 1]),
        probability=np.array([0.5, 1.0], np.float32),
        keys=["a", "b"],
        classes=["cat", "dog"],
    )
    return buffer.getvalue()


@decoder(grid(), coded({"kind": "train", "step": 1, "loss": 0.5}, {"cpu": 0.5, "time": 1}))
def fuzz_report(data: bytes) -> None:
    """Fuzz the results of a run: they are drawn, or refused in one line with the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for name in ("metrics.jsonl", "usage.jsonl", "config.json", "predictions.npz"):
            (run / "config.json").write_text("{}")
            (run / name).write_bytes(data)
            try:
                read_run(run)
            except DataError as error:
                assert clean(str(error)) == str(error)
                assert name in str(error)
            (run / name).unlink()


@decoder(coded({"run_id": "0" * 32}), coded({"run_id": "x"}))
def fuzz_plan(data: bytes) -> None:
    """Fuzz plan.json: one of another program is not taken for the launcher's."""
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "plan.json"
        plan.write_bytes(data)
        assert results.results(folder, "0" * 32, (), 9)["files"] or b"0" * 32 in data


def shown_as_text(line: str) -> None:
    assert clean(line) == line


@contextlib.contextmanager
def one_line_at_most():
    """Let only Problem pass, with a message that a terminal can show."""
    try:
        yield
    except Problem as error:
        assert clean(str(error)) == str(error)
