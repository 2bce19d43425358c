"""Write durations, sizes and counts, each in one form everywhere."""

from __future__ import annotations


def duration(seconds: float) -> str:
    """Return seconds as people read a clock: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def data_size(count: float) -> str:
    """Return a number of bytes in decimal units: 512 bytes, 1.2 GB."""
    from rich.filesize import decimal  # the controller of a detached run may have no rich

    return decimal(int(count))


def plural(count: int, noun: str, nouns: str = "") -> str:
    """Return a count and its noun: 1 host, 2 hosts, 1,281,167 images, 2 classes."""
    return f"{count:,} {noun if count == 1 else nouns or noun + 's'}"
