"""README and docs are true: paths, options and imports exist; mkdocs follows the links of docs."""

import ast
import importlib
import re
from pathlib import Path

from tests.lab.options import OPTION, known_options

ROOT = Path(__file__).parents[3]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in (*DOCS, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md")
}
FOREIGN = {  # of docker, mmdebstrap, Slurm and iptables
    *("--ipc", "--shm-size", "--read-only", "--tmpfs", "--build-arg", "--customize-hook"),
    *("--ntasks", "--ntasks-per-node", "--cpus-per-task", "--connlimit-mask"),
    *("--master-addr", "--master-port", "--nnodes", "--node-rank", "--nproc-per-node"),  # torchrun
    *("--long", "--losses", "--minutes", "--only", "--peers", "--rounds", "--scratch"),  # tests
}
BY_MODULE = re.compile(r"python3? -m rackrun(?!\.training (?:TASK|evaluate))\b.*")
ITEM = re.compile(r"\s*(?:([-*+])|\d+[.)])\s")


def test_options_in_the_text_exist(tmp_path):
    """Each in backticks is one of our commands', whose help, or docs/options.md, has it."""
    known = known_options(tmp_path) | FOREIGN
    unknown = {
        f"{page}: {option}"
        for page, text in PAGES.items()
        if page != "CHANGELOG.md"  # names what is gone
        for span in re.findall(r"`(--[^`]+)`", text)
        for option in OPTION.findall(span)
        if not {option, option.replace("--no-", "--")} & known  # --no-X turns off a file's X
    }
    assert not unknown


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
    assert len(readme.splitlines()) <= 120
    links = re.findall(r"\]\((?!https?:)([^)#]+)", readme)
    assert links and not [link for link in links if not (ROOT / link).exists()]
