"""Names of hosts in short, as hosts.txt takes them: gpu01, gpu02, gpu03 -> gpu[01-03]."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

FEWEST = 2  # names that make a range
INDENT = "    "
"""Begins the further lines of a message: what was seen, and what to type."""


def grouped(names: Iterable[str]) -> str:
    """Return names with those that differ in their last number as one: gpu[01-08,10], login."""
    parts = [_parts(name) for name in dict.fromkeys(names)]
    padded = {(head, len(digits), tail) for head, digits, tail in parts if digits[:1] == "0"}
    families: dict[tuple[str, int, str], list[int]] = {}
    for head, digits, tail in parts:
        width = len(digits) if (head, len(digits), tail) in padded else min(1, len(digits))
        families.setdefault((head, width, tail), []).append(int(digits or 0))
    return ", ".join(_written(*family, numbers) for family, numbers in families.items())


def said_once(messages: Iterable[tuple[str, str]]) -> str:
    """Return what is wrong with hosts: equal messages for all of their hosts together.

    Of the indented lines of several messages, equal ones appear once, in the place of the last.
    """
    hosts: dict[str, list[str]] = {}
    for host, text in messages:
        hosts.setdefault(text, []).append(host)
    lines = [
        line for text, names in hosts.items() for line in f"{grouped(names)}: {text}".split("\n")
    ]
    last = {line: number for number, line in enumerate(lines)}
    return "\n".join(
        line
        for number, line in enumerate(lines)
        if not line.startswith(INDENT) or last[line] == number
    )


def _parts(name: str) -> tuple[str, str, str]:
    """Return what is before the last number of a name, its digits, and what is after it."""
    match = re.fullmatch(r"(.*?)([0-9]{1,9})([^0-9]*)", name)
    whole_number = match and not (match[2] and re.search(r"[0-9]$", match[1]))
    if match is None or not whole_number or ":" in name or re.fullmatch(r"[0-9.]+", name):
        return name, "", ""  # an address has no range
    return match[1], match[2], match[3]


def _written(head: str, digits: int, tail: str, numbers: Sequence[int]) -> str:
    if not digits:
        return head
    if len(numbers) < FEWEST:
        return f"{head}{numbers[0]:0{digits}}{tail}"
    return f"{head}[{ranges(sorted(numbers), digits)}]{tail}"


def ranges(numbers: Sequence[int], digits: int = 1) -> str:
    """Return rising numbers in short: 1-8,10; with two digits, 01-08,10."""
    runs = itertools.groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    spans = [[number for _, number in run] for _, run in runs]
    ends = [(span[0], span[-1]) for span in spans]
    return ",".join(
        f"{first:0{digits}}" + (f"-{last:0{digits}}" if last != first else "")
        for first, last in ends
    )
