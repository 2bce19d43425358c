"""A refusal: a command line that is answered with one line, and changes nothing."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.lab.oracles import last_line, one_line
from tests.lab.run import Content, Result, run, write

UNTOUCHED = (".cache", ".lock", "__pycache__", "home")
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

    files: Mapping[str, Content] = field(default_factory=dict)
    """Name -> content of what the line needs; a name that ends in `/` is a folder."""

    env: Mapping[str, str | None] = field(default_factory=dict)
    stdin: str = ""
    shows: str | tuple[str, ...] = ()
    """Each is in the output before the message."""
    leaves: str = ""
    """A file or folder that stays with what was done so far, for the next try."""

    def __str__(self) -> str:
        names = self.names if isinstance(self.names, str) else " ".join(self.names)
        line = self.line if isinstance(self.line, str) else shlex.join(self.line)
        return f"{line[:80]}: {names[:60]}"

    def check(self, folder: Path) -> Result:
        """Type the line in a folder; AssertionError unless it is refused as this row says."""
        write(folder, self.files)
        before = listing(folder, self.leaves)
        result = run(self.line, folder, env=self.env, stdin=self.stdin)
        assert result.code == self.code, result
        message = last_line(result) if self.shows else one_line(result)
        assert PASSWORD not in message, message
        assert all(name in message for name in words(self.names)), (self.names, message)
        assert all(word in result.said for word in words(self.shows)), (self.shows, result)
        after = listing(folder, self.leaves)
        assert after == before, after ^ before
        return result


def words(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return one word or several as several."""
    return (text,) if isinstance(text, str) else text


def listing(folder: Path, *ignored: str) -> set[tuple[str, int]]:
    """Return name and size of all files below a folder, without what commands may make.

    That is an empty folder for a result as well, and its lock.
    """
    return {
        (f"{path.relative_to(folder)}", path.stat().st_size if path.is_file() else 0)
        for path in folder.rglob("*")
        if not {*path.relative_to(folder).parts} & {*UNTOUCHED, *ignored}
        if not (path.is_dir() and {each.name for each in path.iterdir()} <= {".lock"})
    }
