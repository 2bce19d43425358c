"""README and docs are true: links, paths, imports, commands and options exist."""

import ast
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rackrun.commands import NAMES
from rackrun.contract.tasks import TASKS
from rackrun.convert.commands import COMMANDS as CONVERT
from tests.lab import warm

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]

VERBS = {
    **{(verb,): ["-m", "rackrun", verb] for verb in NAMES},
    ("rerun",): ["-m", "rackrun", "local"],  # its options are those of the launch and of its task
    **{("convert", verb): ["-m", "rackrun", "convert", verb] for verb in CONVERT},
}
"""What follows `rackrun` on a page -> words for Python whose `--help` lists the options."""

SCRIPTS = {
    ("./run-tests",): ["./run-tests"],
    ("./run-local",): ["-m", "rackrun", "local"],
    ("./run-ray",): ["-m", "rackrun", "ray"],
    ("./run-ssh",): ["-m", "rackrun", "ssh"],
}
TASK_HELP = {(task,): ["-m", "rackrun.training", task] for task in TASKS}
ASKED = {**VERBS, **SCRIPTS, **TASK_HELP}

LAUNCHERS = ("rackrun ", "./run-local", "./run-ray", "./run-ssh")
OURS = re.compile(r"(?<!from )(?:rackrun [a-z]+|\./run-(?:local|ssh|ray|tests))(?=\s|$).*")
BY_MODULE = re.compile(r"python3? -m rackrun(?!\.training TASK)\b.*")
FOREIGN = {  # of docker, mmdebstrap, Slurm and iptables
    *("--ipc", "--shm-size", "--read-only", "--tmpfs", "--build-arg", "--customize-hook"),
    *("--ntasks", "--ntasks-per-node", "--cpus-per-task", "--connlimit-mask"),
    *("--master-addr", "--master-port", "--nnodes", "--node-rank", "--nproc-per-node"),  # torchrun
    "--logdir",  # of tensorboard
    *("--losses", "--minutes", "--only", "--peers", "--rounds", "--scratch"),  # of bench/
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
ROOMS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")


@pytest.fixture(scope="module")
def options_by_command() -> dict[tuple[str, ...], set[str]]:
    """Return the options in the help of each command, by the words that a page prints."""
    options = {command: options_of(args) for command, args in ASKED.items()}
    for verb in VERBS:
        for door in ("rackrun", "./run-local", "./run-ssh"):
            options[(door, *verb)] = options[verb]
    return options


def options_of(command: list[str]) -> set[str]:
    output = (
        warm.run(*command, "--help", start=warm.Launcher, cwd=ROOT)
        if command[0] == "-m"
        else subprocess.run([*command, "--help"], cwd=ROOT, capture_output=True, text=True)
    )
    assert output.returncode == 0, output.stderr
    return set(OPTION.findall(output.stdout))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    """Every relative link and image is a file of the repository, every anchor a heading there."""
    for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
        if not target.startswith(("http://", "https://")):
            linked = page.parent / target if target else page
            assert linked.exists(), f"{page.name} links to {target}"
            assert not anchor or anchor in anchors(linked), f"{page.name}: {target}#{anchor}"


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_exist(page):
    """Every path in backticks that begins with a folder of the repository is there."""
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", page.read_text()):
        if path.split("/")[0] in ROOMS and not path.startswith(("runs/", "data/")):
            assert any(ROOT.glob(path.replace("NAME", "*"))), f"{page.name} names {path}"


ITEM = re.compile(r"\s*(?:([-*+])|\d+[.)])\s")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_broken_line_makes_no_list(page):
    """A paragraph or an item whose next line begins with `78. ` or `- ` would be another one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        items = [ITEM.match(line) for line in block.strip("\n").splitlines()]
        kinds = {bool(item[1]) for item in items if item}
        assert not kinds or (items[0] and len(kinds) == 1), f"{page.name}: {block}"


def test_the_readme_is_short():
    """It says what rackrun is, how to start, what it needs and where to read on."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands_are_understood(page, options_by_command):
    """Every command of ours in a code block exists, and has the options that follow it."""
    for line in printed(page.read_text()):
        args = shlex.split(line, comments=True)
        ours = args[: args.index("--")] if "--" in args else args
        commands = [
            options_by_command[start]
            for n in range(1, 5)
            if (start := tuple(ours[:n])) in options_by_command
        ]
        assert commands, f"{page.name}: no such command: {line}"
        options = {"--help"}.union(*commands)
        if line.startswith(LAUNCHERS):
            for task in TASKS if "rerun" in ours else set(TASKS) & set(ours):
                options |= options_by_command[task,]
        unknown = [arg for arg in ours if OPTION.match(arg) and arg not in options]
        assert not unknown, f"{page.name}: {line}: no {unknown}"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_spelled_by_their_scripts_or_by_name(page):
    """No page calls a command by its module, except as the program of a torchrun."""
    text = re.sub(r" -- python -m rackrun.training evaluate\b", "", page.read_text())
    assert not BY_MODULE.findall(text)


def printed(text: str) -> list[str]:
    """Return the commands of ours in the code blocks of a page."""
    text = re.sub(r"\\\n *", "", text)  # a command of two lines
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    lines = "\n".join(blocks).splitlines()
    result = [OURS.search(line) for line in lines if "[options]" not in line]
    return [match.group() for match in result if match]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_text_exist(page, options_by_command):
    """Every option in backticks is one of our commands', or stands in the list of others'."""
    options = set().union(*options_by_command.values()) | FOREIGN
    for span in re.findall(r"`(--[^`]+)`", page.read_text()):
        unknown = {
            option
            for option in OPTION.findall(span)
            if not {option, option.replace("--no-", "--")} & options  # --no-X turns off a file's X
        }
        assert not unknown, f"{page.name}: `{span}`"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_imports_in_examples_work(page):
    """Every name that a Python block imports is there."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), block
