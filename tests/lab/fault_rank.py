"""A rank that faults happen to: steps with its peers, reports, checkpoints, and one misdeed.

    rank.py SECONDS [MISDEED RANK AT_SECONDS]

No torch: rank 0 collects a byte of every peer and answers each, twenty times a second. Who loses
a peer says so as gloo does. A loader worker sleeps beside it, and a daemon that neither parent,
session nor variables betray.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
SECONDS = float(sys.argv[1])
MISDEED, CULPRIT, AT_SECONDS = [*sys.argv[2:], "", "-1", "0"][:3]
FOLDER = os.environ.get("RACKRUN_RUN_FOLDER", ".")
ASKED, PEERS = [], []


def report(**fields):
    """Send one report to the agent, as training does."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    ear.send(json.dumps({"rank": RANK, **fields}).encode())
    ear.close()


def say(text):
    """Print a line."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def save(step, asked=0):
    """Write a checkpoint that is whole or absent."""
    name = f"{FOLDER}/step-{RANK}"
    with open(f"{name}.partial", "w") as file:
        json.dump({"step": step, "asked": asked, "end": True}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{name}.partial", name)


def meet():
    """Return the sockets to all peers (rank 0), or the one to rank 0."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if WORLD == 1:
        return []
    if RANK == 0:
        listener = socket.create_server(address, backlog=WORLD)
        return [listener.accept()[0] for _ in range(WORLD - 1)]
    while True:
        try:
            return [socket.create_connection(address)]
        except OSError:
            time.sleep(0.05)


def exchange(peers):
    """Take one step with all peers; a stubborn rank outlives them."""
    try:
        send_and_receive(peers)
    except OSError:
        if "stubborn" in MISDEED:
            time.sleep(999)
        raise


def send_and_receive(peers):
    """Exchange a byte with every peer."""
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
    if child := os.fork():
        os.waitpid(child, 0)
        return
    for _ in range(3):
        os.setsid()
        if os.fork():
            os._exit(0)
    os.execve("/bin/sleep", ["sleep", "98766"], {})


def linger():
    """Die slowly of an exception with a long message, while peers have lost the connection."""
    try:
        raise ValueError("x" * 200_000 + "\n" + "the end" * 30_000)
    except ValueError:
        traceback.print_exc()
    for peer in PEERS:
        peer.close()
    time.sleep(999)


def outgrow(number, frame):
    """Need 300 MB."""
    bytes(300 << 20).replace(b"\0", b"x")


def refuse():
    """Say why, and end with the code for it."""
    sys.stderr.write("error: no such shard\n")
    sys.stderr.flush()
    os._exit(65)


def garbage_reports():
    """Send what no report may be: no JSON, too deep, of other types, for other ranks."""
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    odd = [b"\xff\x00", b"[" * 5000, b"5", b'{"rank": "x"}', b'{"rank": %d, "step": "many"}' % RANK]
    odd += [b'{"rank": %d, "step": 1e999}' % RANK, b'{"rank": 99, "step": 1}', b"{}" * 100]
    for data in odd:
        ear.send(data)


def raise_after_another():
    """Raise while another exception is handled: the log has two tracebacks, and the last counts."""
    try:
        raise KeyError("batch")
    except KeyError:
        divmod(1, 0)


def hang():
    """Compute without end, as a deadlock or an endless loop does."""
    while True:
        time.sleep(1)


MISDEEDS = {
    "exit-7": lambda: os._exit(7),
    "exit-65": refuse,
    "exit-9-of-stubborn": lambda: os._exit(9),
    "exit-255": lambda: os._exit(255),
    "exit-0": lambda: os._exit(0),
    "raise": raise_after_another,
    "abort": os.abort,
    "segv": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "kill-itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "kill-group": lambda: os.killpg(0, signal.SIGKILL),
    "stop-itself": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": hang,
    "linger": linger,
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
    signal.signal(signal.SIGUSR1, outgrow)
    if "stubborn" in MISDEED:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "98765"])
    fork_chain()
    peers = PEERS[:] = meet()
    began = time.monotonic()
    report(phase="start", epochs=1, steps=int(SECONDS * 20))
    step, due = 0, MISDEED and int(CULPRIT) == RANK
    while step < SECONDS * 20:
        exchange(peers)
        step += 1
        report(phase="train", step=step, loss=1 / step, epoch=1)
        if step % 5 == 0:
            save(step)
        if step % 20 == 0:
            say(f"step {step}")
        if ASKED:
            save(step, ASKED[0])
            os._exit(128 + ASKED[0])
        if due and time.monotonic() - began >= float(AT_SECONDS):
            due = False
            MISDEEDS[MISDEED]()
        time.sleep(0.05)
    save(step)
    report(phase="done")
    say("all steps are done")


main()
