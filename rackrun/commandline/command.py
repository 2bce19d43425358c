"""A command of click from a settings class: an option for each field, in groups on its help."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import click

from rackrun.commandline.help_page import MOST_COLUMNS, WHOLE, Head, Page, write_page
from rackrun.commandline.options import Option, groups, options

Spellings = Mapping[str, str]
"""Options as other programs call them, which are accepted but never shown, and our names."""

Hints = Mapping[str, str]
"""Options of other programs, and what to type instead."""

_LIKE_AN_OPTION = re.compile(r"--?[A-Za-z].*", re.DOTALL)  # not a negative number
_LARGEST = 2**53  # a float holds every whole number up to it


class _Context(click.Context):
    formatter_class = Page


class SettingsCommand(click.Command):
    """The options of a settings class; `context.args` has the words that are none of them.

    With `has_work`, these may be options as well, of a task or a command behind ours, --help among
    them.
    """

    context_class = _Context

    def __init__(
        self,
        settings: type[Any],
        name: str,
        head: Head,
        spellings: Spellings,
        base: type[Any] | None = None,
        heading: str = "Options",
        has_work: bool = False,
        hints: Callable[[], Hints] = dict,
    ) -> None:
        rows = [row for row in options(settings) if not (has_work and row.is_positional)]
        fields = {row.field for row in rows}
        super().__init__(
            name,
            params=[
                SettingArgument(row) if row.is_positional else SettingOption(row, spellings, fields)
                for row in rows
            ],
            add_help_option=not has_work,
            context_settings={
                "allow_extra_args": True,
                "ignore_unknown_options": has_work,
                "help_option_names": ["-h", "--help"],
                "max_content_width": MOST_COLUMNS,
                "token_normalize_func": lambda typed: typed.replace("_", "-"),
            },
        )
        self.settings, self.head = settings, head
        self.base, self.heading = base, heading
        self.hints = hints

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words; raise click.UsageError for options that stand twice or lack a value."""
        valued = [
            each for each in self.params if isinstance(each, click.Option) and not each.is_flag
        ]
        names = {name for option in valued for name in option.opts}
        for word, following in pairwise(args):
            if word.replace("_", "-") in names and _LIKE_AN_OPTION.fullmatch(following):
                raise click.BadOptionUsage(word, "", ctx)
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for param, count in Counter(order).items():
            if count > 1 and isinstance(param, SettingOption) and not param.multiple:
                raise click.UsageError(f"{param.opts[0]}: given twice", ctx)
        return super().parse_args(ctx, args)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write usage, what the command does, examples, then the options by group."""
        grouped = groups(self.settings, self.base, self.heading)
        left_out = self.head.left_out.split()
        shown = {
            title: [described(row) for row in members if row.field not in left_out]
            for title, members in grouped.items()
        }
        rows = {title: members for title, members in shown.items() if members}
        write_page(self.head, rows, formatter)


class SettingOption(click.Option):
    """An option for a field."""

    def __init__(self, row: Option, spellings: Spellings, fields: set[str]) -> None:
        names = [row.name, *(theirs for theirs, ours in spellings.items() if ours == row.name)]
        if row.is_switch and not row.field.startswith("no_") and f"no_{row.field}" not in fields:
            off = f"--no-{row.name.removeprefix('--')}"
            names = [f"{name}/--no-{name.removeprefix('--')}" for name in names]
            names += [f" /{theirs}" for theirs, ours in spellings.items() if ours == off]
        super().__init__(
            [row.field, *names],
            type=click.BOOL if row.is_switch else type_of(row),
            is_flag=row.is_switch,
            default=None,
            multiple=row.is_repeatable,
            required=row.is_required,
            hidden=row.is_hidden,
        )
        self.row = row


class SettingArgument(click.Argument):
    """A field that is typed without a name."""

    def __init__(self, row: Option) -> None:
        count = -1 if row.is_repeatable else 1
        super().__init__([row.field], type=type_of(row), nargs=count, required=row.is_required)
        self.row = row


class Number(click.ParamType[Any]):
    """A number, whole or not."""

    name = "number"

    def __init__(self, kind: type[int] | type[float]) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number that was typed."""
        try:
            return self.kind(value)
        except ValueError:
            self.fail(f"{value}: {self._why_not(value, param)}", param, ctx)

    def _why_not(self, typed: str, param: click.Parameter | None) -> str:
        try:
            number = float(typed)
        except ValueError:
            return "not a number"
        if param and abs(number) <= _LARGEST and number.is_integer():
            return f"not a whole number; did you mean {param.opts[0]} {number:.0f}?"
        return "not a whole number"


class OneOf(click.Choice[Any]):
    """One of a few values."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the value that was typed."""
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            names = list(map(str, self.choices))
            close = get_close_matches(str(value), names, n=1, cutoff=0.7)
            meant = f"; did you mean {close[0]}?" if close else ""
            self.fail(f"{value}: not one of {', '.join(names)}{meant}", param, ctx)


def type_of(row: Option) -> click.ParamType[Any]:
    """Return the type of click for one value of an option."""
    if row.choices:
        return OneOf(get_args(row.type))
    if row.type in (int, float):
        return Number(row.type)
    return click.Path(path_type=Path) if row.type is Path else click.STRING


def described(row: Option) -> tuple[str, str]:
    """Return an option and its text, as the help shows them."""
    name = f"{row.name} {row.placeholder}".rstrip()
    if row.is_positional:
        name = row.name
    elif row.has_negation:
        name = f"{row.name}, --no-{row.key}"
    text, default = row.help, row.default_text
    if default and "(default:" not in text:
        text = f"{text} (default:{WHOLE}{default})"
    return name, text
