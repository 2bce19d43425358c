"""Parse the arguments of a command to its settings, a dataclass.

The same mistake gives the same message in every command: what was typed, what is wrong, and what to
type for help.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar, get_args, get_type_hints

from rackrun.commandline import removed
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import HELP, Option, options
from rackrun.errors import UsageError

Settings = TypeVar("Settings")

Renamed = Mapping[str, str]
"""Options as other programs call them, which are accepted but never shown, and our names."""

Hints = Mapping[str, str]
"""Options of other programs, and what to type instead."""

_EMPTY: Mapping[str, str] = MappingProxyType({})

_SURELY = 0.8  # for an option of another program
_ALIKE = 0.7  # of the letters, for an option that may have been meant
_MOST = 2**53  # a float holds every whole number up to it
_OPTION = re.compile(r"--?[A-Za-z].*", re.DOTALL)  # not a negative number


def parse(
    settings: type[Settings],
    prog: str,
    args: Sequence[str],
    head: Head | None = None,
    renamed: Renamed = _EMPTY,
    hints: Hints = _EMPTY,
) -> Settings:
    """Return the settings on the command line; raise UsageError for an invalid one.

    --help prints and exits; without a head, the page has that of the settings class.
    """
    current_args = list(current_names(args, renamed))
    if HELP.intersection(itertools.takewhile(lambda arg: arg != "--", current_args)):
        from rackrun.commandline.help_page import head_of, show_options

        show_options((head or head_of(settings)).of(prog=prog), settings)
    try:
        values = _values(options(settings), current_args, hints)
    except _Mistyped as error:
        message = f"{error}; type: {prog} --help".replace("?; ", "? ")
        raise UsageError(message) from None
    return built(settings, values)


class _Mistyped(Exception):
    """Arguments that are no settings: where, what is wrong with it, and what was meant."""


Values = dict[tuple[str, ...], Any]
"""Values of fields by their paths from the settings class on."""


def _values(rows: Sequence[Option], args: Sequence[str], hints: Hints) -> Values:
    named = {row.name: row for row in rows if not row.is_positional}
    values: Values = {row.whole: () for row in rows if row.is_repeatable and row.default is MISSING}
    plain: list[str] = []
    remaining = iter(args)
    for arg in remaining:
        if arg == "--":
            plain += remaining
        elif not _OPTION.fullmatch(arg):
            plain.append(arg)
        else:
            option, value = _named(arg, named, hints)
            if value is None:
                value = next(remaining, None)
                if value is None or _OPTION.fullmatch(value):
                    raise _Mistyped(f"{option.name}: needs a value")
            _set(values, option, value)
    for option in (row for row in rows if row.is_positional):
        count = len(plain) if option.is_repeatable else 1
        for value in plain[:count]:
            _set(values, option, value)
        del plain[:count]
    if plain:
        hint = f"; did you mean --data {plain[0]}?" if "--data" in named else ""
        raise _Mistyped(f"{plain[0]}: not expected here{hint}")
    if missing := [row.name for row in rows if row.is_required and row.whole not in values]:
        raise _Mistyped(f"{' and '.join(missing)}: missing")
    return values


def _named(arg: str, named: Mapping[str, Option], hints: Hints) -> tuple[Option, str | bool | None]:
    """Return the option that an argument names, and its value; None: the next argument."""
    name, equals, value = arg.partition("=")
    name = name.replace("_", "-")
    is_off = name not in named and name.startswith("--no-")
    option = named.get(f"--{name.removeprefix('--no-')}" if is_off else name)
    if option is None or (is_off and not option.is_switch):
        shown = [row.name for row in named.values() if not row.is_hidden]
        raise _unknown(name, shown, hints)
    if not option.is_switch:
        return option, value if equals else None
    if equals:
        raise _Mistyped(f"{name}: takes no value")
    return option, not is_off


def refuse_removed(name: str) -> None:
    """Raise UsageError for an option that earlier versions had."""
    if instead := removed.OPTIONS.get(name):
        raise UsageError(f"{name}: no longer an option; {instead}")


def _unknown(name: str, names: Collection[str], hints: Hints) -> Exception:
    refuse_removed(name)
    if hint := hints.get(name) or hints.get(_closest(name, hints, _SURELY)):
        return UsageError(f"{name}: {hint}")
    return _Mistyped(f"{name}: no such option{_did_you_mean(_closest(name, names))}")


def _set(values: Values, option: Option, typed: str | bool) -> None:
    value = typed if isinstance(typed, bool) else _converted(option, typed)
    path = option.whole
    values[path] = (*values.get(path, ()), value) if option.is_repeatable else value


def _converted(option: Option, typed: str) -> Any:
    if option.choices:
        if typed not in option.choices:
            close = _did_you_mean(_closest(typed, option.choices))
            raise _Mistyped(f"{option.name} {typed}: not one of {', '.join(option.choices)}{close}")
        return get_args(option.type)[option.choices.index(typed)]
    try:
        return option.type(typed)
    except ValueError:
        raise _Mistyped(f"{option.name} {typed}: {_no_number(option, typed)}") from None


def _no_number(option: Option, typed: str) -> str:
    """Return why a text is not the number that an option takes, and the number meant."""
    try:
        number = float(typed)
    except ValueError:
        return "not a number"
    is_whole = abs(number) <= _MOST and number.is_integer()
    return f"not a whole number{_did_you_mean(f'{option.name} {number:.0f}' if is_whole else '')}"


def _did_you_mean(text: str) -> str:
    return f"; did you mean {text}?" if text else ""


def built(settings: type[Settings], values: Values, defaults: Settings | None = None) -> Settings:
    """Return settings with these values, and with those of the dataclasses among their fields.

    What has no value is as in `defaults`, or else as the class has it.
    """
    direct = {path[0]: value for path, value in values.items() if len(path) == 1}
    nested: dict[str, Values] = {}
    for (name, *rest), value in values.items():
        if rest:
            nested.setdefault(name, {})[tuple(rest)] = value
    types = get_type_hints(settings) if nested else {}
    dataclass: Any = settings
    given: Any = defaults
    for field in fields(dataclass) if nested else ():
        if part := nested.get(field.name):
            # A command may give the shared options that it holds defaults of its own.
            default = None if field.default_factory is MISSING else field.default_factory()
            direct[field.name] = built(types[field.name], part, default)
    made: Settings = dataclass(**direct) if defaults is None else replace(given, **direct)
    return made


def unknown_command(name: str, names: Collection[str], prog: str) -> str:
    """Return the message for an unknown command: the one that was probably meant, what to type."""
    full_name = f"{prog} {name}".partition(" ")[2]  # `convert diff`, without the program
    if instead := removed.COMMANDS.get(full_name):
        return f"{full_name}: no longer a command; {instead}"
    close = difflib.get_close_matches(name, names, n=1)
    meant = f"did you mean {close[0]}?" if close else f"there are: {', '.join(names)};"
    return f"{name}: no such command; {meant} type: {prog} --help"


def current_names(args: Sequence[str], renamed: Renamed) -> Iterator[str]:
    """Yield the arguments with other programs' options as ours, also in `--theirs=value`."""
    for arg in map(dashed, args):
        name, equals, value = arg.partition("=")
        yield renamed.get(name, name) + equals + value


def dashed(arg: str) -> str:
    """Return an option whose name was typed with underscores with dashes; else the argument."""
    name, equals, value = arg.partition("=")
    return f"{name.replace('_', '-')}{equals}{value}" if name.startswith("--") else arg


def _closest(name: str, names: Iterable[str], alike: float = _ALIKE) -> str:
    return "".join(difflib.get_close_matches(name, names, n=1, cutoff=alike))
