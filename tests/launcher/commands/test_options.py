"""Options of a launch, typed or from Python, and what is refused before a host is contacted."""

import ast
import os
import re
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import rackrun
from rackrun.errors import SaveError, UsageError
from rackrun.launcher import launch
from rackrun.launcher.commands import local_run
from rackrun.launcher.commands.parse import from_names, parse, split, work_of
from rackrun.launcher.commands.settings import NodeOptions, SshOptions
from rackrun.launcher.commands.ssh_run import refuse_what_stays
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec, resolved
from rackrun.launcher.lifecycle.serving import folder_to_serve
from rackrun.launcher.lifecycle.this_machine import plan_alone
from rackrun.launcher.preflight.checks import CHECKS, check_allowed
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.settings import HostOptions, LocalOptions, Serving
from rackrun.run_folder import RunFolder, new_run_folder
from rackrun.user_code.revision import git_commit
from tests.lab import warm
from tests.lab.drive import ROOT


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"check": True, "hosts": "hosts.txt"}, "check is for the command line: type: ./run-ssh"),
        ({"dry_run": True}, "dry_run is for the command line"),
        ({"elastic": True}, "elastic: no longer an option; type --max-restarts 3"),
        ({"json": True}, "json is for the command line"),
        ({"detach": True, "hosts": "hosts.txt"}, "a run stays attached"),
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
    launcher_args, rest = split(
        ["--nproc-per-node", "2", "--master_port=29500", "catdog"], NodeOptions
    )
    assert (launcher_args, rest) == (["--nproc-per-node", "2", "--master-port=29500"], ["catdog"])
    options = parse(NodeOptions, "node", launcher_args, "")
    assert (options.nproc, options.port) == (2, 29500)
    assert from_names(LocalOptions, {"nproc_per_node": 3}).nproc == 3


@pytest.mark.parametrize(
    "values",
    [{"spares": -1}, {"max_restarts": -1}, {"min_hosts": -2}, {"port": 70000}, {"port": -1}],
)
def test_numbers_of_nothing_are_refused(values):
    """They would come back as an error of a list, or of a host."""
    ((name, value),) = values.items()
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')} {value}: must be"):
        HostOptions(**values)


def test_a_check_that_the_plan_is_made_of_cannot_be_left_out():
    """--ignore-check names the others; unknown checks and required ones are distinguished."""
    check_allowed([check.name for check in CHECKS if check.name not in ("network", "master")])
    for name in ("network", "master"):
        with pytest.raises(UsageError, match=f"--ignore-check {name}: no run can do without it"):
            check_allowed(["code", name])
    with pytest.raises(UsageError, match="no such check; there are: python"):
        check_allowed(["nothing"])


def test_a_run_folder_that_is_made_in_between_is_left_to_the_other(tmp_path):
    """Two launches of one task in a second: a link to nowhere is not seen, but takes the name."""
    for second in range(60):
        name = time.strftime("%Y%m%d-%H%M%S-catdog", time.localtime(time.time() + second))
        (tmp_path / name).symlink_to("nowhere")
    assert new_run_folder(tmp_path, "catdog").path.name.endswith("-catdog-2")
    assert new_run_folder(tmp_path, "catdog").path.name.endswith(("-catdog-2", "-catdog-3"))


def test_a_run_folder_that_cannot_be_made_ends_with_74(tmp_path):
    """faults.md: what was typed is right, only the disk refuses."""
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="type: --runs FOLDER") as caught:
        new_run_folder(tmp_path / "file", "catdog")
    assert caught.value.exit_code == 74


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("catdog",), "catdog is a task; the host file comes first: ./run-ssh hosts.txt catdog"),
        (("--plain", "catdog", "--epochs", "2"), "./run-ssh --plain hosts.txt catdog"),
        (
            ("--detach", "--max-restarts", "1", "--spares", "9", "hosts.txt"),
            "leaves fewer than 1 to train; type --spares 0",
        ),
        (("--ignore-check", "master", "hosts.txt", "--", "true"), "no run can do without it"),
        (("--check", "hosts.txt", "catdog", "--epohcs", "2"), "did you mean --epochs?"),
    ],
)
def test_what_is_typed_wrong_is_one_line(args, says, tmp_path):
    """Code 64, and what to type; no host is there to be asked."""
    (tmp_path / "hosts.txt").write_text("127.0.0.1:1\n")
    ended = warm.run(
        *("-m", "rackrun.launcher", "ssh", *args),
        start=warm.Launcher,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (ended.returncode, ended.stdout) == (64, ""), ended.stderr
    assert says in ended.stderr
    assert "Traceback" not in ended.stderr


BAD_URLS = [
    ("http://[::1/", "not a URL"),
    ("http://h:99999/", "not a URL"),
    ("http://h:x/", "not a URL"),
    ("http://h:0/", "not the URL of a folder"),
    ("http:///data", "not the URL of a folder"),
    ("http://h/?q", "not the URL of a folder"),
    ("http://h/#f", "not the URL of a folder"),
    ("http://h/é/", "write it as it goes over the wire: …/%C3%A9/"),
    ("http://h/\udce9/", "write it as it goes over the wire: …/%E9/"),
    ("http://h/a b/", "write it as it goes over the wire: …/a%20b/"),
    (f"http://{'a' * 64}.example/", "not the URL of a folder"),
    ("http://a..b/", "not the URL of a folder"),
    ("http://xn--\u0661/", "not the URL of a folder"),
    ("http://user:hunter2@h/", "passwords in URLs end up in logs"),
    ("http://hunter2@h/", "passwords in URLs end up in logs"),
    ("https://user:hunter2@[::1/", "not a URL"),
    ("https://user:hunter2@h:x/", "not a URL"),
]


@pytest.mark.parametrize(("url", "says"), BAD_URLS, ids=range(len(BAD_URLS)))
@pytest.mark.parametrize("form", [("--data",), ("--epochs", "2", "--data=")])
def test_a_url_that_no_rank_could_read_is_refused(url, says, form):
    """64, before anything is written or asked; a password is not repeated."""
    *others, last = form
    args = [*others, last + url] if last.endswith("=") else [*form, url]
    with pytest.raises(UsageError) as caught:
        work_of(["catdog", *args, "--data", "http://127.0.0.1:8080/"])
    assert says in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_good_urls_and_folders_are_taken():
    """Also IPv6, a port, a path, another alphabet's name, and what is no URL at all."""
    for data in ("http://[::1]:8080/a%20b/", "https://bücher.example/x/", "data/é", "h:5/x", ""):
        assert work_of(["catdog", "--data", data]) is not None


@pytest.mark.parametrize("way", ["local", "ssh", "node"])
def test_a_password_in_a_url_is_written_nowhere(way, tmp_path):
    """Neither printed by --dry-run, nor in a plan, nor in a rank's command line: 64, one line."""
    (tmp_path / "hosts.txt").write_text("127.0.0.1:1\n")
    hosts = ["hosts.txt"] * (way == "ssh")
    args = ["--dry-run", *hosts, "catdog", "--data", "http://user:hunter2@127.0.0.1/"]
    ended = warm.run(
        *("-m", "rackrun.launcher", way, *args),
        start=warm.Launcher,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (ended.returncode, ended.stdout) == (64, "")
    assert len(ended.stderr.splitlines()) == 1 and "hunter2" not in ended.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["hosts.txt"]


def test_a_port_that_is_always_taken_ends_the_run(tmp_path):
    """On this machine, too, the start is tried twice and no more."""
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\necho 'RuntimeError: the server socket failed, name: EADDRINUSE' >&2; exit 1\n"
    )
    python.chmod(0o755)
    options = LocalOptions(python=str(python), runs=tmp_path / "runs", plain=True)
    result = local_run.launch_local(Command(("true",)), options)
    assert result.port_was_taken
    assert len(list((tmp_path / "runs").glob("2*"))) == 2


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


def test_ranks_know_the_commit_of_the_launchers_code(tmp_path, monkeypatch):
    """Code that --sync sent to a host has no git there."""
    monkeypatch.chdir(ROOT)
    options = LocalOptions()
    job = options.jobs.job(Command(("true",)), RunFolder(tmp_path))
    environment = dict(plan_alone(job, 1, "").hosts[0].environment)
    assert environment["RACKRUN_COMMIT"] == git_commit(ROOT) != ""


CLASSES = {"ssh": SshOptions, "local": LocalOptions, "node": NodeOptions}

WITHOUT_EFFECT = [
    ("local --json", "--json has no effect: a launch prints lines", "--dry-run --json"),
    ("ssh --json", "--json has no effect: a launch prints lines", "--check --json"),
    ("ssh --check --deep --json", "--json has no effect: --deep ends with a run", "--check --deep"),
    ("ssh --deep", "--deep has no effect: only --check measures", "--check --deep"),
    ("ssh --check --dry-run", "--dry-run has no effect: --check starts no ranks either", "--check"),
    ("ssh --sync-untracked .env", "--sync-untracked .env has no effect: nothing is copied",
     "--sync --sync-untracked .env"),
    ("ssh --sync-wheels w", "--sync-wheels w has no effect: nothing is copied",
     "--sync --sync-wheels w"),
    ("ssh --detach-seconds 5", "--detach-seconds 5.0 has no effect: a launch without --detach",
     "--detach --detach-seconds 5"),
    ("ssh --sweep-hosts 2", "or type --sweep lr=0.1,0.3, or --hosts-needed 2",
     "--sweep lr=0.1 --sweep-hosts 2"),
    ("ssh --spares 1", "--spares 1 has no effect: a run continues after a loss by a restart",
     "--max-restarts 3 --spares 1"),
    ("ssh --min-hosts 1", "leave it out, or type --max-restarts 3",
     "--max-restarts 3 --min-hosts 1"),
    ("local --no-serve --serve-port 80", "--serve-port 80 has no effect: --no-serve", "--no-serve"),
    ("local --serve --serve-native --serve-image me/nginx", "--serve-image me/nginx has no effect",
     "--serve --serve-native"),
    ("node --serve-address 10.0.0.1", "--serve-address 10.0.0.1 has no effect: a node serves with",
     "--serve --serve-address 10.0.0.1"),
    ("node --no-serve", "--no-serve has no effect: a node serves nothing", ""),
]  # fmt: skip
"""What is typed, what it is answered with, and what is accepted instead."""


@pytest.mark.parametrize(("typed", "refusal", "accepted"), WITHOUT_EFFECT)
def test_an_option_without_effect_is_refused_by_name(typed, refusal, accepted):
    """A launch would go on as if it had not been typed; what the message says to type is taken."""
    way, *args = typed.split()
    with pytest.raises(UsageError, match=re.escape(refusal)):
        parse(CLASSES[way], way, args)
    assert parse(CLASSES[way], way, accepted.split())


@pytest.mark.parametrize(
    ("data", "refusal"),
    [
        ("", "--serve-port 80 has no effect: nothing is served to what has no --data"),
        ("http://shards/", "--serve-port 80 has no effect: a URL in --data is read as it is"),
        ("shards", "--serve-port 80 has no effect: this machine reads the folder of --data itself"),
    ],
)
def test_settings_of_a_server_that_is_not_started_are_refused(data, refusal):
    """A port was opened in the firewall for it, and nothing listens there."""
    work = TaskWork("catdog", ("--data", data)) if data else Command(("true",))
    with pytest.raises(UsageError, match=refusal):
        folder_to_serve(work, Serving(serve_port=80), ["127.0.0.1"])
    assert folder_to_serve(work, Serving(), ["127.0.0.1"]) is None


def test_the_seconds_of_a_command_are_refused_for_a_detached_task():
    """The launcher waits for a task's first step, however long that takes."""
    options = SshOptions(detach=True, detach_seconds=5)
    task = LaunchSpec((), (), TaskWork("catdog"), resolved(options), addresses=["127.0.0.1"])
    with pytest.raises(UsageError, match="--detach-seconds 5 has no effect"):
        refuse_what_stays(task, options)
    refuse_what_stays(replace(task, work=Command(("true",))), options)
