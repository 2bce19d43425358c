"""What can go wrong, as a tree; every class carries the exit code it ends the launcher with.

LauncherError                70  an internal error of ours, when nothing below fits
    UsageError               64  options, hosts.txt, an unknown task
    DataRefused              65  a host cannot read the shards
    HostUnreachable          69  no route, no answer, no sshd: at the start
    CannotWrite              74  the run folder
    HostLost                 75  a host went away in mid-run; trying again may help
    AccessRefused            77  host key or authentication refused
    PreflightRefused         78  a check said no; nothing was started

A message says where, what, and the next thing to type. When several hosts fail, one error names
them all, a line each. A rank that fails is no exception: it is a value (see `verdict`).
"""

from __future__ import annotations

from collections.abc import Collection


class LauncherError(Exception):
    """Something a user can act on."""

    exit_code = 70

    def __init__(self, text: str, hosts: Collection[str] = ()) -> None:
        """`hosts` are those without which it would not have happened, by their labels."""
        super().__init__(text)
        self.hosts = frozenset(hosts)


class UsageError(LauncherError):
    """What was typed, or what hosts.txt says, cannot be meant."""

    exit_code = 64


class DataRefused(LauncherError):
    """The shards cannot be served, or cannot be read from a host; nothing was started."""

    exit_code = 65


class HostUnreachable(LauncherError):
    """A host could not be reached before anything was started."""

    exit_code = 69


class CannotWrite(LauncherError):
    """The run folder takes no file."""

    exit_code = 74


class HostLost(LauncherError):
    """The connection to a host broke after the start."""

    exit_code = 75


class AccessRefused(LauncherError):
    """A host's key is not the one we know, or the host does not let us in."""

    exit_code = 77


class PreflightRefused(LauncherError):
    """A host is not fit for the run; nothing was started anywhere."""

    exit_code = 78
