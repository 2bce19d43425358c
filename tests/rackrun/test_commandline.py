"""Every command ends with one clear line and the right exit code."""

import contextlib
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import rackrun
import rackrun.catdog.__main__ as catdog
from rackrun import commands
from rackrun.cli import completion, dispatch
from rackrun.commandline import program as programs
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
from rackrun.commandline.program import run

def main(args):
    for number in range(int(args[0])):
        print(number)
    raise ValueError("here: no: do this")

run(main)
"""


def program(folder: Path, before: str, count: int) -> subprocess.CompletedProcess[str]:
    """Run the program of a user behind a line of bash."""
    (folder / "count.py").write_text(PROGRAM)
    words = ["bash", "-c", before, "-", sys.executable, folder / "count.py", str(count)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


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


def test_a_reader_that_leaves_is_no_error(tmp_path):
    """`… | head` ends the command quietly."""
    piped = program(tmp_path, '"$@" | head -1; exit ${PIPESTATUS[0]}', 10**6)
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


def test_a_mistake_in_code_of_the_user_is_called_that(tmp_path):
    """Exit code 1, its traceback, and its file and line."""
    broken = program(tmp_path, '"$@"', 0)
    assert broken.returncode == 1
    assert "Traceback" in broken.stderr and "internal error" not in broken.stderr
    line = broken.stderr.splitlines()[-1]
    assert line == f"error: {tmp_path}/count.py:8 in main: ValueError: here: no: do this", line


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
