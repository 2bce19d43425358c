"""The page that --help prints: usage, what the command does, examples, then options by group."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Any, NoReturn

from rackrun.commandline.options import Examples, Option, groups, options

MOST_COLUMNS = 110  # longer lines are hard to read
NAME_COLUMNS = 26  # longer names have a line of their own
WHOLE = "\N{NO-BREAK SPACE}"  # between words that stay on one line


Rows = Mapping[str, Sequence[tuple[str, str]]]
"""Heading -> names, and what they are."""


@dataclass(frozen=True)
class Head:
    """The text above the options of a command; `{prog}` is the command as it is called."""

    usage: str
    about: str
    examples: Examples
    """Commands, and what they do."""
    foot: str = ""

    def of(self, **names: str) -> Head:
        """Return the head with the names in braces replaced."""

        def filled(text: str) -> str:
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", value)
            return text

        examples = tuple((filled(typed), what) for typed, what in self.examples)
        return Head(filled(self.usage), filled(self.about), examples, filled(self.foot))


def head_of(settings: type[Any]) -> Head:
    """Return the head of a command: arguments, docstring, and the examples of its settings."""
    positionals = []
    for row in filter(lambda row: row.is_positional, options(settings)):
        once = row.name if row.is_required else f"[{row.name}]"
        positionals.append(f"{row.name}..." if row.is_repeatable else once)
    about = cleandoc(settings.__doc__ or "")
    return Head(
        " ".join(("{prog} [options]", *positionals)), about, getattr(settings, "examples", ())
    )


def show_options(
    head: Head, settings: type[Any], base: type[Any] | None = None, heading: str = "Options"
) -> NoReturn:
    """Print the page of a settings class and end the command, as --help does."""
    grouped = groups(settings, base, heading)
    show(head, {title: [_row(option) for option in rows] for title, rows in grouped.items()})


def show(head: Head, rows: Rows) -> NoReturn:
    """Print a page and end the command, as --help does."""
    sys.stdout.write(page(head, rows, shutil.get_terminal_size().columns))
    raise SystemExit(0)


def page(head: Head, rows: Rows, columns: int) -> str:
    """Return the page for a terminal of this width."""
    width = min(columns, MOST_COLUMNS)
    lines = [f"usage: {head.usage}", "", *_paragraphs(head.about, width)]
    if head.examples:
        lines += ["", "Examples:", *_examples(head.examples, width)]
    for heading, members in rows.items():
        lines += ["", f"{heading}:"]
        lines += [line for name, text in members for line in _lines(name, text, width)]
    if head.foot:
        lines += ["", *_paragraphs(head.foot, width)]
    return "\n".join([*lines, ""])


def _paragraphs(text: str, width: int) -> Iterator[str]:
    for number, paragraph in enumerate(text.strip().split("\n\n")):
        if number:
            yield ""
        yield from _wrapped(" ".join(paragraph.split()), width)


def _examples(examples: Sequence[tuple[str, str]], width: int) -> Iterator[str]:
    """Yield commands with their descriptions beside them, or below them on a narrow screen."""
    longest = max((len(typed) for typed, _ in examples), default=0)
    beside = all(longest + len(what) + 5 <= width for _, what in examples)
    for typed, what in examples:
        if beside:
            yield f"  {typed:{longest}}   {what}"
        else:
            yield f"  {typed}"
            yield f"      {what}"


def _row(option: Option) -> tuple[str, str]:
    name = f"{option.name} {option.placeholder}".rstrip()
    if option.is_positional:
        name = option.name
    elif option.has_negation:
        name = f"{option.name}, --no-{option.key}"
    text, default = option.help, option.default_text
    if default and "(default:" not in text:
        text = f"{text} (default:{WHOLE}{default})"
    return name, text


def _lines(name: str, text: str, width: int) -> Iterator[str]:
    first, *rest = _wrapped(text, width - NAME_COLUMNS - 4)
    margin = " " * (NAME_COLUMNS + 4)
    if len(name) <= NAME_COLUMNS:
        yield f"  {name:{NAME_COLUMNS}}  {first}"
    else:
        yield from (f"  {name}", margin + first)
    yield from (margin + line for line in rest)


def _wrapped(text: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return [line.replace(WHOLE, " ") for line in lines]
