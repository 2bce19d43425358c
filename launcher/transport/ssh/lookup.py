"""The options of ssh_config for a host, found in the order in which the ssh client looks.

The client reads the files once with the name that was typed. With CanonicalizeHostname, or if any
line is `Match final`, it reads them a second time with the name that it will connect to: blocks
such as `Match canonical`, or `Host 10.0.0.7`, may then apply for the first time. In both passes the
first value of an option counts. paramiko's own lookup always makes a second pass, knows only one of
the two criteria in it, and matches `Host` by the name that was typed.
"""

import fnmatch
import getpass
import ipaddress
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import paramiko
from paramiko.config import SSHConfigDict

from rackrun.errors import UsageError

BETWEEN = "\x1f"  # between the patterns of a Host line, where a comma is a part of one
UNJUDGED = ("localnetwork", "command", "version")
"""Criteria of Match whose truth is not known here."""
PROXIES = ("proxycommand", "proxyjump")

Options = SSHConfigDict
Criterion = Mapping[str, Any]


class ClientConfig(paramiko.SSHConfig):
    """Expanded ssh_config text whose blocks are numbered, as `config.expanded` writes it.

    `block 3` numbers a block, `inside 2` means that it applies only where block 2 does, and
    `target` has the patterns of a Host line.
    """

    _config: list[dict[str, Any]]

    def lookup(self, hostname: str) -> SSHConfigDict:
        """Return the settings for a host: option in lower case -> value."""
        options = SSHConfigDict()
        self._read(options, hostname, hostname, is_second=False)
        target = self._target(hostname, options)
        criteria = [each for block in self._config for each in block.get("matches", ())]
        has_final = any(criterion["type"] == "final" for criterion in criteria)
        if has_final or options.get("canonicalizehostname", "no") != "no":
            options["hostname"] = target
            self._read(options, hostname, target, is_second=True)
        options["hostname"] = target
        if options.get("proxyjump", "").lower() == "none":  # which overrules no ProxyCommand
            del options["proxyjump"]
        proxies = [option for option in options if option in PROXIES]
        for overruled in proxies[1:]:
            del options[overruled]
        return SSHConfigDict(self._expand_variables(options, hostname))  # type: ignore[attr-defined]

    def _target(self, name: str, options: Options) -> str:
        target = _expanded(options.get("hostname", name), name).lower()
        canonicalize = options.get("canonicalizehostname", "no")
        is_direct = not any((options.get(option) or "none") != "none" for option in PROXIES)
        dots = int(options.get("canonicalizemaxdots", 1))
        is_asked = canonicalize == "always" or (canonicalize == "yes" and is_direct)
        if not is_asked or target.count(".") > dots or _is_address(target):
            return target
        domains = options["canonicaldomains"].split()
        return str(self.canonicalize(target, options, domains))

    def _read(self, options: Options, name: str, target: str, is_second: bool) -> None:
        values: dict[str, Any] = options
        reading = _Reading(self, options, name, target, is_second)
        for block in self._config:
            if not reading.enters(block.get("matches", ())):
                continue
            for option, value in block["config"].items():
                if option not in options:  # the first value counts
                    values[option] = value[:] if value is not None else None
                elif option == "identityfile":  # but every key is tried
                    values[option] += [file for file in value if file not in values[option]]


@dataclass
class _Reading:
    """One pass over the text."""

    config: ClientConfig
    options: Options
    name: str
    target: str
    is_second: bool
    applies: dict[str, bool] = field(default_factory=dict)
    """The blocks so far, by number; a block that is resumed is not judged again."""

    def enters(self, criteria: Sequence[Criterion]) -> bool:
        """Return whether the block with these criteria applies."""
        number, result = "", True
        unjudged: list[Criterion] = []
        for criterion in criteria:
            if criterion["type"] == "block":
                number = criterion["param"]
            elif criterion["type"] in UNJUDGED:
                unjudged.append(criterion)
            elif criterion["type"] == "exec":  # not run where the block does not apply anyway
                result = result and self._succeeds(criterion) != criterion["negate"]
            else:
                holds = self._holds(criterion["type"], criterion["param"])
                result = result and holds != criterion["negate"]
        if result and unjudged:
            written = f"Match {unjudged[0]['type']} {unjudged[0]['param']}"
            raise UsageError(
                f"ssh_config: {written}: not looked at here, and {self.name} hangs on it; add"
                " `host PATTERN` to that line, or give --ssh-config another file"
            )
        if number:
            self.applies[number] = result
        return result

    def _holds(self, kind: str, value: str) -> bool:
        if kind == "inside":
            return self.applies.get(value, False)
        if kind in ("canonical", "final"):
            return self.is_second
        if kind == "target":
            return matches(self.target, value.split(BETWEEN))
        if kind == "host":
            written = _expanded(self.options.get("hostname", self.name), self.name)
            return matches(self.target if self.is_second else written, value.lower().split(","))
        if kind == "originalhost":
            return matches(self.name, value.lower().split(","))
        if kind == "tagged":
            return matches(self.options.get("tag", ""), value.split(","))
        if kind == "sessiontype":
            return matches("exec", value.split(","))
        user = getpass.getuser()
        return matches(self.options.get("user", user) if kind == "user" else user, value.split(","))

    def _succeeds(self, criterion: Criterion) -> bool:
        context = (self.options, self.name, "match-exec", criterion["param"])
        command = self.config._tokenize(*context)  # type: ignore[attr-defined]
        shell = os.environ.get("SHELL", "/bin/sh")  # as the client runs it
        nothing = subprocess.DEVNULL
        done = subprocess.run([shell, "-c", command], stdin=nothing, stdout=nothing, check=False)
        return done.returncode == 0


def matches(text: str, patterns: list[str]) -> bool:
    """Return whether text matches a pattern, and none that is negated; brackets are no sets."""
    is_matched = False
    for pattern in patterns:
        plain = pattern.removeprefix("!").replace("[", "[[]")
        if fnmatch.fnmatchcase(text, plain):
            if pattern.startswith("!"):
                return False
            is_matched = True
    return is_matched


def _expanded(hostname: str, name: str) -> str:
    tokens = {"%%": "%", "%h": name}
    return re.sub("%[%h]", lambda token: tokens[token[0]], hostname)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
