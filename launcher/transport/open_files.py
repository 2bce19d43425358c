"""Open files: each connection to a host is one, and most shells allow a program 1,024 of them."""

import resource

from rackrun.errors import UsageError
from rackrun.units import plural

_OWN_FILES = 64  # of the launcher, besides its connections
_PER_HOST = 4  # a ProxyCommand has three pipes
_SPARE_FILES = 1024


def allow_connections(hosts: int) -> None:
    """Raise the soft limit on open files for these hosts; UsageError if it cannot be that high."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, limit = _OWN_FILES + hosts, _SPARE_FILES + _PER_HOST * hosts
    if hard != resource.RLIM_INFINITY:
        if hard < needed:
            raise UsageError(
                f"{plural(hosts, 'host')}: need {needed} open files, and {hard} are allowed here;"
                f" type `ulimit -n {needed}` as root, or fewer hosts with --include"
            )
        limit = min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
