"""The arrows between the packages go one way."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PACKAGES = ("launcher", "shards", "convert", "nginx", "training", "imagenet", "catdog")

MAY_IMPORT = {
    "launcher": {"nginx"},
    "nginx": set(),
    "shards": set(),
    "convert": {"shards"},
    "training": {"shards"},
    "imagenet": {"training", "shards"},
    "catdog": {"training", "shards"},
}

ONE_DOOR = {  # a foreign library -> the only places that may know it
    "fabric": {"launcher/ssh.py"},
    "paramiko": {"launcher/ssh.py"},
    "ray": {"launcher/ray_cluster.py"},
    "torch": {"training", "imagenet", "catdog"},
    "torchvision": {"training", "imagenet", "catdog"},
    "webdataset": {"training"},
}


def imports(path: Path) -> set[str]:
    """The top-level modules a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add((node.module or "").split(".")[0])
    return found


FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_package_may(path: Path) -> None:
    """Arrows go one way, and each foreign library has one door."""
    relative = path.relative_to(ROOT)
    package = relative.parts[0]
    found = imports(path)
    assert found & set(PACKAGES) <= MAY_IMPORT[package] | {package}
    for library in found & set(ONE_DOOR):
        assert ONE_DOOR[library] & {package, str(relative)}, f"{relative} imports {library}"


def test_the_agent_needs_nothing_but_the_standard_library() -> None:
    """The agent's source is sent to hosts where the project may not be installed."""
    import sys

    assert imports(ROOT / "launcher" / "agent.py") <= set(sys.stdlib_module_names)
