"""The class of a stored sample, written anew where it stands: in its .cls, .json or .txt.

A number stays a number, a name a name. Of the member, only the class changes; of the sample, only
that member.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from convert.readers.tars import BLOCK, Tar
from convert.readers.webdataset_tars import TarSample, label_member, label_of, samples_in
from rackrun.errors import DataError
from rackrun.terminal import clean
from shards.index import Row
from shards.writer import END, resized_header

BLANKS = re.compile(r"[ \t\n\r]*")


def relabelled(
    row: Row, members: bytes, label: int, classes: Sequence[str], field: str, where: str
) -> tuple[Row, bytes]:
    """Return a sample's row and members with another class.

    `field` is that of a .json with the class. DataError if the class there is not that of the row.
    """
    with opened(row, members, where) as (tar, sample):
        labelled = label_member(sample) if sample else None
        old = label_of(tar, sample, field) if sample else None
        if not labelled or old not in (row.label, classes[row.label]):
            raise DataError(
                clean(f"{where}: its class is {classes[row.label]}, and the tar has {old}")
                + "; if a .json has the class in another field, add --label-field NAME"
            )
        suffix, member = labelled
        content = tar.content(member)
    try:
        text = content.decode()
        start, end = _field_span(text, field) if suffix == ".json" else _text_span(text)
    except (ValueError, IndexError):  # JSON may be UTF-16, or begin with a byte order mark
        raise DataError(clean(f"{where}: its {suffix} is no plain UTF-8; drop it")) from None
    new = str(label) if isinstance(old, int) else classes[label]
    if suffix == ".json" and text[start] == '"':
        new = json.dumps(new, ensure_ascii=text.isascii())
    content = (text[:start] + new + text[end:]).encode()
    at, after = member.offset, -(-(member.offset + member.size) // BLOCK) * BLOCK
    header = resized_header(members[at - BLOCK : at], len(content))
    content += bytes(-len(content) % BLOCK)
    moved = len(content) - (after - at)
    changed = row._replace(
        label=label,
        length=row.length + moved,
        image_offset=row.image_offset + (moved if row.image_offset - row.offset > at else 0),
    )
    return changed, members[: at - BLOCK] + header + content + members[after:]


def has_number(row: Row, members: bytes, where: str) -> bool:
    """Return True if the class of a sample is a number in a .cls, as in shards of a conversion."""
    with opened(row, members, where) as (tar, sample):
        suffix, member = (sample and label_member(sample)) or ("", None)
        return suffix == ".cls" and member is not None and tar.content(member).strip().isdigit()


@contextlib.contextmanager
def opened(row: Row, members: bytes, where: str) -> Iterator[tuple[Tar, TarSample | None]]:
    """Yield the members of a sample as a tar, and which sample in it has the row's image."""
    descriptor = os.memfd_create("sample")
    with os.fdopen(descriptor, "wb") as file:
        file.write(members + END)
        file.flush()
        tar, image_at = Tar(Path(where), descriptor), row.image_offset - row.offset
        stored = (each for each in samples_in(tar) if each.image and each.image.offset == image_at)
        yield tar, next(stored, None)


def _text_span(text: str) -> tuple[int, int]:
    """Return where a text begins and ends that has blanks around it."""
    return len(text) - len(text.lstrip()), len(text.rstrip())


def _field_span(text: str, field: str) -> tuple[int, int]:
    """Return where the value of a field begins and ends in a JSON object that has it."""
    decode, span = json.JSONDecoder().raw_decode, (0, 0)

    def skip(at: int) -> int:
        blanks = BLANKS.match(text, at)
        return blanks.end() if blanks else at

    at = skip(0)  # of the brace, then of the comma after each value
    while text[at] != "}" and text[skip(at + 1)] != "}":
        name, end = decode(text, skip(at + 1))
        start = skip(skip(end) + 1)
        _, end = decode(text, start)
        if name == field:  # the last one counts where there are two
            span = start, end
        at = skip(end)
    return span
