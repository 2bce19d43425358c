"""Refusals of ssh_config: what rackrun cannot keep is refused before a host is contacted."""

from tests.lab.refusal import Refusal


def configured(text: str | bytes, *names: str) -> Refusal:
    """Return a launch with an ssh_config file of this text."""
    return Refusal("./run-ssh --ssh-config mine -H 127.0.0.9 -- true", 64, names, {"mine": text})


ROWS = [
    # The file.
    Refusal("./run-ssh --ssh-config none -H 127.0.0.9 -- true", 64, "none"),
    Refusal("./run-ssh --ssh-config folder -H gpu01 -- true", 64, "folder", {"folder/": ""}),
    Refusal("rackrun check --ssh-config none -H gpu01", 64, "none"),
    Refusal("rackrun ps --ssh-config none -H gpu01", 64, "none"),
    configured(b"Host \xff\xfe\n", "mine:1:", "UTF-8"),
    Refusal("./run-ssh -H gpu01 -- true", 64, "16 files", {"home/.ssh/config": "Include config\n"}),
    configured("Include ~nosuchuser/x\n", "~nosuchuser"),
    # Its lines.
    configured("User a\nUseKeychain yes\n", "mine:2:", "UseKeychain"),
    configured("UseKeychain yes\nIgnoreUnknown UseKeychain\n", "mine:1:", "UseKeychain"),
    configured("User\n", "mine:1:", "User needs a value"),
    configured("User # who?\n", "mine:1:", "User needs a value"),
    configured('User "jo\n', "mine:1:", "quote"),
    configured('Host "a\n', "mine:1:", "quote"),
    configured("ProxyCommand it's\n", "mine:1:", "quote"),
    configured("User jo x\n", "mine:1:", "jo x"),
    configured("Match\n  User x\n", "mine:1:", "Match"),
    configured("Match host\n  User x\n", "mine:1:", "Match host"),
    configured("Match color red\n  User x\n", "mine:1:", "Match color"),
    configured("Match !all\n  User x\n", "mine:1:", "!all"),
    configured("Match all host x\n  User x\n", "mine:1:", "Match all"),
    configured("Match localnetwork 203.0.113.0/24\n", "localnetwork 203.0.113.0/24"),
    # Values.
    configured("Port abc\n", "mine:1:", "Port abc"),
    configured("Port 65536\n", "mine:1:", "Port 65536"),
    configured("ConnectTimeout x\n", "mine:1:", "ConnectTimeout x"),
    configured("IdentitiesOnly maybe\n", "mine:1:", "IdentitiesOnly maybe"),
    configured("PubkeyAuthentication maybe\n", "mine:1:", "PubkeyAuthentication maybe"),
    configured("StrictHostKeyChecking maybe\n", "mine:1:", "StrictHostKeyChecking maybe"),
    configured("AddressFamily inet5\n", "mine:1:", "AddressFamily inet5"),
    configured("CanonicalizeMaxDots x\n", "mine:1:", "CanonicalizeMaxDots x"),
    configured("RequiredRSASize x\n", "mine:1:", "RequiredRSASize x"),
    configured("IdentityFile ~nosuchuser/x\n", "IdentityFile ~nosuchuser/x"),
    configured("IdentityAgent ~nosuchuser/x\n", "IdentityAgent ~nosuchuser/x"),
    configured("CertificateFile ~nosuchuser/x\n", "CertificateFile ~nosuchuser/x"),
    configured("UserKnownHostsFile ~nosuchuser/x\n", "UserKnownHostsFile ~nosuchuser/x"),
    configured("UserKnownHostsFile ${NO_SUCH}/x\n", "UserKnownHostsFile", "${NO_SUCH}"),
    configured("UserKnownHostsFile known_%q\n", "UserKnownHostsFile", "%q"),
    configured('UserKnownHostsFile ""\n', "UserKnownHostsFile"),
    # Gateways.
    configured("ProxyJump ,\n", "ProxyJump"),
    configured("ProxyJump x:y\n", "ProxyJump x:y", "user@host:22"),
    configured("Host 127.*\n ProxyJump b\nHost b\n ProxyJump c\nHost c\n ProxyJump b\n", "circle"),
    # What rackrun does not do, and must not pass over.
    configured("PubkeyAuthentication no\n", "PubkeyAuthentication no"),
    configured("PreferredAuthentications password\n", "PreferredAuthentications password"),
    configured("KnownHostsCommand /bin/echo\n", "KnownHostsCommand"),
    configured("CheckHostIP yes\n", "CheckHostIP"),
    configured("RevokedHostKeys others\n", "RevokedHostKeys"),
    configured("RekeyLimit 1G 1h\n", "RekeyLimit 1G 1h"),
    configured("RekeyLimit 256M\n", "RekeyLimit 256M"),
    configured("Ciphers 3des-cbc\n", "Ciphers 3des-cbc"),
    configured("MACs x\n", "MACs x"),
    configured("KexAlgorithms x\n", "KexAlgorithms x"),
    configured("HostKeyAlgorithms x\n", "HostKeyAlgorithms x"),
]
