"""Launchers that someone might type as the command of the ranks, which rackrun starts itself.

Each rank would start a world of its own and train alone, without an error: torchrun and its kind
ignore the RANK and WORLD_SIZE that they find.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import PurePath

LAUNCHERS = {
    "torchrun": "",
    "torch.distributed.run": "",
    "torch.distributed.launch": "",
    "accelerate": "launch",
    "accelerate-launch": "",
    "accelerate.commands.launch": "",
    "composer": "",
    "deepspeed": "",
    "horovodrun": "",
    "mpirun": "",
    "mpiexec": "",
    "srun": "",
}
"""Program or module -> the argument that has to follow; empty: any."""
SHELLS = {"bash", "sh", "dash", "zsh"}
BEFORE = {"exec", "env", "time", "nohup"}
PYTHON = re.compile(r"python[0-9.]*")
ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


def nested_launcher(args: Sequence[str]) -> str:
    """Return why this command would start a launcher in every rank, and what to type; or empty."""
    for command in _commands(args):
        name, rest = _launched(command)
        if name:
            script = next((i for i, word in enumerate(rest) if word.endswith(".py")), None)
            words = ["train.py"] if script is None else rest[script:]
            return (
                f"{name}: every rank would start a launcher, and train alone; rackrun starts"
                f" torchrun itself, so type: -- python {shlex.join(words)}; ranks per host are"
                " slots=N in hosts.txt, or --nproc N"
            )
    return ""


def _commands(args: Sequence[str]) -> list[list[str]]:
    """Return the commands that these arguments run: one, or those of a text for a shell."""
    words = list(args)
    while words and (words[0] in BEFORE or ASSIGNMENT.fullmatch(words[0])):
        words.pop(0)
    is_shell = words and PurePath(words[0]).name in SHELLS
    texts = [after for word, after in zip(words, words[1:], strict=False) if _runs_text(word)]
    if not is_shell or not texts:
        return [words]
    lexer = shlex.shlex(texts[0].replace("\n", ";"), posix=True, punctuation_chars=True)
    commands: list[list[str]] = [[]]
    try:
        for word in lexer:
            if set(word) <= set("();<>|&"):
                commands.append([])
            else:
                commands[-1].append(word)
    except ValueError:
        return []  # quotes that the shell will complain about
    return [part for command in commands for part in _commands(command)]


def _runs_text(word: str) -> bool:
    return bool(re.fullmatch("-[a-z]*c", word))


def _launched(command: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the launcher that a command starts, and its arguments; empty for any other command."""
    words = list(command)
    name = PurePath(words[0]).name if words else ""
    if PYTHON.fullmatch(name):
        words.pop(0)
        while words and words[0].startswith("-"):  # -u, and at last -m
            words.pop(0)
        name = PurePath(words[0]).name if words else ""
    following = LAUNCHERS.get(name)
    if following is None or (following and words[1:2] != [following]):
        return "", ()
    return f"{name} {following}".strip(), words[1:]
