"""Parse the arguments of a command to its settings, a dataclass, by click.

The same mistake gives the same message in every command: what was typed, what is wrong, and what to
type for help.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, replace
from types import MappingProxyType
from typing import Any, TypeVar, get_type_hints

import click
from click.core import ParameterSource

from rackrun.commandline import removed
from rackrun.commandline.command import (
    Hints,
    SettingArgument,
    SettingOption,
    SettingsCommand,
    Spellings,
)
from rackrun.commandline.help_page import Head, head_of
from rackrun.errors import UsageError

Settings = TypeVar("Settings")

Values = dict[tuple[str, ...], Any]
"""Values of fields by their paths from the settings class on."""

_EMPTY: Mapping[str, str] = MappingProxyType({})

_SURELY = 0.8  # for an option of another program
_ALIKE = 0.7  # of the letters, for an option that may have been meant


def parse(
    settings: type[Settings],
    prog: str,
    args: Sequence[str],
    head: Head | None = None,
    renamed: Spellings = _EMPTY,
    hints: Hints = _EMPTY,
) -> Settings:
    """Return the settings on the command line; raise UsageError for an invalid one.

    --help prints and exits; without a head, the page has that of the settings class.
    """
    head = (head or head_of(settings)).of(prog=prog)
    command = SettingsCommand(settings, prog, head, renamed, hints=lambda: hints)
    return parsed(settings, command, args)[0]


def parsed(
    settings: type[Settings], command: SettingsCommand, args: Sequence[str]
) -> tuple[Settings, set[str]]:
    """Return the settings on the command line of a command, and the names of the fields typed."""
    context = context_of(command, args)
    if context.args:
        takes_data = any("--data" in param.opts for param in command.params)
        hint = f"; did you mean --data {context.args[0]}?" if takes_data else ""
        raise _mistyped(f"{context.args[0]}: not expected here{hint}", command)
    values = values_of(context)
    return built(settings, values), {path[-1] for path in values}


def context_of(command: SettingsCommand, args: Sequence[str], **settings: Any) -> click.Context:
    """Return what click makes of the words behind a command; raise UsageError for mistakes.

    `settings` are those of click.Context. --help prints and exits.
    """
    try:
        return command.make_context(command.name, list(args), **settings)
    except click.exceptions.Exit as end:  # --help
        raise SystemExit(end.exit_code) from None
    except click.NoSuchOption as error:
        raise no_such_option(error.option_name, command) from None
    except click.BadOptionUsage as error:
        is_switch = any(
            isinstance(param, click.Option) and param.is_flag and error.option_name in _names(param)
            for param in command.params
        )
        why = "takes no value" if is_switch else "needs a value"
        raise _mistyped(f"{error.option_name}: {why}", command) from None
    except click.MissingParameter as error:
        raise _mistyped(f"{_named(error.param)}: missing", command) from None
    except click.BadParameter as error:
        raise _mistyped(f"{_named(error.param)} {error.message}", command) from None
    except click.UsageError as error:
        raise _mistyped(error.message, command) from None


def values_of(context: click.Context) -> Values:
    """Return the values that were typed, or that a settings file has, in the order of the words."""
    rows = {param.name: param.row for param in _settings_params(context.command)}
    values: Values = {}
    for name, value in context.params.items():
        if name not in rows:
            continue
        is_given = context.get_parameter_source(name) is not ParameterSource.DEFAULT
        if is_given or (rows[name].is_repeatable and rows[name].default is MISSING):
            values[rows[name].whole] = value
    return values


def no_such_option(name: str, command: SettingsCommand) -> UsageError:
    """Return the error for an option that a command does not have, with what was meant."""
    name, hints = name.replace("_", "-"), command.hints()
    refuse_removed(name, command.name or "")
    shown = [param.row.name for param in _settings_params(command) if not param.row.is_hidden]
    alike = [*shown, *(theirs for theirs in hints if theirs.startswith("--"))]
    if hint := hints.get(name) or hints.get(_closest(name, alike, _SURELY)):
        return UsageError(f"{name}: {hint}")
    close = _closest(name, shown)
    meant = f"; did you mean {close}?" if close else ""
    return _mistyped(f"{name}: no such option{meant}", command)


def refuse_removed(name: str, command: str) -> None:
    """Raise UsageError for an option that a command, or every command, of earlier versions had."""
    of_command = f"{command.rpartition(' ')[2]} {name}"
    if instead := removed.OPTIONS.get(of_command) or removed.OPTIONS.get(name):
        raise UsageError(f"{name}: no longer an option; {instead}")


def _mistyped(what: str, command: click.Command) -> UsageError:
    return UsageError(f"{what}; type: {command.name} --help".replace("?; ", "? "))


def _settings_params(command: click.Command) -> list[SettingOption | SettingArgument]:
    return [param for param in command.params if isinstance(param, SettingOption | SettingArgument)]


def _names(param: click.Parameter) -> list[str]:
    return [*param.opts, *param.secondary_opts]


def _named(param: click.Parameter | None) -> str:
    return param.row.name if isinstance(param, SettingOption | SettingArgument) else ""


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


def _closest(name: str, names: Iterable[str], alike: float = _ALIKE) -> str:
    return "".join(difflib.get_close_matches(name, names, n=1, cutoff=alike))
