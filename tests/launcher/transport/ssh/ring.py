"""Ranks that hand some bytes around in a circle, over the address of the host each: no torch."""

import json
import os
import socket
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ADDRESSES = sys.argv[1].split(",")
BYTES, STEPS, PORT = int(sys.argv[2]), int(sys.argv[3]), 40111


def report(**fields):
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    ear.send(json.dumps({"rank": RANK, **fields}).encode())
    ear.close()


def connected(address):
    while True:
        try:
            return socket.create_connection((address, PORT))
        except OSError:
            time.sleep(0.05)


def read(sock, size):
    while size:
        size -= len(sock.recv(min(size, 1 << 16)))


listener = socket.create_server((ADDRESSES[RANK], PORT))
right = connected(ADDRESSES[(RANK + 1) % WORLD])
left, _ = listener.accept()
for step in range(1, STEPS + 1):
    right.sendall(b"x" * BYTES)
    read(left, BYTES)
    report(phase="train", step=step, steps=STEPS)
    if step == 5:
        sys.stdout.write("it goes round\n")
        sys.stdout.flush()
    time.sleep(0.05)
