"""What --data may be: a folder or URL of shards, several, or tars without an index.

's-{000..127}.tar'    URLs or paths; braces as in a shell
'a.tar::b.tar'        a list
'pipe:COMMAND'        what a command prints; with braces, too, and last in a list
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from rackrun.contract import variables
from rackrun.errors import UsageError
from rackrun.terminal import one_line

PIPE = "pipe:"
WEB = ("http://", "https://")
SEPARATOR = "::"
PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
MOST = 1_000_000
_SEPARATION = re.compile(rf"{SEPARATOR}(?![^\[\]]*\])")  # an IPv6 address in brackets has one, too
_PASSWORD = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://[^/]*@([^/]*)")
_BEFORE_COMMAND = re.compile(rf"{SEPARATOR}(?={PIPE})")


def are_plain_tars(location: str) -> bool:
    """Return whether a location names tars, rather than the folder of a data set."""
    return any(
        part.startswith(PIPE) or (part.endswith((".tar", *PACKED)) and not Path(part).is_dir())
        for part in parts_of(location)
    )


def is_folder(location: str) -> bool:
    """Return whether a location is one folder of this machine, rather than URLs or tars."""
    is_one = len(parts_of(location)) == 1 and "://" not in location
    return is_one and not are_plain_tars(location)


def parts_of(location: str) -> list[str]:
    """Return the entries of a list of tars, braces as they are.

    A command runs to the next one or to the end, as it may have the separator in it.
    """
    tars, *commands = _BEFORE_COMMAND.split(location)
    parts = [tars] if tars.startswith(PIPE) else _SEPARATION.split(tars)
    return [part for part in (*parts, *commands) if part]


def refuse_passwords(location: str) -> None:
    """Raise UsageError for a URL with the name or password of a user, without showing these."""
    for part in parts_of(location):
        if match := _PASSWORD.match(part):
            raise UsageError(
                f"{match[1]}://…@{one_line(match[2])}: passwords in URLs end up in logs; put"
                f" user:password into a file and type: export {variables.CREDENTIALS}=FILE"
            )


def joined(locations: Iterable[str]) -> str:
    """Return a list of these, in their order but for commands, which come last."""
    parts = itertools.chain(*map(parts_of, locations))
    return SEPARATOR.join(sorted(parts, key=lambda part: part.startswith(PIPE)))


def with_joined_data(words: Sequence[str]) -> list[str]:
    """Return the options of a task with one --data where it is given several times.

    A --data without a value is left to the parser, which refuses it.
    """
    others, locations, left = list[str](), list[str](), iter(words)
    for word in left:
        name, is_joined, value = word.partition("=")
        if name != "--data":
            others.append(word)
        elif is_joined:
            locations.append(value)
        else:
            value = next(left, "-")
            if value.startswith("-"):
                return list(words)
            locations.append(value)
    return [*others, f"--data={joined(locations)}"] if len(locations) > 1 else list(words)


def expanded(location: str) -> list[str]:
    """Return the tars that a location names, in order; UsageError for what cannot be read."""
    import braceexpand  # webdataset brings it: hosts that only launch may have neither

    shown = one_line(location)[:80]
    try:
        tars = [
            tar
            for part in parts_of(location)
            for tar in itertools.islice(braceexpand.braceexpand(part), MOST + 1)
        ]
    except ValueError:
        raise UsageError(f"{shown}: type braces as in {{000..127}}") from None
    if len(tars) > MOST:
        raise UsageError(f"{shown}: more than {MOST:,} tars")
    if twice := len(tars) - len(set(tars)):
        raise UsageError(f"{shown}: {twice} of the tars are named twice")
    for tar in tars:
        _check(tar)
    return tars


def _check(tar: str) -> None:
    if tar.startswith(PIPE):
        return
    if tar.endswith(PACKED):
        raise UsageError(f"{one_line(tar)}: compressed; type 'pipe:gzip -dc FILE', or unpack it")
    if "://" in tar and not tar.startswith(WEB):
        raise UsageError(
            f"{one_line(tar)}: tars are read from files and http(s)://; for others, type a command"
            f" that prints one, as in 'pipe:aws s3 cp {one_line(tar)} -'"
        )
