"""A refusal: a command line that is answered with one line, and changes nothing."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.run import Result, run, write

UNTOUCHED = (".cache", "home")
"""What a command may make although it refuses."""

PASSWORD = "hunter2"
"""What rows type for one: no message repeats it."""


@dataclass(frozen=True)
class Refusal:
    """A line that is refused, its exit code, and the words that name the culprit."""

    line: str | list[str]
    code: int
    names: str | tuple[str, ...]
    """Each is in the message: the value typed, the file, the option to type instead."""

    files: Mapping[str, str | bytes] = field(default_factory=dict)
    """Name -> content of what the line needs; a name that ends in `/` is a folder."""

    env: Mapping[str, str | None] = field(default_factory=dict)
    stdin: str = ""

    def __str__(self) -> str:
        names = self.names if isinstance(self.names, str) else " ".join(self.names)
        line = self.line if isinstance(self.line, str) else shlex.join(self.line)
        return f"{line[:80]}: {names[:60]}"

    def check(self, folder: Path) -> Result:
        """Type the line in a folder; AssertionError unless it is refused as this row says."""
        write(folder, self.files)
        before = listing(folder)
        result = run(self.line, folder, env=self.env, stdin=self.stdin)
        names = (self.names,) if isinstance(self.names, str) else self.names
        assert result.code == self.code, result
        message = one_line(result)
        assert PASSWORD not in message, message
        assert all(name in message for name in names), (names, message)
        assert listing(folder) == before, listing(folder) ^ before
        return result


def one_line(result: Result) -> str:
    """Return the one line that a command printed, which says why it ended."""
    assert len(result.lines) == 1, result
    (message,) = result.err.splitlines()
    assert "error: " in message, result
    return message


def listing(folder: Path) -> set[tuple[str, int]]:
    """Return name and size of all files below a folder, without what commands may make."""
    return {
        (f"{path.relative_to(folder)}", path.stat().st_size if path.is_file() else 0)
        for path in folder.rglob("*")
        if not {*path.relative_to(folder).parts} & {*UNTOUCHED}
    }
