"""ssh_config files with every `Include` put in place, for a parser that does not know Include.

An included file counts only where its `Include` stands: below `Host a`, what it says about
`Host b` applies to hosts that are both. So it is not enough to paste the text: each block becomes
a `Match` that carries the conditions around it, and after the included file the block in which the
`Include` stood goes on. The ssh client could be asked instead (`ssh -G`), but then the launcher's
machine needs one, and 256 hosts cost 256 processes.

A launch of many hosts asks for each of them, and a file may have a block for each: so `Settings`
leaves out beforehand what stands under other names, or 256 hosts would take seconds to look up.
"""

import re
import shlex
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

from launcher.errors import UsageError

DEEPEST = 16  # as deep as ssh follows

SETTING = re.compile(r"\s*(\w+)(?:\s*=\s*|\s+)(.+?)\s*$")
NAMED = re.compile(r"Match originalhost ([\w.,:-]+)\s")
"""The head of a block for hosts of these names; with other characters, they are patterns."""


class Settings:
    """The expanded text of ssh_config files, block by block."""

    def __init__(self, text: str) -> None:
        """What stands before the first block is for every host."""
        self._blocks: list[tuple[set[str], str]] = []
        for block in re.split(r"^(?=Match |Host )", text, flags=re.MULTILINE):
            named = NAMED.match(block)
            self._blocks.append((set(_askers(named[1])) if named else set(), block))

    def about(self, name: str) -> str:
        """The text without the blocks that are for hosts of other names."""
        return "".join(block for names, block in self._blocks if not names or name in names)


def expanded(path: Path, folder: Path) -> str:
    """The text of an ssh_config file; relative includes are looked for in `folder`."""
    return "".join(f"{line}\n" for line in _lines(path, folder, outer=(), depth=0))


def _lines(path: Path, folder: Path, outer: tuple[str, ...], depth: int) -> Iterator[str]:
    """The lines of one file that stands under the conditions `outer`."""
    if depth > DEEPEST:
        raise UsageError(f"{path}: Include goes more than {DEEPEST} files deep")
    here = outer
    for line in _read(path).splitlines():
        setting = SETTING.match(line)
        keyword = setting[1].lower() if setting else ""
        if setting is None or keyword not in ("host", "match", "include"):
            yield line
        elif keyword == "include":
            for included in _files(setting[2], folder, path):
                yield from _lines(included, folder, here, depth + 1)
            yield _block(here)
        else:
            here = (*outer, _condition(keyword, setting[2], path))
            yield _block(here)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None


def _files(patterns: str, folder: Path, path: Path) -> Iterator[Path]:
    for pattern in _words(patterns, path):
        absolute = folder / Path(pattern).expanduser()
        yield from sorted(Path(absolute.anchor).glob(str(absolute.relative_to(absolute.anchor))))


def _condition(keyword: str, value: str, path: Path) -> str:
    """A block's head as criteria of a Match line; none for one that holds for every host."""
    if keyword == "host":
        patterns = _words(value, path)
        return "" if patterns == ["*"] else f"originalhost {shlex.quote(','.join(patterns))}"
    return "" if value.lower() == "all" else value


def _askers(names: str) -> Iterator[str]:
    """What a host of one of these names may be called: CanonicalizeHostname adds domains."""
    for name in names.split(","):
        yield from accumulate(name.split("."), "{}.{}".format)


def _block(conditions: tuple[str, ...]) -> str:
    criteria = " ".join(filter(None, conditions))
    return f"Match {criteria}" if criteria else "Host *"


def _words(value: str, path: Path) -> list[str]:
    try:
        return shlex.split(value, comments=True)
    except ValueError:
        raise UsageError(f"{path}: a quote is not closed in: {value}") from None
