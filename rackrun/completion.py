"""Shell completion: `rackrun completion bash|zsh` prints what the shell loads.

The shell then asks `rackrun completion words ...` at each Tab: options are those of the help.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

from rackrun.commands import COMMANDS, is_about_runs, program
from rackrun.errors import UsageError
from rackrun.user_code.tasks import find_task, known_tasks

_SCRIPTS = {
    "bash": """\
_rackrun() {
    local words name=${1##*/} script=()
    [[ $name != run-* ]] || script=("${name#run-}")
    words=$({program} completion words "${script[@]}" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "${COMP_WORDS[COMP_CWORD]}")
}
complete -o default -F _rackrun rackrun run-local run-ssh run-ray
""",
    "zsh": """\
#compdef rackrun run-local run-ssh run-ray
_rackrun() {
    local -a found script
    [[ ${words[1]:t} != run-* ]] || script=(${${words[1]:t}#run-})
    found=(${(f)"$({program} completion words $script "${(@)words[2,CURRENT]}" 2>/dev/null)"})
    compadd -a found
    [[ $words[CURRENT] == -* ]] || _files
}
if [[ $funcstack[1] == _rackrun ]]; then
    _rackrun "$@"
else
    compdef _rackrun rackrun run-local run-ssh run-ray
fi
""",
}
"""A Tab after `./run-local` starts Python and not the script, which may install packages."""

_KNOWN = Path("~/.rackrun/known")


def main(args: Sequence[str]) -> int:
    """Print the script of a shell, or the words that may come next; return 0."""
    if args and args[0] == "words":
        sys.stdout.write("".join(f"{word}\n" for word in sorted(candidates(args[1:]))))
    elif args and args[0] in _SCRIPTS:
        sys.stdout.write(_SCRIPTS[args[0]].replace("{program}", shlex.join(program())))
    elif args and args[0] in ("-h", "--help"):
        sys.stdout.write("usage: rackrun completion bash|zsh\n\nPrint a completion script.\n")
    else:
        raise UsageError(f"completion: for which shell? type: rackrun completion {_shells()}")
    return 0


def candidates(words: Sequence[str]) -> set[str]:
    """Return what may come in place of the last of the words after `rackrun`."""
    *before, current = words or [""]
    if not before:
        return set(COMMANDS)
    command = next((word for word in before[:2] if is_about_runs(word)), before[0])
    if command not in COMMANDS or "--" in before:
        return set()
    task = next((word for word in before[1:] if find_task(word)), "")
    if current.startswith("-"):
        return _options_of_task(task) if task else _options(command, before[1:2])
    if is_about_runs(command):
        return _runs()
    if command == "convert" and len(before) == 1:
        return _kinds()
    return set(known_tasks()) if COMMANDS[command].group == "Train" and not task else set()


def _options(command: str, typed: Sequence[str]) -> set[str]:
    """Return the options in the help of a command; of one kind of conversion, if that is typed."""
    one = COMMANDS[command]
    words = [word for word in one.words if not word.startswith("-")]
    kind = _kinds() & set(typed) if command == "convert" else ()
    return _in_help(one.load(), [*words, *kind, "--help"])


def _kinds() -> set[str]:
    """Return the kinds of conversion."""
    return set(import_module("convert.commands").COMMANDS)


def _options_of_task(task: str) -> set[str]:
    """Return the options in the help of a task; of one in this folder, those that all tasks have.

    A Tab must not run what lies in a folder, nor wait for torch.
    """
    if task in known_tasks():
        return _in_help(import_module("training.__main__").main, [task, "--help"])
    config = import_module("training.config")
    every = {"default": config.Config}
    return _in_help(lambda words: config.from_command_line(every, task, words), ["--help"])


def _in_help(main: Callable[[list[str]], object], words: list[str]) -> set[str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(words)
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", shown.getvalue()))


def _runs() -> set[str]:
    """Return the names of the runs of this folder, and the ids of detached runs known here."""
    return {*_names(Path("runs").glob("*-*-*")), *_names(_KNOWN.expanduser().glob("*.json"))}


def _names(paths: Iterable[Path]) -> set[str]:
    return {path.stem for path in paths if path.stem.isprintable() and " " not in path.stem}


def _shells() -> str:
    return "|".join(_SCRIPTS)
