"""What import-linter and ruff, by their rules in pyproject.toml, do not look at."""

import ast
import re
import sys
from importlib import import_module
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("rackrun", "launcher", "shards", "convert", "nginx", "training")
TEXTS = {
    str(path.relative_to(ROOT)): path.read_text()
    for package in (*PACKAGES, "catdog", "imagenet", "mnist")
    for path in (ROOT / package).rglob("*.py")
}
SENT = ("rackrun.launcher.remote", "rackrun.contract", "rackrun.reports")
SHELL = re.compile(r'"(?:/bin/)?(?:ba|da)?sh", "-c"|\[shell, "-c"')


def test_what_is_sent_to_hosts_needs_nothing_but_the_standard_library():
    graph = grimp.build_graph("rackrun", include_external_packages=True)
    sent = {module for room in SENT for module in (room, *graph.find_descendants(room))}
    needed = {need for module in sent for need in graph.find_modules_directly_imported_by(module)}
    assert len(sent) > 20
    assert needed <= sent | sys.stdlib_module_names


def test_a_shell_reads_a_line_in_four_places_only():
    shells = {name for name, text in TEXTS.items() if SHELL.search(text)}
    assert shells == {
        "launcher/transport/ssh/connect.py",  # ProxyCommand, a line of ssh_config
        "launcher/run/hosts.py",  # setup=, a line of the host file
        "launcher/remote/upload.py",  # what makes the environment: a constant
        "launcher/commands/on.py",  # what starts rackrun on another machine: a constant
    }


def test_variables_and_commands_are_spelled_in_one_place():
    variables, commands = (
        {name for name, text in TEXTS.items() if any(map(spelled.search, strings(text)))}
        for spelled in (
            re.compile(r"RACKRUN_[A-Z]"),
            re.compile(r"python -m rackrun(\.(convert|nginx)| |$)|\./run-(ssh|local|ray)"),
        )
    )
    assert variables == {"rackrun/contract/variables.py"}
    assert commands <= {"rackrun/commands.py"}  # others ask it how the user calls rackrun


def strings(text):
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    constants = [n for n in nodes if isinstance(n, ast.Constant) and n not in docstrings]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_measurements_find_what_they_import():
    for path in sorted((ROOT / "bench").glob("*.py")):
        import_module(f"bench.{path.stem}")
