"""What strangers may say at the port where nodes meet, and who answers in node 0's place."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rackrun.contract.variables import JOB_KEY
from rackrun.errors import Problem, UsageError
from rackrun.launcher.commands.node_agreement import check_agreement
from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.rendezvous.connection import PeerConnection
from rackrun.launcher.rendezvous.gather import (
    MOST_STRANGERS,
    Agreement,
    NodeInfo,
    Rendezvous,
    gather,
    join,
)
from rackrun.launcher.run.job import Command
from rackrun.launcher.run.settings import Serving
from rackrun.launcher.transport.local import free_port
from tests.lab.waiting import until
from tests.launcher.commands.test_node import SAY, connected, ends, nodes, python

__all__ = ["nodes"]

RUN = "20260101-120000-toy"
KNOWN = b"0123456789abcdef"
HONEST = {"node": 1, "nodes": 2, "processes": 1, "name": "n1", "job": "", "resume": ""}
NONCE = "0" * 32


def hello(**changes: Any) -> bytes:
    return json.dumps({"hello": {**HONEST, **changes}, "nonce": NONCE}).encode() + b"\n"


STRANGE = [
    b"[" * 60_000 + b"\n",
    b"9" * 5000 + b"\n",
    b"5\n",
    b"\xff\n",
    b"{}\n",
    b"x" * 100_000,
    b'{"hello": 5, "nonce": "' + NONCE.encode() + b'"}\n',
    b'{"hello": {}}\n',
    hello(node="x"),
    hello(node=[1]),
    hello(node=-1),
    hello(nodes=10**9),
    hello(processes="x"),
    hello(processes=10**12),
    hello(processes=0),
    hello(name="../../\x1b[31m"),
    hello(name=""),
    hello(job="\x1b"),
    hello(resume="zz/../../../tmp/evil"),
    hello(resume="20260101-120000-x/../y"),
    hello(more=1),
    json.dumps({"hello": HONEST, "nonce": "short"}).encode() + b"\n",
]


class Zero:
    """Node 0 of two, in a thread."""

    def __init__(self, key: bytes = b"", wait_seconds: float = 60.0) -> None:
        self.port = free_port()
        self.met: Rendezvous | None = None
        self.error: Problem | None = None
        self.lines: list[str] = []
        this_node = NodeInfo(0, 2, 1, "n0", "")

        def agree(members: Any, address: str) -> Agreement:
            names = tuple(member.name for member in members)
            return Agreement("0" * 32, RUN, names, (1, members[1].processes))

        def meet() -> None:
            try:
                self.met = gather(this_node, self.port, wait_seconds, agree, self.lines.append, key)
            except Problem as error:
                self.error = error

        self.thread = threading.Thread(target=meet)
        self.thread.start()

    def called(self) -> socket.socket:
        return until(lambda: connected(self.port))

    def second(self, key: bytes = b"") -> Rendezvous:
        """Join as the true other node."""
        return join(NodeInfo(1, 2, 1, "n1", ""), "127.0.0.1", self.port, 60.0, str, key)


@pytest.fixture
def zero() -> Iterator[Callable[..., Zero]]:
    made: list[Zero] = []

    def make(*args: Any, **more: Any) -> Zero:
        made.append(Zero(*args, **more))
        return made[-1]

    yield make
    for node in made:
        node.thread.join(60)
        assert not node.thread.is_alive()
        for connection in (node.met.connections if node.met else {}).values():
            connection.close()


@pytest.mark.security("NET-4")
def test_no_stranger_ends_or_holds_up_the_roll_call(zero):
    """Nonsense of every kind, 60 who are silent and one who drips: the true node is met at once."""
    node = zero()
    enough = threading.Event()
    with contextlib.ExitStack() as callers:
        dripping = callers.enter_context(node.called())
        callers.callback(enough.set)
        threading.Thread(target=drip, args=(dripping, enough), daemon=True).start()
        for _ in range(60):
            callers.enter_context(node.called())
        for args in STRANGE:
            with contextlib.suppress(ConnectionError):  # it hangs up on long ones in the middle
                callers.enter_context(node.called()).sendall(args)
        began = time.monotonic()
        meeting = node.second()
        assert time.monotonic() - began < 20  # each of the silent ones had been waited for: 5 min
    assert (meeting.agreement.folder, meeting.agreement.names) == (RUN, ("n0", "n1"))
    meeting.connections[0].close()


def drip(stream: socket.socket, enough: threading.Event) -> None:
    """Send a byte now and then, without end."""
    with contextlib.suppress(OSError):
        while not enough.wait(0.2):
            stream.sendall(b"[")


def test_who_drips_is_sent_away_and_the_limit_of_the_roll_call_holds(zero):
    """A byte every 0.2 s: the connection ends after 5 s, and node 0 after its --wait-seconds."""
    node = zero(wait_seconds=8.0)
    with node.called() as stream, pytest.raises(OSError):
        while True:
            stream.sendall(b"[")
            time.sleep(0.2)
    node.thread.join(60)
    assert isinstance(node.error, HostUnreachable)
    assert "node 1 did not come within 8 s" in str(node.error)


def test_more_strangers_than_there_are_places_do_not_keep_a_node_out(zero):
    """The oldest silent one leaves first."""
    node = zero()
    with contextlib.ExitStack() as callers:
        for _ in range(MOST_STRANGERS // 2):
            callers.enter_context(node.called())
        meeting = node.second()
    assert meeting.agreement.folder == RUN
    meeting.connections[0].close()


# -- a key of the job


@pytest.mark.security("NET-4")
def test_with_a_key_only_nodes_that_know_it_meet(zero):
    """No key, another key, and what was overheard before: none takes a seat; the true node does."""
    node = zero(KNOWN)
    with pytest.raises(UsageError, match=f"{JOB_KEY} is set on node 0, and not here"):
        node.second()
    with pytest.raises(Problem):
        node.second(b"another key of 16")
    for args in (hello(), b"0" * 64 + b" " + hello()):
        with node.called() as stream:
            stream.sendall(args)
            heard = b""
            with contextlib.suppress(ConnectionError):
                while data := stream.recv(1 << 16):
                    heard += data
            assert heard.count(b"\n") == 1  # its greeting
    meeting = node.second(KNOWN)
    assert meeting.agreement.names == ("n0", "n1")
    node.thread.join(60)
    assert node.met is not None
    ours, theirs = node.met.connections[1], meeting.connections[0]
    theirs.send(done=True)
    assert ours.receive(10) == {"done": True}
    ours.send(stop={"node": 0, "signal": 15})
    assert theirs.receive(10) == {"stop": {"node": 0, "signal": 15}}
    theirs.close()


def test_what_was_said_before_counts_no_second_time(zero):
    """A recorded greeting is refused at the next rendezvous (replay)."""
    first = zero(KNOWN)
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as middle:
        port = middle.getsockname()[1]

        def listen_in() -> None:
            caller, _ = middle.accept()
            with caller, first.called() as called:
                caller.sendall(called.recv(1 << 16))
                heard.append(caller.recv(1 << 16))
                called.sendall(heard[0])
                caller.sendall(called.recv(1 << 16))

        thread = threading.Thread(target=listen_in)
        thread.start()
        meeting = join(NodeInfo(1, 2, 1, "n1", ""), "127.0.0.1", port, 60.0, str, KNOWN)
        thread.join()
        meeting.connections[0].close()
    again = zero(KNOWN)
    with again.called() as stream:
        stream.sendall(heard[0])
        with contextlib.suppress(ConnectionError):
            while stream.recv(1 << 16):
                pass
    assert again.met is None
    again.second(KNOWN).connections[0].close()


def test_a_node_with_a_key_believes_no_node_0_without_it():
    """Who listens at node 0's port before the job does has nothing to say."""
    for greeting, error, says in (
        ({"nonce": NONCE, "sealed": False}, UsageError, "is set here, and not on node 0"),
        ({"nonce": NONCE, "sealed": True}, HostUnreachable, f"not sealed with our {JOB_KEY}"),
    ):
        options = {"agreed": agreed()}
        with pytest.raises(error, match=says):
            answered(json.dumps(greeting).encode() + b"\n", json.dumps(options).encode(), KNOWN)


def test_nodes_of_a_job_with_a_key_run(nodes, monkeypatch):
    """The whole way, with the key in the environment; the ranks do not find it in theirs."""
    script = f"{SAY}; print('{JOB_KEY}' in os.environ)"
    monkeypatch.setenv(JOB_KEY, KNOWN.decode())
    endings = ends(nodes.start_all(2, *python(script)))
    assert [code for code, _, _ in endings] == [0, 0], endings
    assert all("False" in out and "True" not in out for _, out, _ in endings)
    monkeypatch.setenv(JOB_KEY, "short")
    ((code, _, err),) = ends([nodes.start(0, 2, *python(SAY))])
    assert (code, "shorter than 16 characters; type: export" in err) == (64, True)
    assert not nodes.left()


# -- who answers in node 0's place


def agreed(**changes: Any) -> dict[str, Any]:
    return {
        **{"run_id": "0" * 32, "folder": RUN, "names": ["n0", "n1"], "slots": [1, 1]},
        **changes,
    }


def answered(greeting: bytes, words: bytes, key: bytes = b"") -> Rendezvous:
    """Return the rendezvous of a node with such a node 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller, contextlib.suppress(OSError):
                caller.sendall(greeting)
                if caller.recv(1 << 16):
                    caller.sendall(words + b"\n")
                    caller.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        this_node = NodeInfo(1, 2, 1, "n1", "")
        try:
            meeting = join(this_node, "127.0.0.1", listener.getsockname()[1], 20.0, str, key)
        finally:
            thread.join(0.1)
        meeting.connections[0].close()
        thread.join()
        return meeting


GREETING = json.dumps({"nonce": NONCE, "sealed": False}).encode() + b"\n"


@pytest.mark.parametrize(
    "args",
    [
        5,
        [],
        {},
        {"agreed": 5},
        {"agreed": {}},
        *(
            {"agreed": agreed(**{name: value})}
            for name, values in {
                "folder": ["/tmp/OUTSIDE", "../x", "", f"{RUN}/../../x", 5, "x" * 300],
                "run_id": ["x", "../../../tmp/evil", 5],
                "slots": [[1], "ab", [1, 2], [1, 10**12], [1, "1"], [1, 1, 1]],
                "names": [["n0"], "ab", ["n0", "../n1"], ["n0", "\x1b[31m"]],
                "resume": ["../evil", "/tmp/evil", 5],
                "data": [5, "http://x/\x1b", "x" * 2000],
                "more": [1],
            }.items()
            for value in values
        ),
        {"refused": 5, "code": 64},
        {"refused": "no", "code": 0},
        {"refused": "no", "code": "x"},
        {"refused": "no", "code": 1000},
    ],
    ids=str,
)
def test_what_no_node_0_would_say_is_a_line(args):
    """Folders elsewhere, names that are paths, other types: 69, and nothing is made anywhere."""
    with pytest.raises(Problem) as caught:
        answered(GREETING, json.dumps(args).encode())
    assert caught.value.exit_code == 69
    assert "sent what no node of this job would" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_refusal_is_shown_as_text():
    """With a valid exit code, on one line, without escape sequences."""
    with pytest.raises(Problem) as caught:
        answered(GREETING, json.dumps({"refused": "no\x1b]0;x\x07\nno", "code": 64}).encode())
    assert (caught.value.exit_code, str(caught.value)) == (64, "node 0: no␛]0;x␇ no")


@pytest.mark.parametrize(
    ("data", "serve", "fits"),
    [
        ("", {}, True),
        ("http://10.0.0.1:8080/", {"serve": True}, True),
        ("http://10.0.0.9:8080/", {"serve": True, "serve_address": "10.0.0.9"}, True),
        ("http://10.0.0.1:8080/", {}, False),
        ("http://10.0.0.2:8080/", {"serve": True}, False),
        ("http://10.0.0.1:8080/x?y", {"serve": True}, False),
        ("http://a:b@10.0.0.1:8080/", {"serve": True}, False),
        ("file:///etc/", {"serve": True}, False),
        ("/etc", {"serve": True}, False),
        ("http://[::1/", {"serve": True}, False),
    ],
)
def test_shards_are_read_from_node_0_only_and_only_if_it_serves(data, serve, fits):
    """A URL, at the address where we met node 0, and where --serve was typed here, too."""
    meeting = Rendezvous(
        Agreement("0" * 32, RUN, ("a", "b"), (1, 1), data=data), "", "10.0.0.1", {}
    )
    options = NodeOptions(serving=Serving(**serve))
    with contextlib.nullcontext() if fits else pytest.raises(HostUnreachable, match="--serve"):
        check_agreement(meeting, options, Command(("true",)))


@pytest.mark.parametrize(
    ("resume", "options", "fits"),
    [
        (RUN, NodeOptions(name="toy", auto_resume=True), True),
        (RUN, NodeOptions(name="toy"), False),
        (RUN, NodeOptions(name="other", auto_resume=True), False),
    ],
)
def test_a_run_to_go_on_from_is_one_of_this_name(resume, options, fits):
    """And only where --auto-resume was typed here, too."""
    agreement = Agreement("0" * 32, RUN, ("a", "b"), (1, 1), resume=resume)
    meeting = Rendezvous(agreement, "", "10.0.0.1", {})
    with contextlib.nullcontext() if fits else pytest.raises(HostUnreachable, match="would resume"):
        check_agreement(meeting, options, Command(("true",)))


def test_nodes_do_not_meet_at_a_public_address_unless_allowed():
    """NET-1: as ./run-ssh, with the same word."""
    meeting = Rendezvous(Agreement("0" * 32, RUN, ("a", "b"), (1, 1)), "", "8.8.8.8", {})
    with pytest.raises(Problem, match="public address 8.8.8.8") as caught:
        check_agreement(meeting, NodeOptions(), Command(("true",)))
    assert caught.value.exit_code == 78
    check_agreement(meeting, NodeOptions(ignore_check=("public",)), Command(("true",)))
    with pytest.raises(UsageError, match="--ignore-check gpus: no such check"):
        NodeOptions(ignore_check=("gpus",))


def test_a_rival_node_0_writes_nothing_outside_of_runs(nodes, tmp_path):
    """End to end: a program that listens at 29500 before the job names no folder of ours."""
    args = json.dumps({"agreed": agreed(folder=str(tmp_path / "OUTSIDE"))}).encode()
    with socket.create_server(("127.0.0.1", nodes.port)) as listener:
        process = nodes.start(1, 2, *python(SAY))
        with listener.accept()[0] as caller:
            caller.sendall(GREETING)
            caller.recv(1 << 16)
            caller.sendall(args + b"\n")
            ((code, _, err),) = ends([process])
    assert code == 69
    assert "agreed.folder: not of the expected form" in err and "Traceback" not in err
    assert not (tmp_path / "OUTSIDE").exists()


def test_a_connection_takes_only_so_much():
    """64 KiB without an end of line are nonsense."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()) as other,
        listener.accept()[0] as accepted,
    ):
        connection = PeerConnection(accepted)
        threading.Thread(target=other.sendall, args=(b"x" * 100_000,), daemon=True).start()
        with pytest.raises(ValueError, match="a line of more than 65536 bytes"):
            connection.receive(20)
