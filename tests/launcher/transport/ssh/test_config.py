"""ssh_config with Include: what we read is what the ssh client reads."""

import getpass
import itertools
import os
import pwd
import re
import subprocess
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from rackrun.launcher.transport.ssh.config import Directives, expanded
from rackrun.launcher.transport.ssh.network import USER_KNOWN_HOSTS

CONFIGS: dict[str, dict[str, str]] = {
    "plain": {"config": "Host a\n  Port 1001\nHost *\n  User all\n"},
    "included first": {
        "config": "Include inc\nHost *\n  Port 1002\n",
        "inc": "Host a\n  Port 1001\n",
    },
    "goes on after the include": {
        "config": "Host a\n  Include inc\n  Port 1001\nHost *\n  Port 1009\n",
        "inc": "Host b\n  Port 1002\nHost *\n  User inner\n",
    },
    "global again after the include": {
        "config": "Include inc\nUser all\n",
        "inc": "Host a\n  Port 1001\n",
    },
    "conditions add up": {
        "config": "Host a* !ab\n  Include inc\nHost *\n  Port 1009\n",
        "inc": "Host *b ac\n  Port 1001\nMatch originalhost a user x\n  Port 1002\n",
    },
    "match around include": {
        "config": 'Match originalhost "a,ab"\n  Include inc\n',
        "inc": "Host a\n  HostName target-%h\n  Port 1001\n",
    },
    "several files, patterns, depth": {
        "config": "Include none one.* two\nHost b\n Port 1003\n",
        "one.1": "Host a\n  Include deep\n",
        "one.2": "Host a ab\n  User second\n",
        "two": "Host *\n  User third\n",
        "deep": "  Port 1004\n  User first\n",
    },
    "equals signs, quotes and case": {
        "config": 'include="inc"\nHOST a\n  PORT=1001\n',
        "inc": 'host "a" b\n  user = "quoted"\n',
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_alias_means_what_it_means_to_ssh(name, tmp_path):
    """Host name, port and user are those of `ssh -G`, wherever the Include stands."""
    for file, text in CONFIGS[name].items():
        absolute = text.replace("Include ", f"Include {tmp_path}/").replace(
            " one.", f" {tmp_path}/one."
        )
        absolute = absolute.replace(" two\n", f" {tmp_path}/two\n").replace(
            '"inc"', f'"{tmp_path}/inc"'
        )
        (tmp_path / file).write_text(absolute)
    network = Network(ConnectSettings(config=tmp_path / "config"))
    for alias in ("a", "b", "ab", "ac"):
        ours = network.settings(alias)
        theirs = ssh_says(tmp_path / "config", alias)
        expected = {key: ours.get(key, theirs["user"] if key == "user" else "22") for key in theirs}
        assert expected == theirs, alias


def ssh_says(config: Path, alias: str) -> dict[str, str]:
    command = ["ssh", "-G", "-F", str(config), alias]
    output = subprocess.run(command, capture_output=True, text=True, check=True)
    pairs = [line.split(" ", 1) for line in output.stdout.splitlines()]
    return {key: value for key, value in pairs if key in ("hostname", "port", "user")}


def test_a_config_of_ones_own_that_others_may_write_is_refused(tmp_path, monkeypatch):
    """~/.ssh/config, as with ssh: who writes there starts commands here, by ProxyCommand."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = tmp_path / ".ssh" / "config"
    config.parent.mkdir()
    config.write_text("Host a\n  Port 1001\n")
    config.chmod(0o664)
    with pytest.raises(UsageError, match="other users may write this file; type: chmod go-w"):
        Network(ConnectSettings())
    config.chmod(0o644)
    assert Network(ConnectSettings()).settings("a")["port"] == "1001"


def test_a_host_is_asked_about_only_where_it_may_be_meant(tmp_path):
    """Blocks for hosts of other names are left out: hundreds of hosts may have hundreds of them."""
    config = tmp_path / "config"
    config.write_text(
        "User all\nHost a b\n  Port 1\nHost c\n  Port 2\nMatch originalhost c exec true\n  Port 3\n"
        "Host c.example.com\n  Port 4\nHost [cd]* !x\n  Port 5\nMatch user y\n  Port 6\n"
    )
    settings = Directives(expanded(config, tmp_path))
    ports = {name: re.findall(r"Port \"(\d)\"", settings.about(name)) for name in "abcd"}
    others = list("356")
    assert ports == {"a": ["1", *others], "b": ["1", *others], "c": ["2", *others], "d": others}
    config.write_text(f"{config.read_text()}Match final all\n  Port 7\n")  # `Host` means HostName
    assert len(re.findall("Port", Directives(expanded(config, tmp_path)).about("a"))) == 7
    assert 'User "all"' in settings.about("a")


BLOCKS = (
    *("Host a", "Host !a *", "Host A", "Host b a", "Host a,b", "Host [a]", "Host 127.0.0.2"),
    *("Host other.example", "Match canonical", "Match final", "Match !canonical", "Match !final"),
    *("Match canonical all", "Match final host 127.*", "Match final originalhost a", "Match all"),
    *("Match host a", "Match host A", "Match host 127.0.0.2", "Match user x", "Match !user x"),
    *("Match final !user x", "Match originalhost a,!b", "Match exec true", "Match exec false"),
    "Match localuser {user} host a",
)
SETTINGS = (
    *("HostKeyAlias alias", "User x\n  Port 7", "HostName 127.0.0.2"),
    *("UserKnownHostsFile /none", "ProxyCommand first", "ProxyJump jump", "ProxyJump none"),
    *("ProxyCommand none", "StrictHostKeyChecking no", "Include {folder}/included"),
)
AROUND = (
    "{block}\n  {setting}\n",
    "User x\n{block}\n  {setting}\nHost *\n  User y\n  HostName 127.0.0.2\n",
    "HostName %%%h\n{block}\n  {setting}\nMatch final host %a\n  Port 9\n",
    "Host a\n  HostName 127.0.0.2\n{block}\n  {setting}\nMatch user none final\n  Port 9\n",
    "CanonicalizeHostname yes\nHost *\n  HostName Other.Example\n{block}\n  {setting}\n",
    "CanonicalizeHostname always\nProxyJump x\n{block}\n  {setting}\n  ProxyCommand late\n",
    "{block}\n  {setting}\n  ProxyCommand second\n  ProxyJump third\nMatch final\n  User z\n",
)
COMPARED = (
    *("hostname", "user", "port", "hostkeyalias", "userknownhostsfile"),
    *("proxycommand", "proxyjump", "stricthostkeychecking"),
)
INCLUDED = "User included\nMatch !user included\n  Port 1\nHost 127.0.0.2\n  HostKeyAlias deep\n"


@pytest.mark.parametrize("is_full", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("around", AROUND)
def test_in_every_situation_the_settings_are_those_of_the_ssh_client(around, is_full, tmp_path):
    """SSH-1: blocks of the second pass, patterns, and which of two proxies counts, as `ssh -G`."""
    config = tmp_path / "config"
    (tmp_path / "included").write_text(INCLUDED)
    (tmp_path / "included").chmod(0o644)
    differences = {}
    situations = list(itertools.product(BLOCKS, SETTINGS))
    rotated = [
        (block, SETTINGS[(at + AROUND.index(around)) % len(SETTINGS)])
        for at, block in enumerate(BLOCKS)
    ]
    for block, setting in situations if is_full else rotated:
        text = around.replace("{block}", block).replace("{setting}", setting)
        text = text.replace("{user}", getpass.getuser()).replace("{folder}", str(tmp_path))
        config.write_text(text)
        ours, theirs = effective(config, "a"), told_by_ssh(config, "a")
        if ours != theirs:
            differences[text] = {
                key: (ours[key], theirs[key]) for key in COMPARED if ours[key] != theirs[key]
            }
    assert not differences


def effective(config: Path, name: str) -> dict[str, str]:
    """Return our settings in the words of `ssh -G`."""
    network = Network(ConnectSettings(config=config))
    (route,) = network.routes_to([Host(name)])
    settings = network.settings(name)
    return {
        "hostname": route.connection.host,
        "user": route.connection.user,
        "port": str(route.connection.port),
        "hostkeyalias": route.key_name if route.key_name != route.connection.host else "",
        "userknownhostsfile": str(settings.get("userknownhostsfile", USER_KNOWN_HOSTS)),
        "proxycommand": route.command,
        "proxyjump": route.gateway.label.removeprefix("gateway ") if route.gateway else "",
        "stricthostkeychecking": str(settings.get("stricthostkeychecking", "ask")),
    }


def told_by_ssh(config: Path, name: str) -> dict[str, str]:
    command = ["ssh", "-G", "-F", str(config), name]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    pairs = dict(line.partition(" ")[::2] for line in printed.splitlines())
    home = pwd.getpwuid(os.getuid()).pw_dir  # the client does not ask $HOME
    values = {key: pairs.get(key, "").replace(home, "~") for key in COMPARED}
    values["stricthostkeychecking"] = values["stricthostkeychecking"].replace("false", "no")
    return {key: "" if value == "none" else value for key, value in values.items()}
