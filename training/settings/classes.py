"""Files of class names (--classes), a name per line."""

import re
from pathlib import Path

from rackrun.errors import UsageError

NUMBER = re.compile(r"[0-9]{1,9}", re.ASCII)
MOST_CLASSES = 1_000_000


def named_classes(path: str) -> tuple[str, ...]:
    """Return the classes of a file, a name per line; UsageError for what may mean two things."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--classes {path}: cannot be read: {why}") from None
    names = tuple(line.strip() for line in lines)
    if not names or len(set(names)) < len(names) or not all(map(str.isprintable, names)):
        raise UsageError(f"--classes {path}: each line needs a different name")
    if "" in names or len(names) > MOST_CLASSES:
        raise UsageError(f"--classes {path}: an empty line, or more than {MOST_CLASSES:,}")
    for number, name in enumerate(names):
        if NUMBER.fullmatch(name) and name != str(number):
            raise UsageError(
                f"--classes {path}: is {name} class {number}, in whose line it stands, or class"
                f" {name}? give names that are no numbers"
            )
    return names
