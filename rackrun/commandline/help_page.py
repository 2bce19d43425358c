"""The page that --help prints: usage, what the command does, examples, then options by group."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from inspect import cleandoc
from typing import Any, NoReturn

import click

from rackrun.commandline.options import Examples, options

MOST_COLUMNS = 110  # longer lines are hard to read
NAME_COLUMNS = 28  # longer names have a line of their own
WHOLE = "\N{NO-BREAK SPACE}"  # between words that stay on one line
HYPHEN = "\N{NON-BREAKING HYPHEN}"

Rows = Mapping[str, Sequence[tuple[str, str]]]
"""Heading -> names, and what they are."""


class Page(click.HelpFormatter):
    """A page on which no line ends within a name such as --batch-size."""

    def write_text(self, text: str) -> None:
        """Write paragraphs."""
        super().write_text(text.replace("-", HYPHEN))

    def write_dl(
        self, rows: Iterable[tuple[str, str]], col_max: int = NAME_COLUMNS, col_spacing: int = 2
    ) -> None:
        """Write names, and what they are."""
        whole = [(name, text.replace("-", HYPHEN)) for name, text in rows]
        super().write_dl(whole, col_max, col_spacing)

    def getvalue(self) -> str:
        """Return the page."""
        return super().getvalue().replace(HYPHEN, "-").replace(WHOLE, " ")


@dataclass(frozen=True)
class Head:
    """The text above the options of a command; `{prog}` is the command as it is called."""

    usage: str
    about: str
    examples: Examples
    """Commands, and what they do."""
    foot: str = ""
    left_out: str = ""
    """Fields of options that the command takes, but has no use for: they are not shown."""

    def of(self, **names: str) -> Head:
        """Return the head with the names in braces replaced."""

        def filled(text: str) -> str:
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", value)
            return text

        examples = tuple((filled(typed), what) for typed, what in self.examples)
        return replace(
            self,
            usage=filled(self.usage),
            about=filled(self.about),
            examples=examples,
            foot=filled(self.foot),
        )


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


def show(head: Head, rows: Rows) -> NoReturn:
    """Print a page and end the command, as --help does."""
    formatter = Page(max_width=MOST_COLUMNS)
    write_page(head, rows, formatter)
    sys.stdout.write(formatter.getvalue())
    raise SystemExit(0)


def write_page(head: Head, rows: Rows, formatter: click.HelpFormatter) -> None:
    """Write the page of a command."""
    formatter.write(f"usage: {head.usage}\n\n")
    formatter.write_text(head.about)
    if head.examples:
        with formatter.section("Examples"):
            _write_examples(head.examples, formatter)
    for heading, members in rows.items():
        with formatter.section(heading):
            formatter.write_dl(members)
    if head.foot:
        formatter.write_paragraph()
        formatter.write_text(head.foot)


def _write_examples(examples: Examples, formatter: click.HelpFormatter) -> None:
    """Write commands with their descriptions beside them, or below them on a narrow screen."""
    longest = max(len(typed) for typed, _ in examples)
    beside = all(longest + len(what) + 5 <= formatter.width for _, what in examples)
    for typed, what in examples:
        between = " " * (longest - len(typed) + 3) if beside else f"\n{' ' * 6}"
        formatter.write(f"  {typed}{between}{what}\n")
