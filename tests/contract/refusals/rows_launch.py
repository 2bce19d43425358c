"""Refusals of launches: hosts files, options of the launcher, the task's name."""

from tests.lab.refusal import Refusal

HOSTS = {"hosts.txt": "gpu01\ngpu02\n"}
ROWS = [
    Refusal("./run-ssh none.txt", 64, "none.txt"),
    Refusal("./run-ssh mine.txt -- true", 64, "mine.txt:1:7", {"mine.txt": "gpu01 slot=4\n"}),
    Refusal("./run-ssh --nproc 2 hosts.txt", 64, "--nproc", HOSTS),
    Refusal("rackrun local catdog --epochs 0", 64, "--epochs 0"),
]
