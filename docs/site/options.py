"""The page of all options: what `--help` of every command prints."""

import contextlib
import io
import os
import re

from rackrun.cli.dispatch import run
from rackrun.contract import variables
from rackrun.training.__main__ import main as run_task

HEAD = """\
# Options

What `--help` prints, for every command. Options can also stand in a
[settings file](../guides/runs.md#repeat-settings-files-and-rerun).
"""
NAME = re.compile(r"^  ([a-z]+)  +[A-Z]", re.MULTILINE)
TASKS = re.compile(r"^Tasks: (.*), or your own", re.MULTILINE)
LEFT_OUT = {"completion", "convert"}  # the subcommands of convert have pages of their own


def page() -> str:
    """Return the page: a section for each command, task and subcommand of `convert`."""
    os.environ["COLUMNS"] = "100"
    commands = [name for name in NAME.findall(help_of("")) if name not in LEFT_OUT]
    local = TASKS.search(help_of("local"))
    commands += [f"local {task}" for task in local[1].split(", ")] if local else []
    commands += [f"convert {name}" for name in NAME.findall(help_of("convert"))]
    sections = [f"\n## rackrun {name}\n\n```text\n{help_of(name)}```\n" for name in commands]
    return HEAD + "".join(sections)


def help_of(command: str) -> str:
    """Return what `--help` of a command prints."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        if command.startswith("local "):  # would replace this process by the task
            os.environ[variables.TYPED] = "rackrun local"
            run_task([*command.split()[1:], "--help"])
        else:
            run([*command.split(), "--help"])
    return printed.getvalue()
