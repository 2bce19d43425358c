"""What unknown clients may say at the port where nodes meet, and who answers in node 0's place."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from rackrun.errors import Problem, UsageError
from rackrun.launcher.commands.node_agreement import check_agreement
from rackrun.launcher.commands.settings import NodeOptions
from rackrun.launcher.errors import HostUnreachable
from rackrun.launcher.rendezvous.gather import (
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
from tests.launcher.conftest import HONEST, RUN, SAY, agreed, connected, ends, python


def hello(**changes: Any) -> bytes:
    return json.dumps({"hello": {**HONEST, **changes}}).encode() + b"\n"


STRANGE = [
    b"[" * 60_000 + b"\n",
    b"9" * 5000 + b"\n",
    b"5\n",
    b"\xff\n",
    b"{}\n",
    b"x" * 100_000,
    b'{"hello": 5}\n',
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
    json.dumps({"hello": HONEST, "nonce": "0"}).encode() + b"\n",
]


class Zero:
    """Node 0 of two, in a thread."""

    def __init__(self) -> None:
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
                self.met = gather(this_node, self.port, 60.0, agree, self.lines.append)
            except Problem as error:
                self.error = error

        self.thread = threading.Thread(target=meet)
        self.thread.start()

    def called(self) -> socket.socket:
        return until(lambda: connected(self.port))

    def second(self) -> Rendezvous:
        """Join as the true other node."""
        return join(NodeInfo(1, 2, 1, "n1", ""), "127.0.0.1", self.port, 60.0, str)


@pytest.fixture
def zero() -> Iterator[Zero]:
    node = Zero()
    yield node
    node.thread.join(60)
    assert not node.thread.is_alive()
    for connection in (node.met.connections if node.met else {}).values():
        connection.close()


@pytest.mark.security("NET-4")
def test_no_stranger_ends_or_holds_up_the_roll_call(zero):
    """Nonsense of every kind, 60 who are silent and one who drips: the true node is met at once."""
    enough = threading.Event()
    with contextlib.ExitStack() as callers:
        dripping = callers.enter_context(zero.called())
        callers.callback(enough.set)
        threading.Thread(target=drip, args=(dripping, enough), daemon=True).start()
        for _ in range(60):
            callers.enter_context(zero.called())
        for args in STRANGE:
            with contextlib.suppress(ConnectionError):  # it hangs up on long ones in the middle
                callers.enter_context(zero.called()).sendall(args)
        began = time.monotonic()
        meeting = zero.second()
        assert time.monotonic() - began < 20  # each of the silent ones had been waited for: 5 min
    assert (meeting.agreement.folder, meeting.agreement.names) == (RUN, ("n0", "n1"))
    meeting.connections[0].close()


def drip(stream: socket.socket, enough: threading.Event) -> None:
    """Send a byte now and then, without end."""
    with contextlib.suppress(OSError):
        while not enough.wait(0.2):
            stream.sendall(b"[")


# -- who answers in node 0's place


def answered(words: bytes) -> Rendezvous:
    """Return the rendezvous of a node with such a node 0."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            with listener.accept()[0] as caller, contextlib.suppress(OSError):
                if caller.recv(1 << 16):
                    caller.sendall(words + b"\n")
                    caller.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        this_node = NodeInfo(1, 2, 1, "n1", "")
        try:
            meeting = join(this_node, "127.0.0.1", listener.getsockname()[1], 20.0, str)
        finally:
            thread.join(0.1)
        meeting.connections[0].close()
        thread.join()
        return meeting


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
        answered(json.dumps(args).encode())
    assert caught.value.exit_code == 69
    assert "sent a message that no node of this job sends" in str(caught.value)
    assert "\x1b" not in str(caught.value)


def test_a_refusal_is_shown_as_text():
    """With a valid exit code, on one line, without escape sequences."""
    with pytest.raises(Problem) as caught:
        answered(json.dumps({"refused": "no\x1b]0;x\x07\nno", "code": 64}).encode())
    assert (caught.value.exit_code, str(caught.value)) == (64, "node 0: no␛]0;x␇ no")


SECRET = "Zm9yIG9uZSBydW4gYWxvbg"  # the path of a run's server


@pytest.mark.parametrize(
    ("data", "serve", "fits"),
    [
        ("", {}, True),
        (f"http://10.0.0.1:8080/{SECRET}/", {"serve": True}, True),
        (f"http://10.0.0.1:8080/{SECRET}/@2", {"serve": True}, True),
        (f"http://10.0.0.9:8080/{SECRET}/", {"serve": True, "serve_address": "10.0.0.9"}, True),
        (f"http://10.0.0.1:8080/{SECRET}/", {}, False),
        (f"http://10.0.0.2:8080/{SECRET}/", {"serve": True}, False),
        (f"http://10.0.0.1:8080/{SECRET}/?y", {"serve": True}, False),
        ("http://10.0.0.1:8080/", {"serve": True}, False),
        ("http://10.0.0.1:8080/x/", {"serve": True}, False),
        (f"http://a:b@10.0.0.1:8080/{SECRET}/", {"serve": True}, False),
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
    with pytest.raises(UsageError, match="--ignore-check host-keys: no such check"):
        NodeOptions(ignore_check=("host-keys",))


def test_a_rival_node_0_writes_nothing_outside_of_runs(nodes, tmp_path):
    """End to end: a program that listens at 29500 before the job names no folder of ours."""
    args = json.dumps({"agreed": agreed(folder=str(tmp_path / "OUTSIDE"))}).encode()
    with socket.create_server(("127.0.0.1", nodes.port)) as listener:
        process = nodes.start(1, 2, *python(SAY))
        with listener.accept()[0] as caller:
            caller.recv(1 << 16)
            caller.sendall(args + b"\n")
            ((code, _, err),) = ends([process])
    assert code == 69
    assert "agreed.folder: Expected `str` matching regex" in err and "Traceback" not in err
    assert not (tmp_path / "OUTSIDE").exists()
