"""The launcher's leaves of the error tree in `rackrun.errors`, with their exit codes.

HostError              70  has the hosts that caused it
├── DataRefused        65  a host cannot read the shards
├── HostUnreachable    69  no route, no answer, no sshd: before the start
├── HostLost           75  a host was lost during the run; trying again may help
├── AccessRefused      77  host key or authentication refused
└── PreflightRefused   78  a check failed; nothing was started

When several hosts fail, one error names them all, a line each. A rank that fails is not an
exception but a value (see `supervision.root_cause`).
"""

from __future__ import annotations

from collections.abc import Collection

from rackrun.errors import Problem


class HostError(Problem):
    """A problem with one or more hosts."""

    def __init__(self, text: str, hosts: Collection[str] = ()) -> None:
        """Store the labels of `hosts`, without which the run could continue."""
        super().__init__(text)
        self.hosts = frozenset(hosts)


class DataRefused(HostError):
    """The shards cannot be read from a host; nothing was started."""

    exit_code = 65


class HostUnreachable(HostError):
    """A host could not be reached before anything was started."""

    exit_code = 69


class HostLost(HostError):
    """The connection to a host broke after the start."""

    exit_code = 75


class AccessRefused(HostError):
    """A host's key differs from the known one, or the host refused the login."""

    exit_code = 77


class PreflightRefused(HostError):
    """A host is not fit for the run; nothing was started anywhere."""

    exit_code = 78
