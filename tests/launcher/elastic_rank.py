"""A rank of an elastic run without torch: steps with its group, regroups, and a line per step.

    elastic_rank.py STEPS [STEP_SECONDS [MISDEED MEMBER AT_STEP]]

The state is a step and a digest chained over all steps: two ranks that made the same steps agree.
A step is a byte of every member to the first one and an answer to each, which also says whether all
are to switch to a newer generation. MISDEED: fail, exit75, broken, fork.
"""

import contextlib
import hashlib
import json
import os
import queue
import signal
import socket
import struct
import sys
import threading
import time
from pathlib import Path

STEPS = int(sys.argv[1])
STEP_SECONDS = float([*sys.argv[2:], "0.02"][0])
MISDEED, CULPRIT, AT_STEP = [*sys.argv[3:], "", "-1", "0"][:3]
LOCAL = int(os.environ["LOCAL_RANK"])
MEMBER = int(os.environ["RACKRUN_FIRST_RANK"]) + LOCAL
FOLDER = os.environ["RACKRUN_RUN_FOLDER"]
HEAD = struct.Struct(">I")


class Lost(Exception):
    """An exchange failed, or was ended because a member was lost."""


class Launcher:
    """The membership socket, and a thread that reads it."""

    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(os.environ["RACKRUN_MEMBERSHIP"])
        self.newest = 0
        self.generations = queue.Queue()
        self.group = None
        threading.Thread(target=self.listen, daemon=True).start()

    def send(self, **message):
        self.socket.send(json.dumps({"local": LOCAL, **message}).encode())

    def offer(self):
        """Listen for the others, if this rank is to lead groups."""
        self.listener = socket.create_server((os.environ["RACKRUN_ADDRESS"], 0), backlog=64)
        self.listener.settimeout(0.02)
        self.send(ready=self.listener.getsockname()[1])

    def listen(self):
        while True:
            data = self.socket.recv(1 << 16)
            message = json.loads(data) if data else {"end": "the agent is gone"}
            if "end" in message:
                sys.stderr.write(f"fenced: {message['end']}\n")
                os._exit(75)
            if message["generation"] > self.newest:
                self.newest = message["generation"]
                self.generations.put(message)
                group = self.group  # it may be that of this message already
                if message["abort"] and group and group.generation < message["generation"]:
                    group.shut()


class Group:
    """The members of a generation, and the connections between them."""

    def __init__(self, launcher, message):
        self.launcher = launcher
        self.generation, self.rank = message["generation"], message["rank"]
        self.members, self.master = message["members"], tuple(message["master"])
        self.peers = []
        self.ended = False
        launcher.group = self

    def shut(self):
        """End what waits in an exchange of this group; of another thread."""
        self.ended = True
        for peer in self.peers:
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def meet(self, step, digest):
        """Connect, and return the furthest state among the members."""
        mine = {"generation": self.generation, "step": step, "digest": digest}
        if self.rank == 0:
            states = [mine]
            while len(states) < len(self.members):
                self.check_newer()
                with contextlib.suppress(TimeoutError, Lost):
                    peer, _ = self.launcher.listener.accept()
                    peer.settimeout(1)
                    hello = receive(peer)
                    if hello["generation"] == self.generation:
                        peer.setblocking(True)
                        self.peers.append(peer)
                        states.append(hello)
            state = max(states, key=lambda one: one["step"])
            for peer in self.peers:
                send(peer, state)
        else:
            state = None
            while state is None:
                self.check_newer()
                try:
                    self.peers = [socket.create_connection(self.master, timeout=1)]
                    self.peers[0].settimeout(None)
                    send(self.peers[0], mine)
                    state = receive(self.peers[0])
                except (OSError, Lost):  # it leads another group yet, or is not there
                    time.sleep(0.02)
        if self.ended:
            raise Lost("ended")
        self.launcher.send(formed=self.generation, step=state["step"], digest=state["digest"])
        return state["step"], state["digest"]

    def check_newer(self):
        if self.ended or self.launcher.newest > self.generation:
            raise Lost("ended")

    def exchange(self):
        """Make a step with the others; return the newest generation that all know of."""
        if self.ended:
            raise Lost("ended")
        if self.rank == 0:
            newest = [self.launcher.newest, *(receive(peer)["newest"] for peer in self.peers)]
            for peer in self.peers:
                send(peer, {"newest": min(newest)})
            return min(newest)
        send(self.peers[0], {"newest": self.launcher.newest})
        return receive(self.peers[0])["newest"]


def send(peer, message):
    data = json.dumps(message).encode()
    try:
        peer.sendall(HEAD.pack(len(data)) + data)
    except OSError as error:
        raise Lost(str(error)) from error


def receive(peer):
    try:
        (length,) = HEAD.unpack(read(peer, HEAD.size))
        return json.loads(read(peer, length))
    except OSError as error:
        raise Lost(str(error)) from error


def read(peer, count):
    data = b""
    while len(data) < count:
        piece = peer.recv(count - len(data))
        if not piece:
            raise Lost("Connection closed by peer")
        data += piece
    return data


def report(**fields):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(os.environ["RACKRUN_REPORTS"])
            sock.send(json.dumps({"rank": MEMBER, **fields}).encode())
        except OSError:
            pass


def note(log, step, digest, group):
    line = {"step": step, "pid": os.getpid(), "generation": group.generation}
    log.write(json.dumps({**line, "digest": digest, "world": len(group.members)}) + "\n")


def misbehave(step):
    if int(CULPRIT) != MEMBER or step != int(AT_STEP):
        return
    if MISDEED == "fail":
        raise ValueError("a mistake of this rank's own")
    if MISDEED == "exit75":
        os._exit(75)
    if MISDEED == "broken":
        raise Lost("Connection reset by peer")
    if MISDEED == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


def main():
    launcher = Launcher()
    launcher.offer()
    step, digest, group = 0, "", None
    log = Path(f"{FOLDER}/steps-{MEMBER}").open("a", buffering=1)  # noqa: SIM115 - to the end
    report(phase="train", step=0, steps=STEPS)
    while step < STEPS:
        try:
            if group is None:
                group = Group(launcher, launcher.generations.get())
                before, (step, digest) = step, group.meet(step, digest)
                if step == before + 1 and before:  # another one had ended this step, this one not
                    note(log, step, digest, group)
                if MISDEED == "fork" and int(CULPRIT) == MEMBER and step > 0:
                    launcher.send(formed=group.generation, step=step, digest="another")
            misbehave(step + 1)
            newest = group.exchange()
            step += 1
            digest = hashlib.sha256(f"{digest} {step}".encode()).hexdigest()
            note(log, step, digest, group)
            report(phase="train", step=step, steps=STEPS, epoch=1)
            if newest > group.generation:
                group.shut()
                group = None
            time.sleep(STEP_SECONDS)
        except Lost as error:
            if group is not None and launcher.newest == group.generation:
                launcher.send(broken=group.generation, error=str(error))
            if group is not None:
                group.shut()
            group = None
    report(phase="done", step=step)
    launcher.send(left=launcher.newest)
    sys.stdout.write(f"done at step {step}\n")


main()
