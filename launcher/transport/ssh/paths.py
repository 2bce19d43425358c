"""Paths as ssh_config writes them: with `~`, with tokens such as `%h`, with `${VARIABLES}`."""

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path

from rackrun.errors import UsageError

PLACEHOLDER = re.compile(r"%(?P<token>.?)|\$\{(?P<variable>[^}]*)\}", re.DOTALL)


def paths(option: str, value: str, tokens: Mapping[str, str]) -> list[Path]:
    """Return the files that a setting names; raise UsageError for unknown tokens."""
    return [path(option, name, tokens) for name in shlex.split(value)]


def path(option: str, name: str, tokens: Mapping[str, str]) -> Path:
    """Return the file that one word of a setting names; `none` is an empty one."""
    if name.lower() == "none":
        return Path(os.devnull)
    if not name:
        raise UsageError(f"ssh_config: {option} names a file without a name")

    def filled(placeholder: re.Match[str]) -> str:
        variable = placeholder["variable"]
        text = tokens.get(placeholder["token"]) if variable is None else os.environ.get(variable)
        if text is None:
            what = "token" if variable is None else "variable"
            raise UsageError(f"ssh_config: {option} {name}: there is no {what} {placeholder[0]}")
        return text

    return at_home(option, PLACEHOLDER.sub(filled, name))


def at_home(option: str, name: str) -> Path:
    """Return a path with `~` or `~user` replaced; raise UsageError for an unknown user."""
    expanded = os.path.expanduser(name)  # noqa: PTH111 - Path's raises RuntimeError for unknown users
    if expanded.startswith("~"):
        raise UsageError(f"ssh_config: {option} {name}: there is no such user")
    return Path(expanded)
