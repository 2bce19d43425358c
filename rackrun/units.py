"""Format durations, sizes and counts, the same way everywhere."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SPAN = re.compile(r"(?:([0-9]+)d)?(?:([0-9]+)h)?(?:([0-9]+)m)?(?:([0-9]+)s)?")
MOST_SECONDS = 100 * 365 * 86400  # of a limit that is typed: a clock can still hold the sum


def duration(seconds: float) -> str:
    """Return seconds as a clock time: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def age(seconds: float) -> str:
    """Return a time span in its two largest units: 7s, 12m, 3h05m, 4d02h."""
    minutes, hours, days = (int(max(0.0, seconds) // unit) for unit in (60, 3600, 86400))
    if days:
        return f"{days}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes % 60:02}m"
    return f"{minutes}m" if minutes else f"{int(max(0.0, seconds))}s"


def seconds_in(text: str) -> int:
    """Return the seconds in a time span such as 2h, 90m, 1h30m or 1d12h; raise ValueError."""
    match = _SPAN.fullmatch(text)
    if match is None or not text:
        raise ValueError(f"{text[:40]!r} is not a time span")
    units = zip(match.groups(default="0"), (86400, 3600, 60, 1), strict=True)
    seconds = sum(int(count) * unit for count, unit in units)
    if seconds > MOST_SECONDS:
        raise ValueError(f"{text[:40]!r} is more than a century")
    return seconds


def whole_number(text: str, most: int) -> int | None:
    """Return a number from 0 to `most` that is written in digits; None for any other text.

    Python itself takes digits of every script, and refuses more than 4,300 of them.
    """
    digits = text.lstrip("0") or "0"
    if not (text.isascii() and text.isdecimal() and len(digits) <= len(str(most))):
        return None
    return number if (number := int(digits)) <= most else None


def data_size(count: float) -> str:
    """Return a number of bytes in decimal units: 512 bytes, 1.2 GB."""
    from rich.filesize import decimal  # hosts have no rich

    return decimal(int(count))


def used_of(used: float, total: float) -> str:
    """Return the used and all bytes of a memory: 8.0/64 GB."""
    return f"{used / 1e9:.1f}/{total / 1e9:.0f} GB"


def gibibytes(count: float) -> str:
    """Return a number of bytes in binary units, in which GPUs and disks are sold: 80 GiB."""
    return f"{count / 2**30:.0f} GiB"


def share(part: float, digits: int = 1) -> str:
    """Return a part of 1 in percent, 95.0%; what is no such part, such as 95, as it is."""
    return f"{part:.{digits}%}" if abs(part) <= 1 else f"{part:g}"


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a count and its noun: 1 host, 2 hosts, 1,281,167 images, 2 classes."""
    return f"{count:,} {form(count, noun, nouns)}"


def form(count: float, noun: str, nouns: str = "") -> str:
    """Return the form of a noun after a count: epoch for 1, epochs for 2.5."""
    return noun if count == 1 else nouns or noun + "s"


def first_few(names: Sequence[str], most: int) -> str:
    """Return the first of some names, and the number of the others: a, b, c and 5 more."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
