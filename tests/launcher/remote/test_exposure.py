"""What of a run can be reached from outside: its sockets, with and without the firewall."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import warm, warm_server
from tests.lab.hosts import ROOT
from tests.lab.network import NetLab, port
from tests.lab.waiting import until

TRAIN = """\
import os, pathlib, sys, time, torch, torch.distributed as dist
here = pathlib.Path(sys.argv[1])
dist.init_process_group('gloo')
total = torch.ones(1)
dist.all_reduce(total)
(here / os.environ['RANK']).write_text(f"{int(total)} {os.getpid()}")
while not (here / 'go').exists():
    time.sleep(0.05)
dist.destroy_process_group()
os._exit(0)
"""


def recipe(*addresses: str) -> list[list[str]]:
    """Return the lines of the docs, for these hosts and the lab's sshd."""
    text = (ROOT / "docs" / "reference" / "security.md").read_text()
    lines = re.findall(r"^ *(iptables .*)$", text, re.MULTILINE)
    assert len(lines) > 3
    listed = "10.0.0.11,10.0.0.12"
    assert sum(listed in line for line in lines) == 1
    changed = [line.replace(listed, ",".join(addresses)) for line in lines]
    return [shlex.split(line.replace("--dport 22 ", f"--dport {port()} ")) for line in changed]


def within(lab: NetLab, number: int, *command: str) -> str:
    """Return the output of a command on a host."""
    namespace = ("ip", "netns", "exec", lab.names[number - 1])
    return subprocess.run([*namespace, *command], check=True, capture_output=True, text=True).stdout


def listeners(lab: NetLab, number: int) -> dict[str, tuple[str, int]]:
    """Return the listening processes of a host: protocol, address and port."""
    names = {}
    for line in within(lab, number, "ss", "-H", "-t", "-u", "-l", "-n", "-p").splitlines():
        address, _, port = line.split()[4].rpartition(":")
        pid = re.search(r"pid=(\d+)", line)
        assert pid
        command = Path(f"/proc/{pid[1]}/cmdline").read_text()
        rank = (lab.folder / str(number - 1)).read_text().split()[1]
        (who,) = [
            name
            for name, part in PROGRAMS.items()
            if part in command and (pid[1] == rank) == (name == "rank")
        ]
        names[who] = (address, int(port))
    return names


FORKED = Path(warm_server.__file__).name
PROGRAMS = {"sshd": "sshd:", "torchrun": FORKED, "rank": FORKED}


def lets_in(lab: NetLab, number: int, address: str, port: int) -> bool:
    """Return whether a connection from a host to an address is accepted."""
    call = f"import socket; socket.create_connection(({address!r}, {port}), timeout=2).close()"
    namespace = ("ip", "netns", "exec", lab.names[number - 1])
    output = subprocess.run(
        [*namespace, sys.executable, "-c", call], check=False, capture_output=True
    )
    return output.returncode == 0


@pytest.mark.security("NET-1", "NET-2")
def test_what_listens_is_what_the_docs_say_and_a_stranger_meets_the_firewall(net):
    """NET-1, NET-2: real torchrun on hosts with a public address too, behind the docs' recipe: it
    trains; a third host reaches no port of it, and, without the recipe, the store's."""
    lab = net(3)
    for number in (1, 2, 3):
        within(lab, number, "ip", "address", "add", f"203.0.113.{number}/24", "dev", "eth0")
    for number in (1, 2):
        for line in recipe(lab.hosts[0].address, lab.hosts[1].address):
            within(lab, number, *line)
    script = lab.folder / "train.py"
    script.write_text(TRAIN)
    hosts = lab.folder / "hosts.txt"
    python = warm.interpreter()
    hosts.write_text("".join(f"node{n}:{port()} python={python}\n" for n in (1, 2)))
    process = lab.run_ssh(str(hosts), "--", str(python), str(script), str(lab.folder))
    met = [lab.folder / "0", lab.folder / "1"]
    try:
        until(lambda: all(path.exists() and path.read_text() for path in met), "met", 60)
        first, second = listeners(lab, 1), listeners(lab, 2)
        door = first["torchrun"][1]
        ways = [(address, door) for address in (lab.hosts[0].address, "203.0.113.1")]
        assert not any(lets_in(lab, 3, *way) for way in [*ways, first["rank"], second["rank"]])
        assert lets_in(lab, 2, *ways[0])
        assert lets_in(lab, 3, *first["sshd"])
        within(lab, 1, "iptables", "-D", "INPUT", "-j", "rackrun")
        assert all(lets_in(lab, 3, *way) for way in ways)
    finally:
        (lab.folder / "go").touch()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert [path.read_text().split()[0] for path in met] == ["2", "2"]
    assert {who: where for who, (where, _) in first.items()} == {
        "sshd": lab.hosts[0].address,
        "torchrun": "*",
        "rank": lab.hosts[0].address,
    }
    assert {who: where for who, (where, _) in second.items()} == {
        "sshd": lab.hosts[1].address,
        "rank": lab.hosts[1].address,
    }
