"""Print how many names of the product contract tests and their helpers use: python -m tests.names

Those that are imported, attributes of imported modules, and names in strings. `--list` lists them.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = ("contract", "field", "lab")
MOST = 60
IMPORT = re.compile(r"\bfrom (rackrun[\w.]*) import ([\w, ]+)")
DOTTED = re.compile(r"\brackrun(?:\.\w+)+(?::\w+)?")


def main() -> None:
    """Print the count of each room and of all together."""
    used = {room: set[str]() for room in ROOMS}
    for room, names in used.items():
        for path in (ROOT / "tests" / room).rglob("*.py"):
            tree = ast.parse(path.read_text())
            names |= {*imported(tree), *in_strings(tree), *attributes(tree)}
    together = sorted(set().union(*used.values()))
    counts = ", ".join(f"{room} {len(names)}" for room, names in used.items())
    listed = together if "--list" in sys.argv else []
    lines = [
        f"names of rackrun: {counts}, together {len(together)} (goal: at most {MOST})",
        *listed,
    ]
    sys.stdout.write("\n".join([*lines, ""]))


def imported(tree: ast.Module) -> Iterator[str]:
    """Yield what a file imports by name, but for modules."""
    yield from (name for name in from_imports(tree).values() if not is_module(name))


def from_imports(tree: ast.Module) -> dict[str, str]:
    """Return the names in a file that are imported from the product: each with its module."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rackrun"
        for alias in node.names
    }


def in_strings(tree: ast.Module) -> Iterator[str]:
    """Yield the names in programs, import paths and patches that are strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for module, names in IMPORT.findall(node.value):
                yield from (f"{module}.{name}" for name in re.findall(r"\w+", names))
            for name in DOTTED.findall(IMPORT.sub("", node.value)):
                if is_module(".".join(name.split(".")[:2])):
                    yield name.replace(":", ".")


def attributes(tree: ast.Module) -> Iterator[str]:
    """Yield the attributes of imported modules: `rackrun.train`, `index.Row`."""
    modules = {"rackrun": "rackrun", **from_imports(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {each.asname: each.name for each in node.names if each.asname}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node.value).partition(".")
            module = f"{modules.get(first, '?')}.{rest}".rstrip(".")
            name = f"{module}.{node.attr}"
            if module.startswith("rackrun") and is_module(module) and not is_module(name):
                yield name


def is_module(name: str) -> bool:
    """Return True for a file or folder of the product."""
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


if __name__ == "__main__":
    main()
