"""What earlier versions had, and what to type instead.

Until 0.1.0 an option or a command that went is met with one line from here.
"""

from collections.abc import Mapping
from types import MappingProxyType

OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--scaling": "start one run per number of hosts: --hosts-needed N (local: --nproc N)",
    }
)
"""Option as typed -> what to do instead, a sentence without its full stop."""

COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "board": "type attach, or report --watch for a page that is drawn again and again",
    }
)
"""Command as typed, such as `board` or `convert diff` -> what to do instead."""
