"""The page of all options: what `--help` of every command prints."""

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

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
    commands = [name for name in NAME.findall(help_of("")) if name not in LEFT_OUT]
    local = TASKS.search(help_of("local"))
    commands += [f"local {task}" for task in local[1].split(", ")] if local else []
    commands += [f"convert {name}" for name in NAME.findall(help_of("convert"))]
    with ThreadPoolExecutor(2) as pool:
        pages = pool.map(help_of, commands)
        sections = [
            f"\n## rackrun {command}\n\n```text\n{text}```\n"
            for command, text in zip(commands, pages, strict=True)
        ]
    return HEAD + "".join(sections)


def help_of(command: str) -> str:
    """Return what `--help` of a command prints."""
    words = [sys.executable, "-m", "rackrun", *command.split(), "--help"]
    environment = {**os.environ, "COLUMNS": "100"}
    return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
