"""Any text in SSH's files gives a value or a refusal."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.targets_ssh import (
    fuzz_hosts_txt,
    fuzz_known_hosts,
    fuzz_selection,
    fuzz_ssh_config,
)

KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIKRYFGEpbCHDUGg1LpqD3sEWEA6+lqkqgJ4kmpfHRJ5h"
MARKS = [" ", "\t", "\n", "\r", "\f", "\0", "\u2028", "\x85", "é", '"', "'", "\\", "=", ",", ":"]
MARKS += [
    "#",
    "|",
    "*",
    "?",
    "!",
    "[",
    "]",
    "@",
    "-",
    "/",
    "~",
    "%",
    "%h",
    "${HOME}",
    "${",
    "0",
    "22",
]


def texts(words: Sequence[str]) -> st.SearchStrategy[bytes]:
    """Draw bytes of keywords, of punctuation, and of anything."""
    some = st.sampled_from([text.encode() for text in [*words, *MARKS]])
    return st.lists(some | st.binary(max_size=6), max_size=30).map(b"".join)


HOST_WORDS = ["gpu01", "gpu[01-16]", "jo@", "10.0.0.7", "[2001:db8::7]", "slots=", "env=A=b"]
HOST_WORDS += ["address=", "interface=eth0", "workdir=", "python=", "999999999999", "[1,4-7]"]
KNOWN_WORDS = [
    "gpu01",
    "[10.0.0.7]:2222",
    KEY,
    "@revoked ",
    "@cert-authority ",
    "|1|",
    "ssh-ed25519",
]
KNOWN_WORDS += ["|1|F1E1KeoE/eEWhi10WpGv4OdiO6Y=|3988QV0VE8wmZL7suNrYQLITLCg= "]
KEYWORDS = (
    *("HostName", "User", "Port", "IdentityFile", "IdentityAgent", "CertificateFile", "ProxyJump"),
    *("ProxyCommand", "UserKnownHostsFile", "GlobalKnownHostsFile", "HostKeyAlias", "Ciphers"),
    *("MACs", "KexAlgorithms", "HostKeyAlgorithms", "RekeyLimit", "AddressFamily", "CheckHostIP"),
    *("StrictHostKeyChecking", "RequiredRSASize", "RevokedHostKeys", "PubkeyAuthentication"),
)
CONFIG_WORDS = [f"\n{keyword} " for keyword in (*KEYWORDS, "Match", "Host", "Include")]
CONFIG_WORDS += [
    "\nUserKnownHostsFile ",
    "\nProxyJump ",
    "\nCiphers ",
    "\nIgnoreUnknown ",
    "yes",
    "no",
]
CONFIG_WORDS += [
    "gpu01",
    "user",
    "originalhost",
    "canonical",
    "all",
    "final",
    "none",
    "aes256-ctr",
    "^",
]


@given(texts(HOST_WORDS))
def test_any_host_file_is_hosts_or_a_refusal(data):
    """SSH-5: each accepted name is one that no command line misreads."""
    fuzz_hosts_txt(data)
    fuzz_selection(data)


@given(texts(KNOWN_WORDS))
def test_any_known_hosts_file_is_read(data):
    """Lines that make no sense are passed over."""
    fuzz_known_hosts(data)


@given(texts(CONFIG_WORDS))
def test_any_ssh_config_is_followed_or_refused(data):
    """Quotes, patterns, numbers, tokens, circles of gateways: ways to hosts, or UsageError."""
    fuzz_ssh_config(data)


@given(
    st.sampled_from(KEYWORDS),
    texts(CONFIG_WORDS).map(lambda text: text.replace(b"\n", b"")),
)
def test_any_value_of_any_option_is_followed_or_refused(keyword, value):
    """Each option by itself, with a random value."""
    fuzz_ssh_config(keyword.encode() + b" " + value)
