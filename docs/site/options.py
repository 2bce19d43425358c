"""Fill the tables of docs/options.md from the settings classes: python docs/site/options.py [-]"""

import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "options.md"
TABLE = re.compile(r"(<!-- options of (\S+):(\w+) -->\n)\n*(?:\|.*\n)*\n*")


def filled(page: str) -> str:
    """Return the page with a table below every mark."""
    text = TABLE.sub(
        lambda mark: f"{mark[1]}\n{table(getattr(import_module(mark[2]), mark[3]))}\n\n", page
    )
    return f"{text.rstrip()}\n"


def table(settings: type[Any]) -> str:
    """Return the options that a settings class declares, or has other defaults for, as a table."""
    from rackrun.commandline.options import declared

    lines = ["| option | default | |", "|---|---|---|"]
    for option in declared(settings):
        name = f"`{option.name}`"
        if option.has_negation:
            name += f", `--no-{option.key}`"
        default = f"`{option.default_text}`" if option.default_text else ""
        lines.append(f"| {name} | {default} | {cell(option.help)} |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Return help as a cell of a table."""
    return text.replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:] == ["-"]:  # from standard input to standard output
        sys.stdout.write(filled(sys.stdin.read()))
    else:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
