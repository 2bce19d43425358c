"""Shell completion: `rackrun completion bash|zsh|fish` prints what the shell loads.

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

from rackrun.commands import COMMANDS, LAUNCHES, called, is_command, program
from rackrun.errors import UsageError
from rackrun.user_code.tasks import find_task, known_tasks

_SCRIPTS = {
    "bash": """\
_rackrun() {
    local word name=${1##*/} script=() typed=${COMP_WORDS[COMP_CWORD]}
    [[ $name != run-* ]] || script=("${name#run-}")
    COMPREPLY=()
    while IFS= read -r word; do
        [[ $word != "$typed"* ]] || COMPREPLY+=("$word")
    done < <({program} completion words "${script[@]}" "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
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
    "fish": """\
function _rackrun
    set -l words (commandline -opc)
    set -l script (string match -r -g '^(?:.*/)?run-([a-z]+)$' -- $words[1])
    {program} completion words $script $words[2..-1] (commandline -ct) 2>/dev/null
end
for name in rackrun run-local run-ssh run-ray
    complete -c $name -a '(_rackrun)'
end
""",
}
"""A Tab after `./run-local` starts Python and not the script, which may install packages.

bash does not filter the words by `compgen -W`, which expands them: `$(...)` in one would be run.
"""

SHELLS = "|".join(_SCRIPTS)

_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")
"""A name that means itself to every shell: bash inserts what is offered without quotes."""


def main(args: Sequence[str]) -> int:
    """Print the script of a shell, or the arguments that may come next; return 0."""
    if args and args[0] == "words":
        sys.stdout.write("".join(f"{candidate}\n" for candidate in sorted(candidates(args[1:]))))
    elif args and args[0] in _SCRIPTS:
        sys.stdout.write(_SCRIPTS[args[0]].replace("{program}", shlex.join(program())))
    elif args and args[0] in ("-h", "--help"):
        load = f'eval "$({called("completion")} bash)"'
        sys.stdout.write(
            f"usage: rackrun completion {SHELLS}\n\nPrint a completion script.\n\n"
            f"Examples:\n  {load}   load it into this bash\n"
        )
    else:
        what = f"not for {args[0]};" if args else "for which shell?"
        raise UsageError(f"completion: {what} type: {called('completion')} {SHELLS}")
    return 0


def candidates(args: Sequence[str]) -> set[str]:
    """Return what may come in place of the last argument after `rackrun`."""
    *earlier_args, current = args or [""]
    if not earlier_args:
        return set(COMMANDS)
    if is_command(earlier_args[1:]) and earlier_args[0] in LAUNCHES:  # ./run-local predict
        del earlier_args[0]
    command = earlier_args[0]
    if command not in COMMANDS or "--" in earlier_args:
        return set()
    task = next((arg for arg in earlier_args[1:] if find_task(arg)), "")
    if current.startswith("-"):
        return _options_of_task(task) if task else _options(command, earlier_args[1:2])
    if COMMANDS[command].group == "Runs":
        return _runs()
    if command == "convert" and len(earlier_args) == 1:
        return _kinds()
    return _plain(known_tasks()) if command in LAUNCHES and not task else set()


def _options(command: str, typed: Sequence[str]) -> set[str]:
    """Return the options in the help of a command; of one kind of conversion, if that is typed."""
    one = COMMANDS[command]
    args = [arg for arg in one.args if not arg.startswith("-")]
    kind = _kinds() & set(typed) if command == "convert" else ()
    return _in_help(import_module(one.module).main, [*args, *kind, "--help"])


def _kinds() -> set[str]:
    return set(import_module("rackrun.convert.commands").COMMANDS)


def _options_of_task(task: str) -> set[str]:
    """Return the options in the help of a task; of one in this folder, those that all tasks have.

    A Tab must not run what lies in a folder, nor wait for torch.
    """
    if task in known_tasks():
        return _in_help(import_module("rackrun.training.__main__").main, [task, "--help"])
    config = import_module("rackrun.training.config")
    every = {"default": config.Config}
    return _in_help(lambda args: config.from_command_line(every, task, args), ["--help"])


def _in_help(main: Callable[[list[str]], object], args: list[str]) -> set[str]:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.suppress(SystemExit):
        main(args)
    rows = re.findall(r"^  (--.*?)(?:  |$)", shown.getvalue(), re.MULTILINE)
    return {"--help", *re.findall(r"--[a-z][\w-]*", " ".join(rows))}


def _runs() -> set[str]:
    return _plain(folder.name for folder in Path("runs").glob("*-*-*"))


def _plain(names: Iterable[str]) -> set[str]:
    return {name for name in names if _PLAIN.fullmatch(name)}
