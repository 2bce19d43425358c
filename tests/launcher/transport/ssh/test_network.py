"""Cables that are pulled, packets that are dropped: real sshd in network namespaces."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm
from tests.launcher.commands.test_run_ssh import (
    SHORT,
    WAIT,
    cheap_hosts,
    result,
    run_folder,
    started,
)
from tests.launcher.lab import BUSY, ROOT
from tests.launcher.netlab import NetLab, port
from tests.waiting import until

Labs = Callable[[int], NetLab]
LEASE_SECONDS = 3.0
BOUND_SECONDS = BUSY * (LEASE_SECONDS + 5.0)


def ranks_left(one: NetLab) -> list[int]:
    """Return the ranks that still sleep."""
    plan = json.loads((run_folder(one) / "plan.json").read_text())
    mark = f"RACKRUN_RUN_ID={plan['run_id']}".encode()
    collected = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                collected.append(int(entry.name))
        except OSError:
            continue
    return collected


def test_hosts_that_call_themselves_127_0_1_1_find_each_other(net: Labs) -> None:
    """Names resolve on the launcher only, and to loopback on the hosts: torchrun meets anyway."""
    one = net(3)
    hosts = one.write_hosts(f"python={warm.interpreter()}")
    script = one.folder / "train.py"
    script.write_text(
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(socket.gethostname(), int(total), os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"
    )
    code, _, err = one.said(str(hosts), "--", str(warm.interpreter()), str(script))
    assert code == 0, err
    for number in range(3):
        log = run_folder(one) / "logs" / f"node{number + 1}" / f"rank-{number}.out"
        assert log.read_text() == f"node{number + 1} 3 eth0\n"


def test_a_pulled_cable_is_named_and_both_sides_end(net: Labs) -> None:
    """A host without its cable: 75 within the lease and 5 s, and the ranks of both sides ended."""
    one = net(3)
    process = one.run_ssh(*SHORT, cheap_hosts(one), *WAIT)
    started(one, 3)
    one.pull_cable(2)
    pulled = time.monotonic()
    _, err = process.communicate(timeout=60)
    took = time.monotonic() - pulled
    until(lambda: not ranks_left(one), "all ranks end", LEASE_SECONDS * BUSY + 10)
    assert process.returncode == 75, err
    assert took < BOUND_SECONDS, err
    assert "node2" in err.splitlines()[-1]
    states = result(one)["hosts"]
    assert states["node1"] == states["node3"] == "clean"
    assert states["node2"] != "clean"


def test_hosts_end_by_themselves_when_the_launcher_is_cut_off(net: Labs) -> None:
    """No byte reaches the launcher and none comes from it: within the lease the hosts are clean."""
    one = net(2)
    process = one.run_ssh(*SHORT, cheap_hosts(one), *WAIT)
    started(one, 2)
    for number in (1, 2):
        one.pull_cable(number)
    pulled = time.monotonic()
    until(lambda: not ranks_left(one), "all ranks end", BOUND_SECONDS)
    _, err = process.communicate(timeout=90)
    assert time.monotonic() - pulled < BOUND_SECONDS
    assert process.returncode == 75, err


@pytest.mark.long
def test_a_link_that_flaps_for_less_than_the_lease_harms_nothing(net: Labs) -> None:
    """Three seconds without a cable are not a lost host: the run ends with 0."""
    one = net(2)
    command = ("--", sys.executable, "-c", "import time; time.sleep(12); print('through')")
    process = one.run_ssh("--lease-seconds", "9", cheap_hosts(one), *command)
    until(lambda: (one.folder / "runs").exists(), "it starts", 30)
    until((run_folder(one) / "plan.json").exists, "it runs", 30)
    until(lambda: len(ranks_left(one)) >= 4, "ranks run", 30)
    one.pull_cable(2)
    time.sleep(3)
    one.plug_cable(2)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert out.count("through") == 1 or out.count("through") == 2


def test_all_hosts_that_cannot_be_reached_are_named_in_time(net: Labs) -> None:
    """A dropped SYN costs 10 s and not 133; beside it no machine, no route, no sshd, and a good
    host that is not blamed: 69 within 15 s."""
    one = net(3)
    one.firewall(2, "-p", "tcp", "--dport", str(port()), "-j", "DROP")
    hosts = Path(cheap_hosts(one))
    hosts.write_text(hosts.read_text() + f"10.77.0.99:{port()}\n10.99.0.1:{port()}\nnode3:9\n")
    began = time.monotonic()
    code, _, err = one.said(str(hosts), "--", "true")
    assert code == 69
    assert time.monotonic() - began < 15 * BUSY
    assert err.removeprefix("error: ").splitlines() == [
        f"node2: no answer from node2 port {port()} within 10 s; is the machine up?",
        f"10.77.0.99: no connection to 10.77.0.99 port {port()}: No route to host",
        f"10.99.0.1: no connection to 10.99.0.1 port {port()}: Network is unreachable",
        "node3:9: node3 port 9 refuses connections; for 9 processes write slots=9 in place of :9",
    ]


def test_a_name_server_that_is_silent_does_not_hold_us_up(net: Labs) -> None:
    """Packets to it are lost: the unknown host is named by our limit of 5 s, before the resolver
    gives up (after 10 s and more, and in other words), with 69.
    """
    one = net(2)
    one.ask(one.hosts[0].address)
    one.firewall(1, "-p", "udp", "--dport", "53", "-j", "DROP")
    hosts = Path(cheap_hosts(one))
    hosts.write_text(hosts.read_text() + "gpu77.example\n")
    code, _, err = one.said(str(hosts), "--", "true")
    assert code == 69
    assert err == "error: gpu77.example: no name server answered for gpu77.example within 5 s\n"


def test_a_master_port_that_is_shut_is_found_before_the_start(net: Labs) -> None:
    """The firewall of the first host lets in ssh only: 78, and which host cannot reach it."""
    one = net(3)
    one.firewall(1, "-s", "10.77.0.12", "-p", "tcp", "-j", "REJECT")
    code, _, err = one.said(cheap_hosts(one), "--", "true")
    assert code == 78
    assert "node2: master: 10.77.0.11 port" in err
    assert "node3" not in err
    assert not (one.folder / "runs").exists()


def test_two_names_of_one_machine_are_found_out(net: Labs) -> None:
    """A name and the address of the same host: 78, found by the machine and not by DNS."""
    one = net(2)
    hosts = one.write_hosts(f"python={one.cheap_python()}")
    hosts.write_text(hosts.read_text() + f"10.77.0.11:{port()} python={one.cheap_python()}\n")
    code, _, err = one.said(str(hosts), "--", "true")
    assert code == 78
    assert "10.77.0.11: machine: is the same machine as node1" in err


@pytest.mark.long
def test_a_detached_run_notices_a_pulled_cable_without_a_launcher(net: Labs) -> None:
    """The controller loses a host in time, both sides end, and attach reports it later."""
    one = net(3)
    home = {"HOME": str(one.folder / "home")}
    code, out, err = one.said(
        "--detach", "--detach-seconds", "0", *SHORT, cheap_hosts(one), *WAIT, env=home
    )
    assert code == 0, err
    run = out.strip()
    until(lambda: any(one.folder.glob("runs/2*/plan.json")), "the controller begins", 20)
    until(lambda: len(ranks_left(one)) >= 9, "all ranks, shims and torchruns run", 60)
    one.pull_cable(2)
    until(lambda: not ranks_left(one), "all ranks end", LEASE_SECONDS * BUSY + 10)
    code, _, err = one.said(run, verb=("attach",), env=home)
    assert code == 75, err
    assert "failed: node2: silent for" in err.splitlines()[-1]
    code, out, err = one.said("--json", run, verb=("status",), env=home)
    assert code == 0, err
    states = {host["name"]: host["state"] for host in json.loads(out)["hosts"]}
    assert states == {"node1": "stopped", "node2": "not reached", "node3": "stopped"}


def test_a_connection_that_is_reset_is_a_lost_host(net: Labs) -> None:
    """A firewall resets the launcher's ssh in mid-run: 75, the host is named, ranks are gone."""
    one = net(2)
    process = one.run_ssh(*SHORT, cheap_hosts(one), *WAIT)
    started(one, 2)
    one.firewall(
        2, "-p", "tcp", "--dport", str(port()), "-j", "REJECT", "--reject-with", "tcp-reset"
    )
    began = time.monotonic()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert time.monotonic() - began < BOUND_SECONDS
    assert "node2" in err.splitlines()[-1]
    until(lambda: not ranks_left(one), "all ranks end", BOUND_SECONDS)


@pytest.mark.long
def test_lost_packets_are_no_lost_host(net: Labs) -> None:
    """One packet in twenty is dropped, both ways: the run goes on and ends with 0."""
    one = net(2)
    loss = ("-m", "statistic", "--mode", "random", "--probability", "0.05", "-j", "DROP")
    one.firewall(1, *loss)
    one.firewall(2, *loss)
    code, _, err = one.said("--hang-seconds", "10", cheap_hosts(one), *ring(one, 20_000, 50))
    assert code == 0, err


RING = ("--", sys.executable, str(Path(__file__).with_name("ring.py")))


def ring(one: NetLab, size: int, steps: int) -> tuple[str, ...]:
    """Return a command whose ranks wait for one another over the network, as training does."""
    return (*RING, ",".join(host.address for host in one.hosts), str(size), str(steps))


@pytest.mark.parametrize("ways", ["both", pytest.param("one", marks=pytest.mark.long)])
def test_a_cut_between_two_workers_is_named_as_a_pair(net: Labs, ways: str) -> None:
    """Packets between two hosts are dropped, ssh is fine: 75 in time, both named, all clean."""
    one = net(3)
    args = (*SHORT, "--hang-seconds", "2", cheap_hosts(one))
    process = one.run_ssh(*args, *ring(one, 1000, 100_000))
    until(lambda: any(one.folder.glob("runs/2*/logs/node1/rank-0.out")), "ranks train", 60)
    one.firewall(2, "-s", one.hosts[2].address, "-j", "DROP")
    if ways == "both":
        one.firewall(3, "-s", one.hosts[1].address, "-j", "DROP")
    cut = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 75, err
    assert time.monotonic() - cut < BUSY * (2.0 + 15.0)
    assert "no rank died, but the network is cut between node2 and node3: " in result(one)["cause"]
    assert "node1" not in result(one)["cause"]
    assert set(result(one)["hosts"].values()) == {"clean"}


def test_ports_that_no_rank_is_given_may_be_shut(net: Labs) -> None:
    """A firewall that drops what lies above the kernel's own ports: a rank that hangs is named."""
    one = net(2)
    for number in (1, 2):
        one.firewall(number, "-p", "tcp", "--dport", "61000:65535", "-j", "DROP")
    stuck = "from tests.launcher.stand_in import report, time; report(phase='train', step=3)"
    args = ("--", sys.executable, "-c", f"{stuck}; time.sleep(999)")
    path = f"PYTHONPATH={ROOT}"
    code, _, err = one.said(*SHORT, "--hang-seconds", "2", "--env", path, cheap_hosts(one), *args)
    assert code == 75, err
    assert "no progress for" in result(one)["cause"]
    assert "network is cut" not in result(one)["cause"]


@pytest.mark.long
def test_a_slow_link_is_no_hang(net: Labs) -> None:
    """A host that sends 200 kbit/s: each step takes long, the run is left alone and ends with 0."""
    one = net(2)
    one.slow_down(2, 200)
    args = (*SHORT, "--hang-seconds", "3", cheap_hosts(one))
    code, _, err = one.said(*args, *ring(one, 20_000, 6))
    assert code == 0, err
    assert result(one)["seconds"] > 6 * 20_000 * 8 / 200_000 * 0.6
