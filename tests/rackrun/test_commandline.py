"""Every command ends with one clear line and the right exit code."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import rackrun
import rackrun.catdog.__main__ as catdog
from rackrun import commands
from rackrun.cli import completion, dispatch
from rackrun.commandline import program as programs
from rackrun.commandline.options import options
from rackrun.commandline.parser import parse
from tests.lab.needs import need
from tests.lab.run import Terminal
from tests.lab.waiting import until
from tests.lab.warm import ROOT


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["./run-ssh", "--version"], f"rackrun {rackrun.__version__}\n"),
        (["./run-local", "version"], f"rackrun {rackrun.__version__}\n"),
        (["version"], f"rackrun {rackrun.__version__}\n"),
        (["convert", "--version"], f"rackrun {rackrun.__version__}\n"),
        (["./run-ssh", "list"], "no run in runs/\n"),
        (["list"], "no run in runs/\n"),
        (["./run-ssh", "help"], "usage: ./run-ssh "),
    ],
)
def test_words_that_other_programs_have_are_understood(args, says, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(SystemExit):  # --help
        assert dispatch.run(args) == 0
    assert capsys.readouterr().out.startswith(says)


@pytest.mark.parametrize("door", ["./run-local", "./run-ssh", "./run-ray", "ssh"])
def test_each_command_runs_behind_each_door(door, monkeypatch, capsys):
    """Its help has the spelling that was typed: that of the scripts, or `rackrun`."""
    for name in commands.COMMANDS:
        with contextlib.suppress(SystemExit):
            assert dispatch.run([door, name, "--help"]) == 0
        usage = capsys.readouterr().out.partition("\n")[0]
        spelling = commands.called(name)
        assert spelling.startswith("./run-" if door.startswith("./") else "rackrun "), name
        assert usage.startswith(f"usage: {spelling}") or name == "completion", usage


PROGRAM = """
import sys
from dataclasses import dataclass
from typing import Literal
from rackrun import errors
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run

@dataclass(frozen=True)
class Settings:
    '''Counts.'''
    count: int = 1
    '''How many (pieces).'''
    size: int | None = None
    '''How large (pieces).'''
    kind: Literal["a", "b"] = "a"
    '''Of which kind.'''

def main(args):
    settings = parse(Settings, "python -m count", args)
    if settings.count == 143:
        import os, signal
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    if settings.count == 130:
        raise KeyboardInterrupt("stopped at 7")
    if settings.count == 141:
        for number in range(10**6):
            print(number)
    kinds = {64: errors.UsageError, 65: errors.DataError, 74: errors.SaveError, 70: ValueError}
    if settings.count in kinds:
        raise kinds[settings.count]("here: no: do this")
    print("counted", settings.count)

run(main)
"""


Program = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the program as a file: the help of a setting is in its source."""
    written = tmp_path_factory.mktemp("program") / "count.py"
    written.write_text(PROGRAM)
    return written


@pytest.fixture
def program(path: Path) -> Program:
    """Return a function that runs the program with these arguments."""

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, path, *args]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    return run


def test_success_is_0_and_help_is_too(program):
    """A command that did its work says nothing on standard error."""
    done = program("--count", "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "counted 3\n", "")
    shown = program("--help")
    assert shown.returncode == 0 and "How many (pieces)." in shown.stdout


HELP = [(["./run-local"], 6), (["./run-ssh"], 9), (["./run-ray"], 6), (["./run-node"], 4)]


@pytest.mark.parametrize("columns", [80, 120])
@pytest.mark.parametrize(("args", "least"), [*HELP, ([], 9)])
def test_help_shows_examples_then_groups(args, least, columns, monkeypatch, capsys):
    """Of every way to launch, and of a task; no line is wider than the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit) as ended:
        dispatch.run([*args, "--help"]) if args else catdog.main(["--help"])
    assert not ended.value.code
    head, _, shown = capsys.readouterr().out.partition("\n\nExamples:\n  ")
    assert head.startswith("usage: ")
    assert len(re.findall(r"^\S.*:\n  ", shown, re.MULTILINE)) >= least
    assert max(map(len, shown.splitlines())) <= columns
    for never in ("(default: '')", "(default: )", "--earlier-attempts", "--splitshards"):
        assert never not in shown


@dataclass(frozen=True)
class Shared:
    """Options that several commands have."""

    percent: float = 10.0
    """Held out."""
    workers: int = 2
    """At once."""


@dataclass(frozen=True)
class OfOneCommand:
    """Options of one of them."""

    shared: Shared = field(default_factory=lambda: Shared(percent=0.0))


def test_a_command_keeps_its_own_default_of_a_shared_option():
    """Also when another of the shared options is typed; and the table shows that default."""
    assert parse(OfOneCommand, "count", ["--workers", "1"]).shared == Shared(0.0, 1)
    assert parse(OfOneCommand, "count", []).shared == Shared(0.0, 2)
    assert [row.default for row in options(OfOneCommand)] == [0.0, 2]


def test_a_reader_that_leaves_is_no_error(path):
    """`… | head` ends the command quietly."""
    piped = subprocess.run(
        ["bash", "-c", '"$@" | head -1; exit ${PIPESTATUS[0]}', "-", sys.executable, path]
        + ["--count", "141"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (piped.returncode, piped.stdout, piped.stderr) == (141, "0\n", "")


def test_our_own_mistakes_show_their_traceback():
    """An internal error is 70, and says that it is ours."""
    code = (
        "import json; from rackrun.commandline.program import run\n"
        "run(lambda args: json.loads('{'))"
    )
    args = [sys.executable, "-c", code]
    broken = subprocess.run(args, capture_output=True, text=True, check=False, cwd=ROOT)
    assert broken.returncode == 70
    assert "Traceback" in broken.stderr and "internal error of rackrun" in broken.stderr


@pytest.mark.parametrize(("number", "code"), [(errno.EACCES, 74), (errno.ENOENT, 70)])
def test_what_a_file_system_refuses_is_no_error_of_ours(number, code, capsys):
    """A line with the file; a file of our own that is missing has its traceback."""
    assert programs.report(OSError(number, os.strerror(number), "a\nb")) == code
    line = f"error: a␊b: {os.strerror(number)}\n"
    assert (capsys.readouterr().err == line) == (code == 74)


def test_a_mistake_in_code_of_the_user_is_called_that(program, path):
    """Exit code 1, its traceback, and its file and line."""
    broken = program("--count", "70")
    assert broken.returncode == 1
    assert "Traceback" in broken.stderr and "internal error" not in broken.stderr
    line = broken.stderr.splitlines()[-1]
    assert re.match(rf"error: {re.escape(str(path))}:\d+ in main: \w+", line), line


@pytest.mark.parametrize(
    ("files", "location"),
    [
        (
            ["rackrun/errors.py", "/home/me/net.py", "torch/nn/modules/module.py"],
            "net.py:2",
        ),
        (["training/train.py", "torch/nn/modules/module.py"], ""),
        (["training/tasks/classify/model.py", "threading.py"], ""),
        (["training/train.py", "their_models/net.py", "torch/functional.py"], "net.py:2"),
        (["training/train.py", "other_models/net.py"], ""),
        (["examples/own_parts.py", "training/data/loader.py"], "own_parts.py:1"),
    ],
)
def test_the_innermost_place_in_the_code_of_the_user_is_found(files, location, monkeypatch):
    """Neither ours nor a library's, but for a package that the user has named."""
    monkeypatch.setattr(programs, "user_packages", {"their_models"})
    stdlib = Path(os.__file__).parent
    packages = [path.name for path in ROOT.iterdir() if path.is_dir()]
    trace = "".join(
        f'  File "{path_of(file, packages, stdlib)}", line {line}, in run\n    x\n'
        for line, file in enumerate(files, start=1)
    )
    result = programs.location_in_user_code(f"Traceback:\n{trace}ValueError: x\n")
    assert result.endswith(f"{location} in run" if location else "") and bool(result) == bool(
        location
    )


def path_of(file: str, packages: list[str], stdlib: Path) -> Path:
    """Return where a file of a traceback is: of the user, ours, Python's, or installed."""
    if file.startswith("/") or "/" not in file:
        return stdlib / file
    ours = file.partition("/")[0] in packages
    return ROOT / file if ours else stdlib / "site-packages" / file


@pytest.mark.parametrize(
    ("typed", "has", "lacks"),
    [
        ("", {"ssh", "ps"}, {"catdog", "--help"}),
        ("local ", {"catdog", "imagenet"}, {"ssh"}),
        ("ssh hosts.txt --", {"--sync", "--max-restarts"}, {"--epochs", "--data"}),
        ("ssh hosts.txt catdog --", {"--epochs", "--data"}, {"--sync"}),
        ("ssh stop --", {"--force"}, {"--sync"}),
        ("stop ", {"20260101-000000-catdog"}, {"catdog"}),
        ("local -- ", set(), {"catdog"}),
        ("convert ", {"folder", "imagenet", "verify"}, {"catdog/"}),
        ("convert folder --", {"--val-percent", "--exif"}, {"--subset"}),
    ],
)
def test_completion_knows_what_may_come_next(typed, has, lacks, tmp_path, monkeypatch):
    """Commands, then tasks and runs, and the options that the help of each shows."""
    (tmp_path / "runs" / "20260101-000000-catdog").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    result = completion.candidates(typed.split(" "))
    assert has <= result and not lacks & result


def rackrun_in(folder: Path) -> dict[str, str]:
    """Return an environment with the command `rackrun`, as an installation has it."""
    (folder / "rackrun").write_text(f'#!/bin/sh\nexec {sys.executable} -P -m rackrun "$@"\n')
    (folder / "rackrun").chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    return {**os.environ, **path, "TERM": "xterm", "HOME": str(folder)}


@pytest.mark.parametrize(
    ("printed_by", "typed"),
    [("", "rackrun ssh hosts.txt imag"), ("./run-local", "./run-ssh hosts.txt imag")],
)
def test_bash_completes_by_the_printed_script(printed_by, typed, tmp_path, capsys):
    """The script asks the program for words, and offers those that begin as typed."""
    assert dispatch.run([*printed_by.split(), "completion", "bash"]) == 0
    last = len(typed.split()) - 1
    asked = (
        f"\nCOMP_WORDS=({typed}) COMP_CWORD={last}\n_rackrun $COMP_WORDS; echo ${{COMPREPLY[*]}}"
    )
    script = capsys.readouterr().out + asked
    assert " run-ssh " in script
    output = subprocess.run(
        ["bash", "-c", script],
        env=rackrun_in(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout == "imagenet\n"


@pytest.mark.parametrize("typed", ["rackrun ssh hosts.txt imag", "./run-ssh hosts.txt imag"])
def test_fish_completes_by_the_printed_script(typed, tmp_path):
    """As at a Tab; names of files follow, which fish offers itself."""
    need("fish")
    (tmp_path / "imagined").touch()
    output = subprocess.run(
        ["fish", "--no-config", "-c", f"rackrun completion fish | source; complete -C '{typed}'"],
        env=rackrun_in(tmp_path),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert output.stdout.splitlines() == ["imagenet", "imagined"]


@pytest.mark.parametrize(
    "loaded",
    [
        'eval "$(rackrun completion zsh)"',
        "rackrun completion zsh >_rackrun; fpath=($PWD $fpath); compinit -u -D",
    ],
)
def test_zsh_completes_by_the_printed_script(loaded, tmp_path):
    """Tab in a real zsh ends the word, whether the script was evaluated or lies in fpath."""
    need("zsh")
    terminal = Terminal()
    with subprocess.Popen(
        ["zsh", "-f", "-i"],
        env=rackrun_in(tmp_path),
        cwd=tmp_path,
        **terminal.streams,
    ) as shell:
        setup = f"autoload -Uz compinit; compinit -u -D; {loaded}; print rea''dy\n"
        terminal.type(setup.encode())
        until(lambda: terminal.shows("ready"))
        terminal.type(b"rackrun ssh hosts.txt imag\t")
        until(lambda: terminal.shows("rackrun ssh hosts.txt imagenet"))
        terminal.type(b"\x15./run-local catd\t")
        until(lambda: terminal.shows("./run-local catdog"))
        shell.kill()


HOSTILE = ("a-b-$(touch${IFS}ran)", "a-b-`touch${IFS}ran`", "a-b-;touch ran;", "--ssh-config-x")


def a_hostile_folder(folder: Path) -> None:
    """Fill a folder as a clone of a stranger may, with names and modules that run `touch ran`."""
    for parent in (folder / "runs", folder / "shards", folder):
        for name in HOSTILE:
            (parent / name).mkdir(parents=True)
    for name in HOSTILE:
        (folder / f"{name}.py").write_text("TASK = 1\n")
    code = f"open({str(folder / 'ran')!r}, 'w')\nTASK = RECIPES = main = COMMANDS = 1\n"
    for name in ("rackrun", "training", "convert", "launcher", "sitecustomize", "mine", "ast"):
        (folder / f"{name}.py").write_text(code)
    (folder / "catdog").mkdir()
    for name in ("__init__", "recipes", "model"):
        (folder / "catdog" / f"{name}.py").write_text(code)


@pytest.mark.parametrize(
    ("start", "setup"),
    [
        (["bash", "--norc", "-i"], "PS1='$ '; bind 'set show-all-if-ambiguous on'"),
        (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -u -D"),
    ],
)
def test_a_tab_runs_nothing_that_names_or_files_say(start, setup, tmp_path):
    """Of commands, tasks, runs, shards, options, in a folder as a stranger may have filled it."""
    need(start[0])
    folder = tmp_path / "clone"
    a_hostile_folder(folder)
    terminal = Terminal(lines=200)
    env = {**rackrun_in(tmp_path), "HOME": str(folder)}
    shell = subprocess.Popen(
        start,
        env=env,
        cwd=folder,
        **terminal.streams,
    )
    try:
        loaded = f'eval "$(rackrun completion {start[0]})"'
        terminal.type(f"{setup}; {loaded}; printf 'rea%s\\n' dy\n".encode())
        until(lambda: terminal.shows("ready"))
        for number, typed in enumerate(
            (
                *("report ", "report a-b-", "stop ", "local a-b-", "local mine --", "local mi"),
                *("local catdog --", "local catdog --data shards/", "local catdog --data shards/a"),
                *("convert verify shards/a", "ssh --", "convert folder --", "report runs/a"),
            )
        ):
            terminal.type(f"rackrun {typed}\t\t\x15".encode())
            terminal.type(f"printf 'do%s\\n' ne-{number}.\n".encode())
            until(lambda number=number: terminal.shows(f"done-{number}."))
            assert not (folder / "ran").exists(), typed
    finally:
        shell.kill()
        shell.wait()


def test_only_names_that_mean_themselves_are_completed(tmp_path, monkeypatch):
    """bash inserts what is offered without quotes, so that Enter would run the name of a folder."""
    a_hostile_folder(tmp_path)
    (tmp_path / "runs" / "20260101-000000-resnet-1.5").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert completion.candidates(["report", ""]) == {"20260101-000000-resnet-1.5"}
