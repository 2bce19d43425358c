"""Options of a launch, typed or from Python, and what is refused before a host is contacted."""

import ast
import json
import re
import subprocess
import tomllib
from importlib import import_module
from itertools import chain
from pathlib import Path

import pytest

import rackrun
from rackrun.cli import dispatch
from rackrun.commandline.help_page import Head
from rackrun.commandline.options import options as options_of
from rackrun.contract.tasks import TASKS, package_of
from rackrun.errors import UsageError
from rackrun.launcher import launch
from rackrun.launcher.commands.parse import (
    ELSEWHERE,
    OF_TASKS,
    from_names,
    read,
)
from rackrun.launcher.commands.ray import RayOptions
from rackrun.launcher.commands.settings import (
    CHECK_HEAD,
    NODE_HEAD,
    NodeOptions,
    SshOptions,
)
from rackrun.launcher.run.job import TaskWork
from rackrun.launcher.run.settings import LocalOptions
from rackrun.training.config import INSTEAD, Config
from rackrun.training.entry import run_command
from tests.lab.warm import ROOT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": True, "hosts": "hosts.txt"}, "check is for the command line; leave it out"),
        ({"dry_run": True}, "dry_run is for the command line"),
        ({"elastic": True}, "elastic: no longer an option; type --max-restarts 3"),
        ({"json": True}, "json is for the command line"),
        ({"detach": True, "hosts": "hosts.txt"}, "detach is for the command line"),
        ({"env": "A=1"}, "env='A=1': must be a list"),
        ({"nproc": "2"}, "nproc='2': must be of type int"),
        ({"name": 7}, "name=7: must be of type str"),
        ({"lease_seconds": "5"}, "lease_seconds='5': must be of type float"),
        ({"serve": 1}, "serve=1: must be of type bool"),
        ({"horses": 2}, "'horses'"),
    ],
)
def test_what_means_nothing_from_python_is_refused(options, says):
    """No option is read as another one: a call that only looks would otherwise train."""
    with pytest.raises(UsageError) as caught:
        launch("--", "true", **options)
    assert says in str(caught.value)


def test_values_from_python_are_what_the_command_line_makes_of_them():
    """Paths may be words and words paths, a list is as good as a tuple, 5 is 5.0 seconds."""
    values = {"runs": "out", "env": ["A=1"], "lease_seconds": 5, "dry_run": False, "nproc": 2}
    options = from_names(LocalOptions, {**values, "python": Path("/bin/python"), "serve": True})
    assert (options.runs, options.env, options.python) == (Path("out"), ("A=1",), "/bin/python")
    assert (options.limits.lease_seconds, options.nproc, options.serving.serve) == (5.0, 2, True)
    assert from_names(SshOptions, {"hosts": "hosts.txt"}).hosts == Path("hosts.txt")


def test_other_launchers_options_are_understood():
    """Scripts for torchrun go on, typed and from Python."""
    words = ["--nproc-per-node", "2", "catdog", "--master_port=29500", "--batch_size", "4"]
    line = read("node", NodeOptions, NODE_HEAD, words)
    assert (line.options.nproc, line.options.port) == (2, 29500)
    assert line.work == TaskWork("catdog", ("--batch_size", "4"))
    assert from_names(LocalOptions, {"nproc_per_node": 3}).nproc == 3


def test_type_checkers_know_what_programs_may_import():
    """The stub has what `rackrun` hands out, from the same modules, and each package its marker."""
    stub = ast.parse((ROOT / "rackrun" / "__init__.pyi").read_text())
    expected = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in ast.walk(stub)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert "load_model = load_of_any_task" in map(ast.unparse, stub.body)  # a name of another kind
    expected["load_model"] = expected.pop("load_of_any_task")
    meant = {"report": "rackrun.reports.report"}
    for name, position in rackrun.PUBLIC.items():
        module, _, original = position.partition(":")
        meant[name] = f"{module}.{original or name}"
    assert expected == meant
    marked = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    for package in {position.partition(".")[0] for position in expected.values()}:
        assert (ROOT / package / "py.typed").exists(), package
        assert "py.typed" in marked["package-data"][package], package


def test_ranks_know_the_commit_of_the_launchers_code(cli, tmp_path):
    """Code that --sync sent to a host has no git there."""
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], check=True)
    commit = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    (host,) = json.loads(cli("rackrun local --dry-run --json -- true").out)["hosts"]
    assert dict(host["environment"])["RACKRUN_COMMIT"] == commit


CLASSES = {"ssh": SshOptions, "local": LocalOptions, "node": NodeOptions}

ACCEPTED = (
    *("local --dry-run --json", "ssh --check --json", "ssh --check --deep", "ssh --check"),
    *("ssh --sync --sync-untracked .env", "ssh --sync --sync-wheels w", "local --no-serve"),
    *("ssh --detach --detach-seconds 5", "ssh --sweep lr=0.1 --sweep-hosts 2"),
    *("ssh --max-restarts 3 --spares 1", "ssh --max-restarts 3 --min-hosts 1", "node"),
    *("local --serve --serve-native", "node --serve --serve-address 10.0.0.1"),
)


@pytest.mark.parametrize("typed", ACCEPTED)
def test_what_the_refusal_of_an_option_without_effect_says_to_type_is_taken(typed):
    way, *args = typed.split()
    head = Head("", "", ())
    assert read(way, CLASSES[way], head, [*args, *(["hosts.txt"] if way == "ssh" else [])])


@pytest.mark.parametrize("learning_rate", ["--lr", "--learning-rate", "--learning_rate"])
def test_names_that_other_programs_have_for_options_are_taken(learning_rate, capsys):
    words = f"{learning_rate} 0.1 --batch_size 8 --num-workers=2 --wd 0 --data x".split()
    assert not run_command("catdog", "./run-local catdog", ["check", *words])
    assert json.loads(capsys.readouterr().out)["batch_size"] == 8


def names_of(settings: type[object]) -> set[str]:
    return {row.name for row in options_of(settings)}


def test_no_option_belongs_to_the_launcher_and_to_a_task():
    """So one behind a task is surely the launch's, whichever way of launching it is."""
    doors = (LocalOptions, SshOptions, RayOptions, NodeOptions)
    launchers = set(ELSEWHERE).union(*map(names_of, doors))
    recipes = [import_module(f"{package_of(task)}.recipes").RECIPES.values() for task in TASKS]
    assert not launchers & set().union(*map(names_of, [Config, *chain(*recipes)]))


def test_options_that_a_hint_puts_behind_a_task_are_those_of_training():
    assert set(OF_TASKS) <= {option.name for option in options_of(Config)}
    assert not set(OF_TASKS) & names_of(SshOptions)


def test_options_of_other_training_programs_lead_to_options_of_ours():
    recipes = [import_module(f"{package_of(task)}.recipes").RECIPES.values() for task in TASKS]
    ours = set().union(*map(names_of, [Config, LocalOptions, *chain(*recipes)]))
    named = set(re.findall(r"--[a-z-]+", " ".join(INSTEAD.values())))
    assert named and named <= ours and not ours & set(INSTEAD)


def test_the_help_of_check_leaves_out_options_of_runs(capsys):
    """What it leaves out are options, and none that has an effect with --check."""
    with pytest.raises(SystemExit):
        dispatch.run(["check", "--help"])
    shown = capsys.readouterr().out
    fields = set(CHECK_HEAD.left_out.split())
    assert fields <= {option.field for option in options_of(SshOptions)}
    assert "--deep" in shown and "--hosts-needed" in shown and "Start and restarts:" in shown
    for field in fields:
        assert f"  --{field.replace('_', '-')} " not in shown
