"""The documentation builds as a site that is whole and asks no other server for anything."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = ROOT / "docs" / "options.md"
REQUESTS = re.compile(r"""<(?:script|img|iframe|link)[^>]+(?:src|href)=["']?(?:https?:)?//""")


def test_the_site_builds_strictly(tmp_path):
    """No page is left out, no link is broken, every option has its row, nothing is fetched."""
    command = ("-m", "mkdocs", "build", "--strict", "--config-file", "docs/site/mkdocs.yml")
    built = subprocess.run(
        [sys.executable, *command, "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    options = (tmp_path / "options/index.html").read_text()
    for option in ("--hosts-needed", "--lease-seconds", "--batch-size", "--head-epochs", "--exif"):
        assert f"<td><code>{option}</code>" in options
    fetched = [page for page in tmp_path.rglob("*.html") if REQUESTS.search(page.read_text())]
    assert not fetched


def test_the_tables_of_options_are_those_of_the_source():
    """The page is whole in a clone, too; `python docs/site/options.py` writes it."""
    page = OPTIONS.read_text()
    program = [sys.executable, ROOT / "docs/site/options.py", "-"]
    filled = subprocess.run(program, input=page, capture_output=True, text=True, check=True)
    assert filled.stdout == page
    assert not re.search(r"^[^|\n]+\| default \|", page, re.MULTILINE)  # no row outside a table
    emptied = re.sub(r"^\|.*\n", "", page, flags=re.MULTILINE)
    again = subprocess.run(program, input=emptied, capture_output=True, text=True, check=True)
    assert again.stdout == page


def test_messages_of_the_troubleshooting_page_are_printed():
    """Each message there is text of the source, but for its names and numbers."""
    rooms = ("convert", "launcher", "nginx", "rackrun", "shards", "training")
    sources = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    printed = "\0".join(
        node.value
        for path in sources
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    page = (ROOT / "docs/howto/troubleshooting.md").read_text()
    messages = [" ".join(matches.split()) for matches in re.findall(r"\*\*`([^`]+)`\*\*", page)]
    assert len(messages) > 20
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert not [part for part in parts if part not in printed]
