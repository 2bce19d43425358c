"""The user that nginx runs as: one that no other process has, where that can be.

Processes of the same user can read each other's memory and files, and with them TLS keys and
passwords; and what Unix lets two processes of a user do, it lets them do across containers that
share the host's network. So a server of root's, and one in a container, is given a user number that
no other process has; not that of `nobody`, which other daemons use as well.
"""

import grp
import hashlib
import itertools
import os
import pwd
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rackrun.contract.files import MANIFEST_NAME
from rackrun.nginx.site import ServeRefused, Site

NUMBERS = range(61184, 65520)  # for users that come and go (systemd's DynamicUser takes them, too)


@dataclass(frozen=True)
class Account:
    """A user and group number, and a reason where other processes have it, too."""

    uid: int
    gid: int
    why: str = ""


def account_of(site: Site, name: str) -> Account:
    """Return the account that reads the folder of the server of this name; never root."""
    us, ours = os.getuid(), os.getgid()
    if site.native and us:
        return Account(us, ours)  # an ordinary user cannot become another one
    shut = _shut(site)
    if us and (shut or site.secret):
        return Account(us, ours, f"as your own user, because {shut or site.secret}")
    owner = site.folder.stat()
    if shut and owner.st_uid:
        return Account(owner.st_uid, owner.st_gid, f"as the folder's owner, because {shut}")
    number = _free_number(name)
    return Account(number, number)


def _shut(site: Site) -> str:
    """Return why another user of this machine cannot read the shards; empty if one can."""
    if not _others_may(site.folder, stat.S_IROTH | stat.S_IXOTH):
        return f"{site.folder} is closed to others"
    for name in (MANIFEST_NAME, site.shard):
        if not _others_may(site.folder / name, stat.S_IROTH):
            return f"{site.folder / name} is closed to others"
    return ""


def _others_may(path: Path, rights: int) -> bool:
    return path.stat().st_mode & rights == rights


def _free_number(name: str) -> int:
    taken = set[int]()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):  # it has ended meanwhile
                taken.add(path.stat().st_uid)
    first = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4]) % len(NUMBERS)
    for number in itertools.chain(NUMBERS[first:], NUMBERS[:first]):
        in_use = number in taken or _exists(pwd.getpwuid, number) or _exists(grp.getgrgid, number)
        if not in_use:
            return number
    raise ServeRefused(f"no user number from {NUMBERS[0]} to {NUMBERS[-1]} is free here")


def _exists(find: Callable[[int], object], number: int) -> bool:
    try:
        find(number)
    except KeyError:
        return False
    return True
