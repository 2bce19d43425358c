"""README and docs are true: paths, options, imports and links exist, and the site is whole."""

import ast
import html
import importlib
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*DOCS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md")
}
FOREIGN = {  # of docker, iptables, Slurm, torchrun and the tests
    *("--ipc", "--shm-size", "--connlimit-mask", "--ntasks", "--ntasks-per-node"),
    *("--cpus-per-task", "--nproc-per-node", "--local_rank", "--fast", "--long"),
}
OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
BY_MODULE = re.compile(r"python3? -m rackrun(?!\.training (?:TASK|evaluate))\b.*")
ITEM = re.compile(r"\s*(?:([-*+])|\d+[.)])\s")
REQUESTS = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["']?(?:https?:)?//""")
COMMAND = re.compile(r"(?:\./run-(?:local|ssh|ray)|(?<!install )rackrun)(?!\S).*")
WAYS = ("local", "ssh", "ray", "node")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Return the folder of the site, built strictly: no link is broken, no page left out."""
    folder = tmp_path_factory.mktemp("site")
    command = ("-m", "mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml")
    built = subprocess.run(
        [sys.executable, *command, "--site-dir", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


@pytest.fixture(scope="module")
def helps(site):
    """Return what `--help` prints of each command, task and source of `convert`, by its words."""
    text = (site / "reference" / "options" / "index.html").read_text()
    parts = re.split(r"<h2 id=[^>]*>rackrun ([a-z ]+)<", text)[1:]
    helps = dict(zip(parts[::2], map(html.unescape, parts[1::2]), strict=True))
    assert {"local", "local catdog", "convert folder"} <= helps.keys()
    return helps


def test_no_page_of_the_site_asks_another_server_for_anything(site):
    assert not [page for page in site.rglob("*.html") if REQUESTS.search(page.read_text())]


def test_options_in_the_text_exist(helps):
    """Each in backticks is one of our commands'."""
    known = {option for text in helps.values() for option in OPTION.findall(text)} | FOREIGN
    unknown = {
        f"{page}: {option}"
        for page, text in PAGES.items()
        if page != "CHANGELOG.md"  # names what is gone
        for span in re.findall(r"`(--[^`]+)`", text)
        for option in OPTION.findall(span)
        if not {option, option.replace("--no-", "--")} & known  # --no-X turns off a file's X
    }
    assert not unknown


def test_commands_in_the_pages_exist_with_their_options(helps):
    """Each line that is typed: its command, its task, and the options of both."""
    lines = [
        f"{page}: {line}"
        for page, text in PAGES.items()
        for block in re.findall(r"^```(?:console|bash)\n(.*?)^```", text, re.M | re.S)
        for line in block.splitlines()
        if COMMAND.search(line) and not line.startswith("iptables")
    ]
    assert len(lines) > 100
    unknown = {
        line: options for line in lines if (options := options_of(line) - known_to(line, helps))
    }
    assert not unknown


def words_of(line):
    """Return the words of a command line up to `--`, beginning with the command's name."""
    line = COMMAND.search(line)[0].partition(" -- ")[0]
    door, *words = shlex.split(line, comments=True)
    commands = (*WAYS, "check", "rack", "ps", "rerun", "report", "attach", "logs", "status", "stop")
    commands += ("evaluate", "predict", "models", "export", "convert", "doctor", "serve")
    named = words[:1] and words[0] in (*commands, "completion")
    return words if door == "rackrun" or named else [door.removeprefix("./run-"), *words]


def options_of(line):
    """Return the options of a command line."""
    return {found[0] for word in words_of(line) if (found := OPTION.match(word))}


def known_to(line, helps):
    """Return the options that the command of a line has, and its task."""
    first, *words = words_of(line)
    names = {first, f"{first} {words[0]}" if words else first}
    if first in (*WAYS, "rerun"):
        names |= {f"local {word}" for word in words} or {"local catdog"}
        names |= {"ssh", "local catdog"} if first == "rerun" else set()
        names |= (
            {"local catdog"} if any(word.endswith((".py", ".toml")) for word in words) else set()
        )
    texts = [text for name, text in helps.items() if name in names]
    return {option for text in texts for option in OPTION.findall(text)} | FOREIGN | {"--help"}


def test_paths_exist():
    """Each in backticks that begins with a folder of the repository is there."""
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name[0] != "."}
    absent = [
        f"{page}: {path}"
        for page, text in PAGES.items()
        for path in re.findall(r"`((?:[\w.-]+/)+[\w.*-]*)`", text)
        if path.split("/")[0] in rooms - {"runs", "data"}
        and not any(ROOT.glob(path.replace("NAME", "*")))
    ]
    assert not absent


def test_imports_in_examples_work():
    for text in PAGES.values():
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom) and node.module:
                    module = importlib.import_module(node.module)
                    assert all(hasattr(module, alias.name) for alias in node.names), block


def test_commands_are_spelled_by_their_scripts_or_by_name():
    """No page calls one by its module, except as the program of a torchrun."""
    assert not [page for page, text in PAGES.items() if BY_MODULE.search(text)]


def test_a_broken_line_makes_no_list():
    """A paragraph or an item whose next line begins with `78. ` or `- ` would be another one."""
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        for block in re.split(r"\n\s*\n", text):
            items = [ITEM.match(line) for line in block.strip("\n").splitlines()]
            kinds = {bool(item[1]) for item in items if item}
            assert not kinds or (items[0] and len(kinds) == 1), f"{page}: {block}"


def test_the_readme_is_short_and_its_links_lead_somewhere():
    readme = PAGES["README.md"]
    assert len(readme.splitlines()) <= 100
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert links and not [link for link in links if not (ROOT / link).exists()]


def test_messages_on_the_page_of_exit_codes_are_printed():
    """Each message there is text of the source, but for its names and numbers."""
    rooms = ("convert", "launcher", "nginx", "rackrun", "shards", "training")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    printed = "\0".join(
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = PAGES["docs/reference/exit-codes.md"]
    messages = [" ".join(matches.split()) for matches in re.findall(r"\*\*`([^`]+)`\*\*", page)]
    assert len(messages) > 15
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert not [part for part in parts if part not in printed]
