"""A rank as a campaign needs it: steps with its peers, reports, checkpoints, and one misdeed.

    rank.py SECONDS [MISDEED RANK AT_SECONDS]

No torch: rank 0 collects a byte of every peer and answers each, twenty times a second. Who loses
a peer says so as gloo does. A loader worker sleeps beside it.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SECONDS = float(sys.argv[1])
MISDEED, CULPRIT, AT_SECONDS = [*sys.argv[2:], "", "-1", "0"][:3]
FOLDER = os.environ.get("RACKRUN_RUN_FOLDER", ".")
ASKED = []


def report(**fields):
    """Send one report to the agent, as training does."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    ear.send(json.dumps({"rank": RANK, **fields}).encode())
    ear.close()


def save(step):
    """Write a checkpoint that is whole or absent."""
    name = f"{FOLDER}/step-{RANK}"
    with open(f"{name}.partial", "w") as file:
        json.dump({"step": step, "end": True}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{name}.partial", name)


def meet():
    """Return the sockets to all peers (rank 0), or the one to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if RANK == 0:
        listener = socket.create_server(address, backlog=WORLD)
        return [listener.accept()[0] for _ in range(WORLD - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except OSError:
            time.sleep(0.05)


def exchange(peers):
    """Exchange a byte with every peer: one step."""
    if RANK:
        peers[0].sendall(b"x")
    for peer in peers:
        if not peer.recv(1):
            raise ConnectionResetError("Connection closed by peer")
    if RANK == 0:
        for peer in peers:
            peer.sendall(b"x")


def fork_chain():
    """Leave a daemon behind a chain of forks, each in a session of its own."""
    if os.fork():
        return
    for _ in range(3):
        os.setsid()
        if os.fork():
            os._exit(0)
    os.execvp("sleep", ["sleep", "98766"])


def garbage_reports():
    """Send what no report may be: no JSON, too deep, of other types, for other ranks."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    odd = [b"\xff\x00", b"[" * 5000, b"5", b'{"rank": "x"}', b'{"rank": %d, "step": "many"}' % RANK]
    odd += [b'{"rank": %d, "step": 1e999}' % RANK, b'{"rank": 99, "step": 1}', b"{}" * 100]
    for data in odd:
        ear.send(data)


def hang():
    """Compute without end, as a deadlock or an endless loop does."""
    while True:
        time.sleep(1)


MISDEEDS = {
    "exit-7": lambda: os._exit(7),
    "exit-255": lambda: os._exit(255),
    "exit-0": lambda: os._exit(0),
    "raise": lambda: 1 / 0,
    "abort": os.abort,
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill-itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill-group": lambda: os.killpg(0, signal.SIGKILL),
    "stop-itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "fork-chain": fork_chain,
    "reports": garbage_reports,
    "flood": lambda: [sys.stdout.write("x" * 99 + "\n") for _ in range(100_000)],
    "noise": lambda: sys.stdout.buffer.write(os.urandom(1 << 20)),
    "long-line": lambda: sys.stdout.write("x" * (1 << 22)),
    "escapes": lambda: sys.stderr.write("\x1b]0;owned\x07\x1b[2J\n"),
}


def main():
    """Train until the time is over, or until a signal asks to stop."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: ASKED.append(number))
    subprocess.Popen(["sleep", "98765"])
    peers = meet()
    began = time.monotonic()
    report(phase="start", epochs=1, steps=int(SECONDS * 20))
    step, due = 0, MISDEED and int(CULPRIT) == RANK
    while step < SECONDS * 20:
        exchange(peers)
        step += 1
        report(phase="train", step=step, loss=1 / step, epoch=1)
        if step % 5 == 0:
            save(step)
        if ASKED:
            save(step)
            os._exit(128 + ASKED[0])
        if due and time.monotonic() - began >= float(AT_SECONDS):
            due = False
            MISDEEDS[MISDEED]()
        time.sleep(0.05)
    save(step)
    report(phase="done")


main()
