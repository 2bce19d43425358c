"""Classes as people write them: in members of tars that other programs made, and in files of names.

A class is a number from 0, or a name.
"""

import re
from pathlib import Path

from rackrun.errors import DataError, UsageError
from rackrun.shapes import Misshapen, parsed_json
from rackrun.terminal import clean

LABELS = (".cls", ".json", ".txt")  # the first of them that a sample has
MOST_LABEL_BYTES = 1 << 20
LABEL_FIELD = "label"  # of a .json, where no other one is typed
MOST_CLASSES = 1_000_000
MOST_CHARACTERS = 200  # of a name: what is longer is a caption
WHOLE_NUMBER = re.compile(r"[0-9]+(?:\.0*)?")


def is_class_name(text: str) -> bool:
    """Return True for text that can be shown as the name of a class."""
    return 0 < len(text) <= MOST_CHARACTERS and text.isprintable()


def label_in(suffix: str, data: bytes, name: str, where: str) -> str:
    """Return the class in a member with one of LABELS as its suffix: a number or a name, as text.

    `name` is the field of a .json that holds it. DataError for anything that is no class.
    """
    value: object
    if suffix == ".json":
        try:
            fields = parsed_json(data, MOST_LABEL_BYTES)
        except Misshapen as error:
            raise DataError(clean(f"{where}: {error}")) from None
        if not isinstance(fields, dict) or name not in fields:
            has = ", ".join(sorted(map(str, fields))[:9]) if isinstance(fields, dict) else ""
            raise DataError(
                clean(f"{where}: no field {name!r} in it ({has or 'no fields'}); add ")
                + "--label-field NAME"
            )
        value = fields[name]
    else:
        try:
            value = data.decode().strip()
        except UnicodeDecodeError:
            raise DataError(f"{where}: not text, so not a class") from None
    text = str(value)
    is_text = isinstance(value, str) and is_class_name(text) and not text.lstrip("-").isdecimal()
    if number_in(text) is None and not is_text:
        raise DataError(clean(f"{where}: {text[:60]!r} is not a class: a number from 0, or a name"))
    return text


def number_in(label: str) -> int | None:
    """Return the number that a label is, also with .0, as pandas writes it; None for a name."""
    if len(label) < 20 and WHOLE_NUMBER.fullmatch(label):  # 20 digits are more than any class has
        number = int(label.partition(".")[0])
        return number if number < MOST_CLASSES else None
    return None


def lines_of(path: Path) -> tuple[str, ...]:
    """Return the lines of a file of names; UsageError if it cannot be read."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--classes {path}: cannot be read: {why}") from None
    return tuple(line.strip() for line in lines)


def named_classes(path: Path) -> tuple[str, ...]:
    """Return the classes of a file, a name per line; UsageError for what may mean two things."""
    names = lines_of(path)
    if not names or len(set(names)) < len(names) or not all(map(str.isprintable, names)):
        raise UsageError(f"--classes {path}: each line needs a different name")
    if "" in names or len(names) > MOST_CLASSES:
        raise UsageError(f"--classes {path}: an empty line, or more than {MOST_CLASSES:,}")
    for number, name in enumerate(names):
        if number_in(name) is not None and name != str(number):
            raise UsageError(
                f"--classes {path}: is {name} class {number}, in whose line it stands, or class"
                f" {name}? give names that are no numbers"
            )
    return names
