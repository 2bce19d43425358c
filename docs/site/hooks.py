"""What mkdocs cannot do alone: files of the repository outside docs/, and the page of options."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from options import page as page_of_options

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent

LINK = re.compile(r"(?<=\]\()(?!https?:)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the options, the changelog, and the files outside docs/ that a page links to."""
    pages = [*DOCS.rglob("*.md"), ROOT / "CHANGELOG.md"]
    linked = {(page.parent / name).resolve() for page in pages for name in LINK.findall(text(page))}
    outside = {path for path in linked if not path.is_relative_to(DOCS)} | {ROOT / "CHANGELOG.md"}
    for path in sorted(outside):
        name = str(path.relative_to(ROOT))
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    files.append(File.generated(config, "reference/options.md", content=page_of_options()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where the files are in the site."""
    if page.file.abs_src_path is None:  # generated: its links are those of the site
        return markdown
    source, here = Path(page.file.abs_src_path).parent, Path(page.file.src_uri).parent
    return LINK.sub(lambda link: os.path.relpath(place(source / link[1]), here), markdown)


def place(path: Path) -> Path:
    """Return where the site has a file: pages of docs/ at its top, beside the repository's."""
    path = path.resolve()
    return path.relative_to(DOCS if path.is_relative_to(DOCS) else ROOT)


def text(path: Path) -> str:
    """Return the text of a page."""
    return path.read_text(encoding="utf-8")
