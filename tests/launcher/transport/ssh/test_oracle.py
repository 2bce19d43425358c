"""The OpenSSH client as the oracle: what it refuses, we refuse; exceptions are listed.

Each case is a known_hosts file and some lines of ssh_config, written down or drawn at random. The
real client and our `Network` read the same files and log in to the same real sshd. `{there}` is the
host as known_hosts names it, `{key}` its Ed25519 key, for which `{authority}` has signed a
certificate, `{rsa}` its RSA key, and `{other}` a foreign key. Certificates of hosts and
RevokedHostKeys are not supported. `{folder}/held` is a key that the agent at `{agent}` holds, and
that is locked in its file; `{folder}/word.pub` is a certificate for the key `{folder}/signed`.
"""

import getpass
import os
import random
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from rackrun.errors import Problem
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from tests.lab.hosts import Lab, Sshd, make_key, wait_for_banner
from tests.lab.waiting import until

SSHD = """\
HostKey {folder}/rsa
Ciphers aes256-ctr
MACs hmac-sha2-512
KexAlgorithms curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256
MaxStartups 200
"""


@dataclass(frozen=True)
class Case:
    """What the two files say."""

    known: str = "{there} {key}\n"
    config: str = ""
    keys: bool = True
    """Whether the user's own key is tried, too."""


def keys(*lines: str) -> Case:
    """Return a case of some lines that say which keys are tried."""
    return Case(config="\n".join(lines), keys=False)


def config(*lines: str, known: str = "{there} {key}\n") -> Case:
    """Return a case of some lines of ssh_config and a known host."""
    return Case(known, "\n".join(lines))


ACCEPTED: dict[str, Case] = {
    "known": Case(),
    "known without the port": Case("{address} {key}\n"),
    "known by a key of another type": Case("{there} {rsa}\n"),
    "known among other names": Case("x,{there},y {key} a comment\n"),
    "known by a pattern": Case("[127.*]:*,!x {key}\n"),
    "known by a hash": Case("{hashed} {key}\n"),
    "lines that make no sense": Case("x\n\n@\n|1|x|y z a\na b c\nx 1024 35 1234\n{there} {key}\n"),
    "an authority at this port, the key at the name": Case(
        "@cert-authority {there} {other}\n{address} {key}\n"
    ),
    "certified by a stranger, and known": Case("@cert-authority {there} {other}\n{there} {key}\n"),
    "HostKeyAlias": config("HostKeyAlias ALIAS", known="alias {key}\n"),
    "StrictHostKeyChecking accept-new": config("StrictHostKeyChecking accept-new", known=""),
    "UserKnownHostsFile with a token": config("UserKnownHostsFile {folder}/known_%h"),
    "HostKeyAlgorithms with the known key's": config("HostKeyAlgorithms ssh-ed25519"),
    "HostKeyAlgorithms with another key's": config(
        "HostKeyAlgorithms rsa-sha2-512", known="{there} {rsa}\n"
    ),
    "Ciphers with the server's": config("Ciphers aes128-ctr,aes256-ctr"),
    "MACs with the server's": config("MACs hmac-sha2-512"),
    "KexAlgorithms, another": config("KexAlgorithms ecdh-sha2-nistp256"),
    "PubkeyAcceptedAlgorithms with the key's": config("PubkeyAcceptedAlgorithms ssh-ed25519"),
    "RequiredRSASize of the key": config("RequiredRSASize 3072", known="{there} {rsa}\n"),
    "options that concern us little": config(
        "ControlMaster auto",
        "Protocol 2",
        "RekeyLimit 1G",
        "SendEnv LANG LC_*",
        "ServerAliveInterval=30",
        "VerifyHostKeyDNS no",
    ),
    "a key of the agent": keys("IdentityAgent {agent}"),
    "a key of the agent, by a variable": keys("IdentityAgent $OUR_AGENT", "IdentityFile /none"),
    "a locked key that the agent holds": keys(
        "IdentityAgent {agent}", "IdentitiesOnly yes", "IdentityFile {folder}/held"
    ),
    "a public key of the agent's": keys(
        "IdentityAgent {agent}", "IdentitiesOnly yes", "IdentityFile {folder}/public.pub"
    ),
    "IdentityFile with a variable": keys("IdentityAgent none", "IdentityFile ${{KEYS}}/user_key"),
    "CertificateFile": keys(
        "IdentityAgent none", "IdentityFile {folder}/signed", "CertificateFile {folder}/word.pub"
    ),
    "CertificateFile for a key of the agent": keys(
        *("IdentityAgent {agent}", "IdentitiesOnly yes", "IdentityFile {folder}/signed.pub"),
        "CertificateFile {folder}/word.pub",
    ),
    "revoked under the name without the port": Case("{there} {key}\n@revoked {address} {key}\n"),
}

REFUSED: dict[str, Case] = {
    "unknown": Case(""),
    "changed": Case("{there} {other}\n"),
    "another key at this port, the right one at the name": config(
        "HostKeyAlgorithms ssh-ed25519", known="{there} {other}\n{address} {key}\n"
    ),
    "known at another port": Case("[{address}]:1 {key}\n"),
    "the key under another type": Case("{there} ecdsa-sha2-nistp256 {blob}\n"),
    "excluded by a pattern": Case("*,!*127.0.0.2* {key}\n"),
    "revoked": Case("{there} {key}\n@revoked * {key}\n"),
    "an authority's key is no host's key": Case("@cert-authority {there} {key}\n"),
    "certified by a stranger": Case("@cert-authority {there} {other}\n"),
    "StrictHostKeyChecking accept-new, changed": config(
        "StrictHostKeyChecking accept-new", known="{there} {other}\n"
    ),
    "UserKnownHostsFile none": config("UserKnownHostsFile none"),
    "HostKeyAlgorithms without the known key's": config("HostKeyAlgorithms rsa-sha2-512"),
    "HostKeyAlgorithms that the server lacks": config("HostKeyAlgorithms ecdsa-sha2-nistp256"),
    "Ciphers that the server lacks": config("Ciphers aes128-ctr"),
    "MACs that the server lacks": config("MACs hmac-sha2-256"),
    "KexAlgorithms that the server lacks": config("KexAlgorithms diffie-hellman-group14-sha256"),
    "PubkeyAcceptedAlgorithms without the key's": config("PubkeyAcceptedAlgorithms rsa-sha2-256"),
    "RequiredRSASize over the key": config("RequiredRSASize 4096", known="{there} {rsa}\n"),
    "IdentitiesOnly with a key that the agent lacks": keys(
        "IdentityAgent {agent}", "IdentitiesOnly yes", "IdentityFile {folder}/none"
    ),
    "a key that only its certificate lets in": keys(
        "IdentityAgent none", "IdentityFile {folder}/signed"
    ),
    "Include of a file that others may write": config("Include {folder}/open"),
}

STRICTER: dict[str, Case] = {  # the client accepts, we refuse
    "certified": Case("@cert-authority {there} {authority}\n"),
    "HostKeyAlgorithms of a certificate by a stranger": config(
        "HostKeyAlgorithms ssh-ed25519-cert-v01@openssh.com"
    ),
    "certified, and another key known": Case("@cert-authority * {authority}\n{there} {other}\n"),
    "another key at this port, the right one at the name, a certificate": Case(
        "{there} {other}\n{address} {key}\n"
    ),
    "StrictHostKeyChecking no, changed": config(
        "StrictHostKeyChecking no", known="{there} {other}\n"
    ),
}


LINES = (
    *("{there} {key}", "{address} {key}", "x,{there},y {key}", "{hashed} {key}", "alias {key}"),
    *("[127.*]:*,!x {key}", "*,!*127.0.0.2* {key}", "[{address}]:1 {key}", "x 1024 35 1234"),
    *("{there} {rsa}", "{address} {rsa}", "{there} {other}", "{address} {other}", "alias {other}"),
    *("@revoked * {key}", "@revoked {there} {other}", "@revoked {address} {rsa}"),
)
OPTIONS = (
    *("HostKeyAlias alias", "StrictHostKeyChecking accept-new", "IdentitiesOnly yes"),
    *("UserKnownHostsFile {folder}/known_%h", "GlobalKnownHostsFile {folder}/known_%h"),
    *("HostKeyAlgorithms ssh-ed25519", "HostKeyAlgorithms rsa-sha2-512,ecdsa-sha2-nistp256"),
    *("Ciphers aes128-ctr,aes256-ctr", "Ciphers aes128-ctr", "MACs hmac-sha2-512"),
    *("KexAlgorithms ecdh-sha2-nistp256", "KexAlgorithms +diffie-hellman-group14-sha256"),
    *("PubkeyAcceptedAlgorithms ssh-ed25519", "PubkeyAcceptedAlgorithms -ssh-ed25519"),
    *("RequiredRSASize 3072", "RequiredRSASize 4096", "IdentityFile {folder}/other"),
    *("Match host 127.0.0.*", "Match host gpu*", "Host 127.*", "Host !127.* *"),
)
NO_CERTIFICATES = "HostKeyAlgorithms -*-cert-v01@openssh.com"
"""As we are stricter than the client about those."""


def random_case(number: int) -> Case:
    """Return some lines of both files in any order."""
    choice = random.Random(number)
    known = choice.sample(LINES, choice.randint(1, 3))
    options = choice.sample(OPTIONS, choice.randint(0, 3))
    return config(*options, "Host *", NO_CERTIFICATES, known="\n".join((*known, "")))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, dict[str, str]]]:
    """Yield one sshd with two host keys and a certificate, and the words that the cases use."""
    folder = tmp_path_factory.mktemp("oracle")
    lab = Lab(folder)
    rsa = ["ssh-keygen", "-q", "-t", "rsa", "-b", "3072", "-N", "", "-f", folder / "rsa"]
    subprocess.run(rsa, check=True)
    host_key = folder / "host-2" / "host_key"
    extra = SSHD.format(folder=folder) + f"HostCertificate {host_key}-cert.pub\n"
    extra += f"TrustedUserCAKeys {make_key(folder / 'signer')}.pub\n"
    remote = lab.start(extra=extra)
    wait_for_banner(remote.address, remote.port)
    certify(remote, make_key(folder / "authority"))
    make_key(folder / "other")
    (folder / "open").touch()
    (folder / "open").chmod(0o666)
    with key_agent(lab) as agent:
        yield lab, vocabulary(folder, remote) | {"agent": str(agent)}
    lab.stop()


@contextmanager
def key_agent(lab: Lab) -> Iterator[Path]:
    """Yield an ssh-agent with two keys: one is authorized, one has a certificate alone."""
    folder, path = lab.folder, lab.folder / "agent"
    held, signed = make_key(folder / "held"), make_key(folder / "signed")
    with (folder / "authorized_keys").open("a") as file:
        file.write(held.with_suffix(".pub").read_text())
    sign = ["ssh-keygen", "-q", "-s", folder / "signer", "-I", "x", "-n", getpass.getuser()]
    subprocess.run([*sign, f"{signed}.pub"], check=True)
    (folder / "signed-cert.pub").rename(folder / "word.pub")
    with subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL) as agent:
        until(path.exists, "the ssh-agent is there", 20)
        variables = {"SSH_AUTH_SOCK": str(path), "OUR_AGENT": str(path), "KEYS": str(folder)}
        subprocess.run(["ssh-add", "-q", held, signed], env=os.environ | variables, check=True)
        lock = ["ssh-keygen", "-q", "-p", "-N", "pass phrase", "-f", held]
        subprocess.run(lock, stdout=subprocess.DEVNULL, check=True)
        held.with_suffix(".pub").rename(folder / "public.pub")
        with pytest.MonkeyPatch.context() as environment:
            for name, value in variables.items():
                environment.setenv(name, value)
            yield path
        agent.terminate()


def certify(host: Sshd, authority: Path) -> None:
    """Sign the host's key, and have sshd read that."""
    sign = ["ssh-keygen", "-q", "-s", authority, "-h", "-I", "x", "-n", host.address]
    subprocess.run([*sign, host.folder / "host_key.pub"], check=True)
    before = host.log.count("Server listening")
    host.process.send_signal(1)
    until(lambda: host.log.count("Server listening") > before, "sshd has read it", 20)


def vocabulary(folder: Path, host: Sshd) -> dict[str, str]:
    keys = {
        name: " ".join((folder / f"{name}.pub").read_text().split()[:2])
        for name in ("rsa", "authority", "other")
    }
    return {
        **keys,
        "folder": str(folder),
        "address": host.address,
        "there": host.known_as,
        "key": host.public_key,
        "blob": host.public_key.split()[1],
        "hashed": hashed(folder / "hashed", host),
    }


def hashed(file: Path, host: Sshd) -> str:
    """Return the host's name as `ssh-keygen -H` hashes it."""
    file.write_text(f"{host.known_as} {host.public_key}\n")
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", file], check=True, capture_output=True)
    return file.read_text().split()[0]


ALL = {**ACCEPTED, **REFUSED, **STRICTER}


@pytest.mark.parametrize("name", ALL)
def test_whom_the_ssh_client_refuses_we_refuse(server, name):
    """SSH-1: known_hosts and ssh_config mean what they mean to the real client, or less."""
    theirs, options, why = verdicts(*server, ALL[name])
    expected = ("refused" if name in REFUSED else "in", "in" if name in ACCEPTED else "refused")
    assert (theirs, options) == expected, why


@pytest.mark.parametrize("number", range(60))
def test_whatever_stands_in_both_files_we_do_as_the_ssh_client_does(server, number):
    """SSH-1: lines of known_hosts and options of ssh_config, drawn at random."""
    theirs, options, why = verdicts(*server, random_case(number))
    assert theirs == options, f"{random_case(number)}\n{why}"


def verdicts(lab: Lab, args: dict[str, str], case: Case) -> tuple[str, str, str]:
    """Return whether OpenSSH's client gets in, whether we do, and what both say."""
    lab.configure(case.config.format(**args))
    if not case.keys:
        known = f"UserKnownHostsFile {lab.known_hosts}\nGlobalKnownHostsFile /dev/null\n"
        lab.config.write_text(known + case.config.format(**args))
    known_hosts = case.known.format(**args).encode("utf-8", "surrogateescape")
    answers = []
    for client in (ssh, ours):  # each may record a key
        for file in (lab.known_hosts, lab.folder / f"known_{args['address']}"):
            file.write_bytes(known_hosts)
        answers.append(client(lab))
    (theirs, message), (options, why) = answers
    return theirs, options, f"ssh: {message}\nours: {why}"


def test_a_key_that_other_accounts_may_read_is_not_used(server):
    """SSH-1: as with the client; the message has the command that closes the file."""
    lab, args = server
    lab.known_hosts.write_text("{there} {key}\n".format(**args))
    lab.configure("")
    for mode, verdict in ((0o640, "refused"), (0o604, "refused"), (0o400, "in")):
        lab.key.chmod(mode)
        (theirs, message), (options, why) = ssh(lab), ours(lab)
        assert (theirs, options) == (verdict, verdict), f"ssh: {message}\nours: {why}"
        assert (f"so it is not used; type: chmod 600 {lab.key}" in why) == (verdict == "refused")
    lab.key.chmod(0o600)


def ssh(lab: Lab) -> tuple[str, str]:
    """Return whether OpenSSH's client gets in, and its messages."""
    host = lab.hosts[0]
    command = ["ssh", "-F", lab.config, "-o", "BatchMode=yes", "-p", str(host.port), host.address]
    output = subprocess.run([*command, "true"], capture_output=True, stdin=subprocess.DEVNULL)
    return "in" if output.returncode == 0 else "refused", output.stderr.decode(errors="replace")


def ours(lab: Lab) -> tuple[str, str]:
    """Return whether our client gets in, and why not: one line for invalid settings."""
    try:
        network = Network(ConnectSettings(config=lab.config))
        network.connect([lab.hosts[0].host])
    except Problem as error:
        assert error.exit_code in (64, 77), str(error)
        assert error.exit_code == 77 or "\n" not in str(error)
        return "refused", str(error)
    network.close()
    return "in", ""
