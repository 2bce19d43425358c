"""Launches that a look at real hosts refuses: one line names the host, and nothing is started."""

import subprocess
from dataclasses import replace

import pytest

from tests.lab.hosts import Lab, make_key
from tests.lab.refusal import Refusal

CONFIG = """\
Host *
  IdentityFile {key}
  IdentityAgent none
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
"""
BOTH = "{first} python={python}\n{second} python={python}\n"


def look(words: str, code: int, *names: str, **files: str) -> Refusal:
    """Return a look at two hosts; `hosts`, `key` and `known` are in place of good ones.

    `config` is read before the rest of ssh_config.
    """
    config = files.get("config", "") + CONFIG.replace("{key}", files.get("key", "{key}"))
    others = {"hosts.txt": files.get("hosts", BOTH), "known_hosts": files.get("known", "{known}")}
    line = f"./run-ssh --ssh-config ssh_config --dry-run {words}"
    return Refusal(line, code, names, {"ssh_config": config, **others})


def host(line: str, code: int, *names: str) -> Refusal:
    """Return a look at two hosts, the first of which has this line in hosts.txt."""
    return look("hosts.txt -- true", code, *names, hosts=f"{line}\n{{second}} python={{python}}\n")


def login(code: int, *names: str, options: str = "", **files: str) -> Refusal:
    """Return a look at the first host, with another key or known_hosts file than good ones."""
    return look(f"{options} hosts.txt -- true", code, *names, hosts="{first}\n", **files)


# fmt: off
ROWS = [
    # A host as hosts.txt has it, which is not there, or not so.
    host("{first} python={python} interface=eth9", 78, "127.0.0.2", "eth9"),
    host("{first} python={python} address=203.0.113.7", 78, "127.0.0.2", "203.0.113.7"),
    host("{first} python={python} workdir=/data/nothere", 78, "/data/nothere", "workdir="),
    host("{first} python=/opt/none/python", 78, "127.0.0.2", "/opt/none/python"),
    host("{first} python={bare}", 78, "{bare}", "--sync"),
    host("127.0.0.1:4", 69, "127.0.0.1", "slots=4"),
    host("127.0.0.1:1023", 69, "127.0.0.1", "slots=1023"),
    host("nowhere.invalid", 69, "nowhere.invalid"),
    # The login.
    login(77, "127.0.0.2", "ssh-keygen -t ed25519", key="{folder}/none"),
    login(77, "127.0.0.2", "ssh-copy-id -p", key="{stranger}"),
    login(77, "{locked}", "ssh-add", key="{locked}"),
    # The host's key.
    login(77, "127.0.0.2", "SHA256:", "--accept-new", known=""),
    login(77, "127.0.0.2", "CHANGED", "ssh-keygen", known="{swapped}"),
    login(77, "127.0.0.2", "CHANGED", "ssh-keygen", known="{swapped}", options="--accept-new"),
    login(77, "CHANGED", "ssh-keygen", known="{another type}", options="--accept-new"),
    login(77, "@cert-authority ({folder}/known_hosts:1)", "then type: echo", known="{authority}"),
    login(77, "is not known", config="UserKnownHostsFile none\n", options="--accept-new"),
    login(77, "cannot be recorded in {key}/known", config="UserKnownHostsFile {key}/known\n",
          options="--accept-new"),
    # The way there.
    login(69, "127.0.0.2", config="AddressFamily inet6\n"),
    login(69, "ended with 3: no way to 127.0.0.2",
          config="ProxyCommand sh -c 'echo no way to %h >&2; exit 3'\n"),
    login(69, "127.0.0.2", "x" * 30, config=f"HostName {'x' * 64}\n"),
    look("hosts.txt -- true", 69, "gateway 127.0.0.2", "127.0.0.9", hosts="127.0.0.9:9999\n",
         config="Host 127.0.0.9\n  ProxyJump {first}\n"),
    # What is to run there.
    look("--image no/such:image hosts.txt -- true", 78, "127.0.0.2, 127.0.0.3: image"),
    look("hosts.txt catdog --data nodata", 65, "127.0.0.2, 127.0.0.3", "nodata", "convert --help"),
    look("--min-hosts 1 --max-restarts 1 hosts.txt imagenet --data /nowhere", 64,
         "--min-hosts 1", "--exact-epochs"),
    look("--detach --detach-seconds 5 hosts.txt catdog --synthetic", 64, "--detach-seconds 5"),
]
# fmt: on


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    hosts = Lab(tmp_path_factory.mktemp("lab")).ready(2)
    yield hosts
    hosts.stop()


@pytest.fixture
def words(lab, tmp_path):
    first, second = lab.hosts
    stranger, locked = make_key(tmp_path / "stranger"), tmp_path / "locked"
    subprocess.run(["ssh-keygen", "-qt", "ed25519", "-N", "word", "-f", locked], check=True)
    ecdsa = tmp_path / "ecdsa"
    subprocess.run(["ssh-keygen", "-qt", "ecdsa", "-N", "", "-f", ecdsa], check=True)
    return {
        "first": first.line,
        "second": second.line,
        "python": lab.cheap_python(),
        "bare": lab.cheap_python(torch="", name="bare"),
        "known": lab.known_hosts.read_text(),
        "swapped": f"{first.known_as} {second.public_key}\n{second.known_as} {second.public_key}\n",
        "another type": f"{first.known_as} {ecdsa.with_suffix('.pub').read_text()}",
        "authority": f"@cert-authority {first.known_as} {second.public_key}\n",
        "key": lab.key,
        "stranger": stranger,
        "locked": locked,
        "folder": tmp_path,
    }


@pytest.mark.parametrize("refusal", ROWS, ids=str)
def test_what_a_look_at_the_hosts_finds_wrong_is_one_line_that_names_it(refusal, words, tmp_path):
    files = {name: text.format(**words) for name, text in refusal.files.items()}
    names = tuple(name.format(**words) for name in refusal.names)
    replace(refusal, files=files, names=names).check(tmp_path)
