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
    Refusal("rackrun rack --ssh-config none -H gpu01", 64, "none"),
    # The client, which reads it.
    Refusal("./run-ssh -H 127.0.0.9 -- true", 78, "openssh-client", env={"PATH": "/nowhere"}),
    # What the ssh client refuses, it refuses in its own words, which differ by its version.
    configured("User a\nUseKeychain yes\n", "line 2", "usekeychain"),
    configured("User\n", "line 1"),
    configured('Host "a\n', "line 1"),
    configured("User jo x\n", "line 1"),
    configured("Match color red\n  User x\n", "color"),
    configured("Port abc\n", "line 1", "abc"),
    configured("IdentitiesOnly maybe\n", "line 1", "maybe"),
    configured("AddressFamily inet5\n", "line 1", "inet5"),
    configured("MACs x\n", "line 1", "x"),
    configured("UserKnownHostsFile ~nosuchuser/x\n", "nosuchuser"),
    configured("UserKnownHostsFile ${NO_SUCH}/x\n", "NO_SUCH"),
    configured("UserKnownHostsFile known_%q\n", "%q"),
    configured("ProxyJump x:y\n", "x:y"),
    configured("ProxyJump 127.0.0.9\n", "127.0.0.9"),
    # What it notices at the login alone.
    configured("IdentityFile ~nosuchuser/x\n", "IdentityFile ~nosuchuser/x"),
    configured("IdentityFile ${NO_SUCH}/x\n", "IdentityFile ${NO_SUCH}/x"),
    configured("CertificateFile ~nosuchuser/x\n", "CertificateFile ~nosuchuser/x"),
    configured("ProxyCommand nc %q %p\n", "ProxyCommand nc", "%q"),
    # Gateways.
    configured("Host 127.*\n ProxyJump b\nHost b\n ProxyJump c\nHost c\n ProxyJump b\n", "circle"),
    # What rackrun does not do, and must not pass over.
    configured("PubkeyAuthentication no\n", "PubkeyAuthentication no"),
    configured("PreferredAuthentications password\n", "PreferredAuthentications password"),
    configured("KnownHostsCommand /bin/echo\n", "KnownHostsCommand"),
    configured("CheckHostIP yes\n", "CheckHostIP"),
    configured("RevokedHostKeys others\n", "RevokedHostKeys"),
    configured("RekeyLimit 1G 1h\n", "RekeyLimit 1073741824 3600"),
    configured("RekeyLimit 256M\n", "RekeyLimit 268435456"),
    configured("Ciphers 3des-cbc\n", "Ciphers 3des-cbc"),
    configured('UserKnownHostsFile "/a b"\n', "b", "spaces"),
]
