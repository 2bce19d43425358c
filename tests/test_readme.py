"""What the first page says is so."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.contract import TASKS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMAND = re.compile(r"^\$ (.+?)(?:\s+#.*)?$", re.MULTILINE)
OURS = ("launcher", "convert", "nginx", "training", *TASKS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every relative link and picture of a page is a file of the repository."""
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_first_page_names_commands_that_exist() -> None:
    """Every program that README calls is there and explains itself; its options are known."""
    commands = [shlex.split(line) for line in COMMAND.findall((ROOT / "README.md").read_text())]
    assert commands
    for words in commands:
        own = words[: words.index("--")] if "--" in words else words
        options = [word for word in own if word.startswith("--")]
        told = help_of(words)
        for option in options:
            assert option in told, f"{shlex.join(words)}: no {option}"


def help_of(words: list[str]) -> str:
    """What `--help` says of the command that these words call."""
    if words[0] == "./run-tests":
        return told_by(str(ROOT / words[0]), "--help")
    if words[0] in ("./run-local", "./run-ssh"):
        place = words[0].removeprefix("./run-")
        verbs = [word for word in words[1:2] if word in ("attach", "status", "logs", "stop")]
        told = told_by(sys.executable, "-m", "launcher", place, *verbs, "--help")
        for task in set(TASKS) & set(words):
            told += told_by(sys.executable, "-m", task, "--help")
        return told
    assert words[:2] == ["python", "-m"] and words[2] in OURS
    verbs = [word for word in words[3:4] if word.isalpha()]
    return told_by(sys.executable, "-m", words[2], *verbs, "--help")


def told_by(*command: str) -> str:
    """What a command that must not fail prints."""
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout
