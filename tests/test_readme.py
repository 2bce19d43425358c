"""README and docs are true: links, paths, imports, commands and options exist."""

import ast
import importlib
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from rackrun.contract.tasks import TASKS
from tests import warm

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [*DOCS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]

COMMANDS: dict[tuple[str, ...], list[str]] = {
    ("./run-tests",): ["./run-tests"],
    ("./run-local",): ["-m", "launcher", "local"],
    ("./run-local", "ps"): ["-m", "launcher", "ps"],
    ("./run-local", "rerun"): ["-m", "launcher", "local"],
    ("./run-ray",): ["-m", "launcher", "ray"],
    ("./run-ssh",): ["-m", "launcher", "ssh"],
    **{
        ("./run-ssh", verb): ["-m", "launcher", "ssh", verb]
        for verb in ("attach", "status", "logs", "ps", "stop")
    },
    **{
        ("rackrun", verb): ["-m", "rackrun", verb]
        for verb in (
            *("board", "check", "completion", "convert", "evaluate", "export", "predict"),
            *("local", "ps", "ssh"),
        )
    },
    **{
        ("python", "-m", *words): ["-m", *words]
        for words in (
            ("launcher", "node"),
            *(
                ("convert", verb)
                for verb in (
                    "catdog",
                    "csv",
                    "folder",
                    "hf",
                    "imagefolder",
                    "imagenet",
                    "index",
                    "mnist",
                    "sidecars",
                )
            ),
            *(("convert", verb) for verb in ("finish", "summary", "verify")),
            *(("nginx",), ("nginx", "status"), ("nginx", "stop")),
            ("training", "evaluate"),
            ("training", "predict"),
            ("training", "ledger"),
            ("training", "track"),
            ("rackrun", "report"),
            *((task,) for task in TASKS if (ROOT / task).is_dir()),
            *((task, "predict") for task in TASKS if (ROOT / task).is_dir()),
            *(("training", task) for task in TASKS),
        )
    },
}
"""What a page may print -> whose `--help` lists the options: a script, or words for Python."""

LAUNCHERS = ("rackrun ", "./run-local", "./run-ray", "./run-ssh", "python -m launcher node")
OURS = re.compile(
    r"(?<!from )(?:rackrun [a-z]+|\./run-(?:local|ssh|ray|tests)|"
    r"python -m (?:convert|nginx|rackrun|training|launcher|" + "|".join(TASKS) + r"))(?=\s|$).*"
)
FOREIGN = {  # of docker, mmdebstrap, Slurm and iptables
    *("--ipc", "--shm-size", "--read-only", "--tmpfs", "--build-arg", "--customize-hook"),
    *("--ntasks", "--ntasks-per-node", "--connlimit-mask"),
    "--logdir",  # of tensorboard
    *("--minutes", "--only", "--peers", "--rounds", "--scratch"),  # of bench/
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
ROOMS = sorted(path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != ".")


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, ...], set[str]]:
    """Return the options in the help of each command."""
    return {command: options_of(words) for command, words in COMMANDS.items()}


def options_of(words: list[str]) -> set[str]:
    told = (
        warm.run(*words, "--help", start=warm.Launcher, cwd=ROOT)
        if words[0] == "-m"
        else subprocess.run([*words, "--help"], cwd=ROOT, capture_output=True, text=True)
    )
    assert told.returncode == 0, told.stderr
    return set(OPTION.findall(told.stdout))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
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
def test_paths_exist(page: Path) -> None:
    """Every path in backticks that begins with a folder of the repository is there."""
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", page.read_text()):
        if path.split("/")[0] in ROOMS and not path.startswith(("runs/", "data/")):
            assert any(ROOT.glob(path.replace("NAME", "*"))), f"{page.name} names {path}"


ITEM = re.compile(r"\s*(?:([-*+])|\d+[.)])\s")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_broken_line_makes_no_list(page: Path) -> None:
    """A paragraph or an item whose next line begins with `78. ` or `- ` would be another one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for block in re.split(r"\n\s*\n", text):
        items = [ITEM.match(line) for line in block.strip("\n").splitlines()]
        kinds = {bool(item[1]) for item in items if item}
        assert not kinds or (items[0] and len(kinds) == 1), f"{page.name}: {block}"


def test_the_readme_is_short() -> None:
    """It says what rackrun is, how to start, what it needs and where to read on."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_printed_commands_are_understood(
    page: Path, known: dict[tuple[str, ...], set[str]]
) -> None:
    """Every command of ours in a code block exists, and has the options that follow it."""
    for line in printed(page.read_text()):
        words = shlex.split(line, comments=True)
        own = words[: words.index("--")] if "--" in words else words
        commands = [known[start] for n in range(1, 5) if (start := tuple(own[:n])) in known]
        assert commands, f"{page.name}: no such command: {line}"
        options = {"--help"}.union(*commands)
        if line.startswith(LAUNCHERS):
            for task in set(TASKS) & set(own):
                options |= known["python", "-m", "training", task]
        unknown = [word for word in own if OPTION.match(word) and word not in options]
        assert not unknown, f"{page.name}: {line}: no {unknown}"


def printed(text: str) -> list[str]:
    """Return the commands of ours in the code blocks of a page."""
    text = re.sub(r"\\\n *", "", text)  # a command of two lines
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    blocks += re.findall(r"^ {4}(.*)$", text, re.MULTILINE)
    lines = "\n".join(blocks).splitlines()
    found = [OURS.search(line) for line in lines if "[options]" not in line]
    return [match.group() for match in found if match]


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_options_in_the_text_exist(page: Path, known: dict[tuple[str, ...], set[str]]) -> None:
    """Every option in backticks is one of our commands', or stands in the list of others'."""
    options = set().union(*known.values()) | FOREIGN
    for span in re.findall(r"`(--[^`]+)`", page.read_text()):
        unknown = {
            option
            for option in OPTION.findall(span)
            if not {option, option.replace("--no-", "--")} & options  # --no-X turns off a file's X
        }
        assert not unknown, f"{page.name}: `{span}`"


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_imports_in_examples_work(page: Path) -> None:
    """Every name that a Python block imports is there."""
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and node.module:
                module = importlib.import_module(node.module)
                assert all(hasattr(module, alias.name) for alias in node.names), block
