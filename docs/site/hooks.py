"""What mkdocs cannot do alone: option tables, and files of the repository outside docs/."""

import ast
import os
import re
from dataclasses import MISSING
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from rackrun.help.options import default_of, texts, written

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent

LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")
TABLE = re.compile(r"^<!-- options of (\S+):(\w+) -->$", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the changelog, and the files outside docs/ that a page links to."""
    pages = [*DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"]
    linked = {(page.parent / name).resolve() for page in pages for name in LINK.findall(text(page))}
    outside = {path for path in linked if not path.is_relative_to(DOCS)} | {ROOT / "CHANGELOG.md"}
    for path in sorted(outside):
        name = str(path.relative_to(ROOT))
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files are in the site, and draw the tables of options."""
    source = Path(page.file.abs_src_path or "").parent
    here = Path(page.file.src_uri).parent
    markdown = LINK.sub(lambda link: os.path.relpath(place(source / link[1]), here), markdown)
    return TABLE.sub(lambda mark: table(getattr(import_module(mark[1]), mark[2])), markdown)


def place(path: Path) -> Path:
    """Return where the site has a file: pages of docs/ at its top, beside the repository's."""
    path = path.resolve()
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def table(settings: type[Any]) -> str:
    """Return the fields that a settings class declares as a table of options."""
    rows = ["| option | default | |", "|---|---|---|"]
    for name, annotation in declared(settings).items():
        help_text = next((text for text in texts(settings, name) if text), "")
        if help_text and "Hidden" not in annotation:
            default = shown(default_of(settings, name))
            rows.append(f"| {option(name, annotation, default)} | {default} | {cell(help_text)} |")
    return "\n".join(rows)


def declared(settings: type[Any]) -> dict[str, str]:
    """Return the names of a class's own fields, with their annotations as written."""
    return {name: ast.unparse(annotation) for name, (annotation, _) in written(settings).items()}


def option(name: str, annotation: str, default: str) -> str:
    """Return a field as it is typed."""
    if "Positional" in annotation:
        return f"`{name.upper().replace('_', '-')}`"
    words = name.replace("_", "-")
    return f"`--{words}`, `--no-{words}`" if default == "`on`" else f"`--{words}`"


def shown(default: object) -> str:
    """Return a default as a cell."""
    if isinstance(default, bool):
        return "`on`" if default else ""
    if default in ("", (), None) or default is MISSING:
        return ""
    return f"`{default}`"


def cell(text: str) -> str:
    """Return help as a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


def text(path: Path) -> str:
    """Return the text of a page."""
    return path.read_text(encoding="utf-8")
