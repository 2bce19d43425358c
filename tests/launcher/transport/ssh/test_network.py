"""Cables that are pulled, packets that are dropped: real sshd in network namespaces."""

import sys
import time
from pathlib import Path

from tests.lab import warm
from tests.lab.hosts import BUSY, ROOT, SHORT
from tests.lab.network import NetLab, port
from tests.lab.waiting import until


def test_hosts_that_call_themselves_127_0_1_1_find_each_other(net):
    """Names resolve on the launcher only, and to loopback on the hosts: torchrun meets anyway."""
    lab = net(3)
    hosts = lab.write_hosts(f"python={warm.interpreter()}")
    script = lab.folder / "train.py"
    script.write_text(
        "import os, socket, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1)\n"
        "dist.all_reduce(total)\n"
        "print(socket.gethostname(), int(total), os.environ['GLOO_SOCKET_IFNAME'], flush=True)\n"
        "dist.destroy_process_group()\n"
        "os._exit(0)\n"
    )
    code, _, err = lab.result_of(str(hosts), "--", str(warm.interpreter()), str(script))
    assert code == 0, err
    for number in range(3):
        log = lab.run_folder() / "logs" / f"node{number + 1}" / "1" / f"rank-{number}.out"
        assert log.read_text() == f"node{number + 1} 3 eth0\n"


def test_all_hosts_that_cannot_be_reached_are_named_in_time(net):
    """A dropped SYN costs 10 s and not 133; beside it no machine, no route, no sshd, and a good
    host that is not blamed: 69 within 15 s."""
    lab = net(3)
    lab.firewall(2, "-p", "tcp", "--dport", str(port()), "-j", "DROP")
    hosts = Path(lab.cheap_hosts())
    hosts.write_text(hosts.read_text() + f"10.77.0.99:{port()}\n10.99.0.1:{port()}\nnode3:9\n")
    began = time.monotonic()
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 69
    assert time.monotonic() - began < 15 * BUSY
    assert err.removeprefix("error: ").splitlines() == [
        f"node2: no answer from node2 port {port()} within 10 s; is the machine up?",
        f"10.77.0.99: no connection to 10.77.0.99 port {port()}: No route to host",
        f"10.99.0.1: no connection to 10.99.0.1 port {port()}: Network is unreachable",
        "node3:9: node3 port 9 refuses connections; for 9 processes write slots=9 in place of :9",
    ]


def test_a_name_server_that_is_silent_does_not_hold_us_up(net):
    """Packets to it are lost: the unknown host is named by our limit of 5 s, before the resolver
    gives up (after 10 s and more, and in other words), with 69.
    """
    lab = net(2)
    lab.ask(lab.hosts[0].address)
    lab.firewall(1, "-p", "udp", "--dport", "53", "-j", "DROP")
    hosts = Path(lab.cheap_hosts())
    hosts.write_text(hosts.read_text() + "gpu77.example\n")
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 69
    assert err == "error: gpu77.example: no name server answered for gpu77.example within 5 s\n"


def test_a_master_port_that_is_shut_is_found_before_the_start(net):
    """The firewall of the first host lets in ssh only: 78, and which host cannot reach it."""
    lab = net(3)
    lab.firewall(1, "-s", "10.77.0.12", "-p", "tcp", "-j", "REJECT")
    code, _, err = lab.result_of(lab.cheap_hosts(), "--", "true")
    assert code == 78
    assert "node2: master: 10.77.0.11 port" in err
    assert "node3" not in err
    assert not (lab.folder / "runs").exists()


RING = ("--", sys.executable, str(Path(__file__).with_name("ring.py")))


def ring(lab: NetLab, size: int, steps: int) -> tuple[str, ...]:
    """Return a command whose ranks wait for one another over the network, as training does."""
    return (*RING, ",".join(host.address for host in lab.hosts), str(size), str(steps))


def test_a_cut_between_two_workers_is_named_as_a_pair(net):
    """Packets between two hosts are dropped, ssh is fine: 75 in time, both named, all clean."""
    lab = net(3)
    args = (*SHORT, "--hang-seconds", "2", lab.cheap_hosts())
    process = lab.run_ssh(*args, *ring(lab, 1000, 100_000))
    until(lambda: any(lab.folder.glob("runs/2*/logs/node1/1/rank-0.out")), "ranks train", 60)
    lab.firewall(2, "-s", lab.hosts[2].address, "-j", "DROP")
    lab.firewall(3, "-s", lab.hosts[1].address, "-j", "DROP")
    cut = time.monotonic()
    _, err = process.communicate(timeout=90)
    assert process.returncode == 75, err
    assert time.monotonic() - cut < BUSY * (2.0 + 15.0)
    assert "no rank died, but the network is cut between node2 and node3: " in lab.result()["cause"]
    assert "node1" not in lab.result()["cause"]
    assert set(lab.result()["hosts"].values()) == {"clean"}


def test_ports_that_no_rank_is_given_may_be_shut(net):
    """A firewall that drops what lies above the kernel's own ports: a rank that hangs is named."""
    lab = net(2)
    for number in (1, 2):
        lab.firewall(number, "-p", "tcp", "--dport", "61000:65535", "-j", "DROP")
    stuck = "import time; from rackrun import report; report(step=3)"
    args = ("--", sys.executable, "-c", f"{stuck}; time.sleep(999)")
    path = f"PYTHONPATH={ROOT}"
    code, _, err = lab.result_of(
        *SHORT, "--hang-seconds", "2", "--env", path, lab.cheap_hosts(), *args
    )
    assert code == 75, err
    assert "no progress for" in lab.result()["cause"]
    assert "network is cut" not in lab.result()["cause"]
