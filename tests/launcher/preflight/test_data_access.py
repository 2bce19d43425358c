"""Launches that are refused: changed keys, full hosts, taken ports, planted files."""

import pwd
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.lab.hosts import Sshd
from tests.lab.needs import need
from tests.lab.network import port
from tests.lab.waiting import until


@pytest.mark.security("SSH-1")
def test_a_name_that_leads_to_another_machine_is_refused(net, tmp_path):
    """SSH-1: also where a false name server (here: /etc/hosts) leads to another known host."""
    lab = net(2)
    lies = lab.etc[0] / "hosts"
    lies.write_text(lies.read_text().replace("10.77.0.11 node1", "10.77.0.12 node1"))
    sentinel = tmp_path / "it-ran"
    code, _, err = lab.result_of(lab.cheap_hosts(), "--", "touch", str(sentinel))
    assert code == 77
    assert f"node1: the host key of node1 port {port()} has CHANGED" in err
    assert "node2" not in err
    assert not sentinel.exists()


def comes_in(host: Sshd) -> socket.socket:
    """Connect without logging in, once sshd has seen the previous connection close."""
    while True:
        somebody = socket.create_connection((host.address, host.port))
        if somebody.recv(4) == b"SSH-":
            return somebody
        somebody.close()
        time.sleep(0.05)


@pytest.mark.parametrize("free_again", [True, False])
def test_a_host_that_takes_no_more_logins_is_asked_twice(start_lab, free_again):
    """MaxStartups 1, and a login in progress: one more attempt, then it is named, with 69."""
    lab = start_lab(1, extra="MaxStartups 1\n")
    (crowded,), hosts = lab.hosts, lab.cheap_hosts()
    with comes_in(crowded) as somebody:
        dropped = "past MaxStartups"
        before = crowded.log.count(dropped)
        process = lab.run_ssh(hosts, "--", "true")
        until(lambda: crowded.log.count(dropped) > before, "we are turned away", 20)
        if free_again:
            somebody.close()
        _, err = process.communicate(timeout=60)
    assert crowded.log.count(dropped) - before == (1 if free_again else 2)
    assert process.returncode == (0 if free_again else 69), err
    if not free_again:
        assert f"port {crowded.port} did not speak SSH before it hung up" in err


# -- planted by another account where a run will be ----------------------------------------------

SOMEBODY = 65534


@pytest.mark.security("PROC-3")
def test_what_another_account_plants_in_place_of_the_lock_does_no_harm(start_lab, tmp_path):
    """PROC-3: it is refused and named with its owner; the target of a link is untouched."""
    need("root")
    lab = start_lab(1)
    target = tmp_path / "target"
    target.write_text("mine")
    host = lab.hosts[0]
    lock = Path(f"/tmp/rackrun-{host.address}-{host.port}.lock")
    for command in (("ln", "-s", str(target)), ("mkfifo",), ("mkdir",)):
        plant = {"user": SOMEBODY, "group": SOMEBODY, "extra_groups": []}
        subprocess.run([*command, lock], check=True, **plant)
        try:
            code, _, err = lab.result_of(lab.cheap_hosts(), "--", "true")
            assert code == 78, err
            (line,) = [line for line in err.splitlines() if "cannot be locked" in line]
            assert f"{lock} of {pwd.getpwuid(SOMEBODY).pw_name} cannot be locked: " in line
            assert target.read_text() == "mine"
            assert lock.lstat().st_uid == SOMEBODY
        finally:
            subprocess.run(["rm", "-rf", lock], check=True)
