"""Hosts behind real sshd: who is let in, who is refused, and how bytes travel."""

import contextlib
import getpass
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.errors import AccessRefused, HostUnreachable
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.parallel import each
from rackrun.launcher.transport.ssh import ConnectSettings, Machine, Network, openssh
from tests.lab.hosts import Lab, children, command_line, make_key, sshd_path
from tests.lab.waiting import until

Labs = Callable[[int], Lab]


@pytest.fixture
def network(start_lab: Labs) -> Iterator[Callable[..., Network]]:
    """Yield a Network over the lab's ssh_config, closed at the end."""
    made: list[Network] = []

    def make(lab: Lab, **access: object) -> Network:
        made.append(Network(ConnectSettings(config=lab.config, **access)))
        return made[-1]

    yield make
    for opened in made:
        opened.close()


def output(machine: Machine, *argv: str) -> bytes:
    channel = machine.open(argv)
    pieces = iter(channel.receive, b"")
    everything = b"".join(pieces)
    channel.close()
    return everything


def test_standard_error_never_blocks_and_its_end_is_kept(start_lab, network):
    """A host that fills its standard error is drained; the complaint is the last of it."""
    lab = start_lab(1)
    (machine,) = network(lab).connect([lab.hosts[0].host])
    script = "i=0; while [ $i -lt 60000 ]; do echo a long line of noise that nobody reads $i >&2;"
    channel = machine.open(["sh", "-c", f"{script} i=$((i+1)); done; echo last words >&2; echo ok"])
    assert channel.receive() == b"ok\n"
    assert channel.receive() == b""
    assert channel.complaint().endswith("last words")
    assert len(channel.complaint()) <= 4096
    channel.close()


# -- host keys ----------------------------------------------------------------------------------


def swap_key(lab: Lab) -> None:
    other = make_key(lab.folder / "other").with_suffix(".pub").read_text().split()
    lab.known_hosts.write_text(f"{lab.hosts[0].known_as} {other[0]} {other[1]}\n")


def seen_fingerprint(public: Path) -> str:
    completed = subprocess.run(
        ["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True
    )
    return completed.stdout.split()[1]


def test_a_changed_key_is_refused_with_both_fingerprints_and_the_line_to_type(start_lab, network):
    """SSH-1: the message says what was known, what was shown, and how to forget the old key."""
    lab = start_lab(2)
    swap_key(lab)
    lab.known_hosts.write_text(
        lab.known_hosts.read_text() + f"{lab.hosts[1].known_as} {lab.hosts[1].public_key}\n"
    )
    with pytest.raises(AccessRefused) as caught:
        network(lab, accept_new=True).connect([host.host for host in lab.hosts])
    text = str(caught.value)
    assert seen_fingerprint(lab.folder / "other.pub") in text
    assert seen_fingerprint(lab.hosts[0].folder / "host_key.pub") in text
    assert f"{lab.known_hosts}:1" in text
    command = re.search(r"then type: (ssh-keygen .*)", text)
    assert command
    subprocess.run(command[1], shell=True, check=True, capture_output=True)
    assert lab.hosts[0].known_as not in lab.known_hosts.read_text()


def test_an_unknown_key_is_refused_with_its_fingerprint_and_the_line_to_type(start_lab, network):
    """SSH-1: typing the line that the message offers makes the host known, and nothing else."""
    lab = start_lab(2)
    lab.known_hosts.write_text("")
    with pytest.raises(AccessRefused) as caught:
        network(lab).connect([host.host for host in lab.hosts])
    text = str(caught.value)
    for host in lab.hosts:
        assert seen_fingerprint(host.folder / "host_key.pub") in text
    assert lab.known_hosts.read_text() == ""
    for command in re.findall(r"then type: (echo .*)", text):
        subprocess.run(command, shell=True, check=True)
    assert len(network(lab).connect([host.host for host in lab.hosts])) == 2


@pytest.mark.parametrize(
    "setting", ["", pytest.param("HashKnownHosts yes", marks=pytest.mark.long)]
)
def test_accept_new_records_new_keys_and_only_these(start_lab, network, setting):
    """SSH-1: launches at once write a new host down once; a key that changes later is refused."""
    lab = start_lab(2)
    lab.configure(setting)
    mine = "# mine, without a newline at its end"
    lab.known_hosts.write_text(mine)
    hosts = [host.host for host in lab.hosts]
    launches = [network(lab, accept_new=True) for _ in range(4)]
    assert [len(machines) for machines in each(lambda at: at.connect(hosts), launches)] == [2] * 4
    written = lab.known_hosts.read_text()
    assert written.splitlines()[0] == mine and len(written.splitlines()) == 3
    assert ("127.0.0.2" in written) is not setting.startswith("Hash")
    assert len(network(lab).connect(hosts)) == 2
    swap_key(lab)
    with pytest.raises(AccessRefused, match="CHANGED"):
        network(lab, accept_new=True).connect(hosts)


# -- keys and ssh_config ------------------------------------------------------------------------


@pytest.mark.security("SSH-2")
def test_without_an_accepted_key_one_attempt_is_made_and_no_question_asked(start_lab, network):
    """SSH-2: a wrong key is tried once, the login ends with 77 and says what to type."""
    lab = start_lab(2)
    (lab.folder / "authorized_keys").write_text("")
    began = time.monotonic()
    with pytest.raises(AccessRefused, match="ssh-copy-id") as caught:
        network(lab).connect([host.host for host in lab.hosts])
    assert time.monotonic() - began < 10
    assert caught.value.exit_code == 77
    assert "127.0.0.2" in str(caught.value)
    assert "127.0.0.3" in str(caught.value)
    assert [host.log.count("Failed publickey") for host in lab.hosts] == [1, 1]
    assert "password" not in lab.hosts[0].log.lower().replace("failed password", "")


def test_a_host_that_wants_two_keys_lets_us_in(start_lab, network):
    ours = f"Match user {getpass.getuser()}\n  AuthenticationMethods publickey,publickey\n"
    lab = start_lab(1, extra=ours)
    other = make_key(lab.folder / "other")
    with (lab.folder / "authorized_keys").open("a") as file:
        file.write(Path(f"{other}.pub").read_text())
    lab.configure(f"IdentityFile {lab.key}", f"IdentityFile {other}")
    assert len(network(lab).connect([lab.hosts[0].host])) == 1


@pytest.mark.security("SSH-2")
def test_the_agent_is_not_forwarded(start_lab, network):
    """SSH-2: a host's root does not get our keys, whatever ssh_config says."""
    lab = start_lab(1)
    lab.configure("ForwardAgent yes")
    (machine,) = network(lab).connect([lab.hosts[0].host])
    assert output(machine, "sh", "-c", 'echo "<$SSH_AUTH_SOCK>"') == b"<>\n"


def test_a_command_in_ssh_config_that_never_ends_is_ended_with_its_launch(tmp_path, monkeypatch):
    """A `Match exec` has the time that ssh has, and nothing of it stays."""
    monkeypatch.setattr(openssh, "SECONDS", 0.5)
    pids = tmp_path / "pids"
    config = tmp_path / "config"
    config.write_text(f'Match exec "echo $$ >> {pids}; sleep 999; true"\n')
    with pytest.raises(UsageError, match="ssh -G .* no answer within 0.5 s"):
        Network(ConnectSettings(config=config)).routes_to([Host("a")])
    (pid,) = map(int, pids.read_text().split())
    until(lambda: not command_line(pid), "the command has ended", 10)


def test_a_gateway_that_broke_is_dialled_again(start_lab, network):
    """Through two gateways: the hosts behind them come back at once, over one login at each."""
    lab = start_lab(4)
    outer, inner, *behind = lab.hosts
    lab.configure("Host 127.0.0.4 127.0.0.5", f"  ProxyJump {outer.line},{inner.line}")
    machines = network(lab).connect([host.host for host in behind])
    assert [output(machine, "echo", "hi") for machine in machines] == [b"hi\n"] * 2
    for pid in outer.sessions():
        os.kill(pid, signal.SIGKILL)
    assert each(lambda machine: output(machine, "echo", "hi"), machines) == [b"hi\n"] * 2
    assert outer.log.count("Accepted publickey") == 2
    assert inner.log.count("Accepted publickey") == 2


def test_what_fails_on_the_way_is_a_value_of_each_host(start_lab, network):
    """--check and status go on with the hosts that answer, whatever is wrong with a gateway."""
    lab = start_lab(4)
    good, gateway, *behind = lab.hosts
    swap_key(lab)
    options = [*lab.hosts[:1], *lab.hosts[2:]]
    changed = f"{gateway.known_as} {lab.known_hosts.read_text().split(' ', 1)[1]}"
    lines = [f"{host.known_as} {host.public_key}\n" for host in options]
    lab.known_hosts.write_text("".join([changed, *lines]))
    lab.configure("Host 127.0.0.4 127.0.0.5", f"  ProxyJump {gateway.line}")
    hosts = [good.host, Host("no-such-host.invalid"), *(host.host for host in behind)]
    machine, unknown, *shut = network(lab).try_each(hosts)
    assert isinstance(machine, Machine)
    assert "there is no host named no-such-host.invalid" in str(unknown)
    assert [type(error) for error in shut] == [AccessRefused] * 2
    assert "gateway 127.0.0.3: the host key" in str(shut[0])
    with pytest.raises(AccessRefused) as caught:
        network(lab).connect([host.host for host in behind])
    assert str(caught.value).count("CHANGED") == 1


def test_a_gateway_behind_a_gateway_follows_the_same_policy(start_lab, network):
    """Gateways that ssh_config chains by itself are connected once, and their keys are checked."""
    lab = start_lab(4)
    outer, inner, *behind = lab.hosts
    lab.configure(
        f"Host {inner.address}\n  ProxyJump {outer.line}",
        f"Host 127.0.0.4 127.0.0.5\n  ProxyJump {inner.line}",
    )
    machines = network(lab).connect([host.host for host in behind])
    assert [output(machine, "echo", "hi") for machine in machines] == [b"hi\n"] * 2
    assert outer.log.count("Accepted publickey") == 1
    swap_key(lab)
    lines = [f"{host.known_as} {host.public_key}\n" for host in lab.hosts[1:]]
    lab.known_hosts.write_text(lab.known_hosts.read_text() + "".join(lines))
    with pytest.raises(AccessRefused, match=r"gateway 127\.0\.0\.2: .* CHANGED"):
        network(lab).connect([host.host for host in behind])


def test_a_proxy_command_is_run_and_ended(start_lab, network):
    """ProxyCommand: the connection goes through a program, which does not outlive the network."""
    lab = start_lab(1)
    relay = lab.folder / "relay.py"
    relay.write_text(
        "import socket, sys, threading, os\n"
        "s = socket.create_connection((sys.argv[1], int(sys.argv[2])))\n"
        "def up():\n"
        "    while data := os.read(0, 65536): s.sendall(data)\n"
        "    s.shutdown(socket.SHUT_WR)\n"
        "threading.Thread(target=up, daemon=True).start()\n"
        "while data := s.recv(65536): os.write(1, data)\n"
    )
    lab.configure(f"ProxyCommand {sys.executable} {relay} %h %p")
    made = network(lab)
    (machine,) = made.connect([lab.hosts[0].host])
    assert output(machine, "echo", "hi") == b"hi\n"
    assert machine.address == ""
    relays = [pid for pid in children(os.getpid()) if "relay.py" in command_line(pid)]
    assert len(relays) == 1
    assert os.getsid(relays[0]) == relays[0], "Ctrl-C is not for it"
    made.close()
    assert not Path(f"/proc/{relays[0]}").exists()


def test_a_proxy_command_that_would_ask_is_named_with_what_to_do_before(start_lab, network):
    """It has no terminal, so that nothing waits for an answer after the start."""
    lab = start_lab(1)
    asks = "read -r code </dev/tty || echo 'x@gw: Permission denied (password).'"
    for line, is_named in ((asks, True), ("echo no route", False)):
        lab.configure(f'ProxyCommand sh -c "{line} >&2; exit 255"')
        with pytest.raises(HostUnreachable, match="its ProxyCommand .* ended with") as caught:
            network(lab).connect([lab.hosts[0].host])
        assert ("first with ssh -M" in str(caught.value)) == is_named, caught.value


def test_a_run_goes_through_a_proxy_command(start_lab):
    """The whole launch over a pipe to a host that does not know its own address: `sshd -i`."""
    lab = start_lab(1)
    # Such a host locks by the machine's name, as those of other tests do.
    config = lab.hosts[0].folder / "sshd_config"
    lab.configure(f"ProxyCommand cat | {sshd_path()} -i -f {config} | cat")
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}"))
    code, out, err = lab.result_of("--wait", hosts, "--", "sh", "-c", "echo $SSH_CONNECTION")
    assert code == 0, err
    assert "UNKNOWN 65535 UNKNOWN 65535" in out
    code, out, err = lab.result_of("--check", "--ignore-check", "lock", hosts, "--", "true")
    assert code == 0, out + err


def test_a_rank_that_cannot_start_is_named_and_files_are_many(start_lab):
    """A script with the lines of Windows is named; ranks may open 65,536 files."""
    lab = start_lab(1)
    (lab.folder / "run.sh").write_bytes(b"#!/bin/bash\r\necho here\r\n")
    (lab.folder / "run.sh").chmod(0o755)
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()}"))
    code, out, err = lab.result_of(hosts, "--", "./run.sh")
    assert code == 127 and "its lines end as on Windows: type sed -i" in err, err
    code, out, err = lab.result_of(hosts, "--", "sh", "-c", "ulimit -Sn; ulimit -Hn")
    soft, hard = out.split()[:2]
    assert hard == "unlimited" or int(soft) == min(int(hard), 65536), out


# -- hosts that do not answer -------------------------------------------------------------------


def test_a_host_that_takes_passwords_only_is_not_sent_a_key(start_lab, network):
    """What it accepts is named, and the setting that is missing there: no ssh-copy-id helps."""
    only = "Match all\n  PubkeyAuthentication no\n  PasswordAuthentication yes\n"
    lab = start_lab(1, extra=only)
    with pytest.raises(AccessRefused) as caught:
        network(lab).connect([lab.hosts[0].host])
    message = str(caught.value)
    assert "accepts no keys, only: password; a launch logs in with keys" in message
    assert "set PubkeyAuthentication yes in the sshd_config there" in message
    assert "ssh-copy-id" not in message


def test_a_host_that_has_enough_of_our_keys_is_quoted(start_lab, network):
    """SSH-2: sshd ends the login after MaxAuthTries; that is a refusal, with its message."""
    lab = start_lab(1, extra="MaxAuthTries 2\n")
    keys = [make_key(lab.folder / f"key{number}") for number in range(4)]
    (lab.folder / "authorized_keys").write_text("")
    lab.configure(*(f"IdentityFile {key}" for key in keys))
    with pytest.raises(AccessRefused, match="refused .*Too many .*: IdentitiesOnly yes, Identity"):
        network(lab).connect([lab.hosts[0].host])


HOSTILE_BANNERS = {
    b"\x1b]0;PWNED\x07\x1b[2J\xe2\x80\xae" * 100 + b"\r\n": (HostUnreachable, "Indecipherable"),
    b"SSH-\x1b]0;PWNED\x07-x\r\n": (AccessRefused, "Incompatible version"),
}


@pytest.mark.parametrize("banner", HOSTILE_BANNERS)
def test_what_a_stranger_says_before_any_key_is_shown_and_not_obeyed(start_lab, network, banner):
    """SSH-7: no escape sequence of a banner or version reaches the terminal, nor endless lines."""
    lab = start_lab(0)
    with socket.create_server(("127.0.0.1", 0)) as door:
        greeter = threading.Thread(target=greet, args=(door, banner * 100), daemon=True)
        greeter.start()
        kind, message = HOSTILE_BANNERS[banner]
        with pytest.raises(kind, match=message) as caught:
            network(lab).connect([Host("127.0.0.1", port=door.getsockname()[1])])
        greeter.join()
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 500


def greet(door: socket.socket, banner: bytes) -> None:
    client, _ = door.accept()
    with client, contextlib.suppress(OSError):  # who hung up has heard enough
        client.sendall(banner)
        client.recv(65536)


@pytest.mark.parametrize("weak", ["Ciphers aes128-cbc", "MACs hmac-md5\nCiphers aes128-ctr"])
@pytest.mark.security("SSH-3")
def test_a_server_with_only_weak_algorithms_is_refused(start_lab, network, weak):
    """SSH-3: CBC and MD5 are not negotiated, though the library would offer them."""
    lab = start_lab(1, extra=weak + "\n")
    with pytest.raises(AccessRefused, match="no safe algorithm"):
        network(lab).connect([lab.hosts[0].host])
