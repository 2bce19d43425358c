"""From the first moment on: signals, closed streams, and what lies in the current folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.oracles import text_only
from tests.lab.waiting import until
from tests.lab.warm import ROOT

DOOR = (sys.executable, "-P", str(ROOT / "rackrun" / "__main__.py"))
SCRIPTS = ("run-local", "run-ssh", "run-ray")


def begun(folder: Path, *args: str, **more: object) -> "subprocess.Popen[str]":
    """Start a launcher as `./run-local` does, in another folder."""
    (folder / "here").mkdir(exist_ok=True)
    streams = {"stdin": subprocess.DEVNULL} | dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    options: dict[str, object] = {"cwd": folder / "here", "text": True, **streams, **more}
    return subprocess.Popen([*DOOR, *args], **options)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_start_the_command_of_these_tests(name):
    """So what is shown below holds for them."""
    last = (ROOT / name).read_text().splitlines()[-1]
    assert last == 'venv_rackrun "$0" "$@"'


@pytest.mark.parametrize(
    ("number", "code", "says"),
    [(signal.SIGINT, 130, "interrupted\n"), (signal.SIGTERM, 143, "stopped by SIGTERM\n")],
)
def test_a_signal_while_a_command_is_imported(tmp_path, number, code, says):
    """One line and the code, no traceback."""
    slow = "import pathlib, time\npathlib.Path('begun').touch()\ntime.sleep(60)\n"
    (tmp_path / "secrets.py").write_text(slow)
    process = begun(tmp_path, "local", env={**os.environ, "PYTHONPATH": str(tmp_path)})
    until((tmp_path / "here" / "begun").exists)
    process.send_signal(number)
    assert process.communicate() == ("", says)
    assert process.returncode == code


@pytest.mark.security("HOST-4")
def test_what_lies_in_the_current_folder_is_not_imported(tmp_path):
    """A1, A4: a queue.py and a typing.py in the current folder do not run in the launcher."""
    (tmp_path / "here").mkdir()
    for name in ("queue", "typing", "launcher", "signal"):
        (tmp_path / "here" / f"{name}.py").write_text(
            "open('/dev/stderr', 'w').write('imported')\n"
        )
    process = begun(tmp_path, "local", "--runs", str(tmp_path / "runs"), "--", "true")
    _, err = process.communicate()
    assert process.returncode == 0, err
    assert "imported" not in err


def test_errors_are_text_and_no_orders_to_the_terminal(tmp_path):
    """Escape sequences in a foreign error message do not reach the terminal."""
    process = begun(tmp_path, "ssh", "no\x1b]0;PWNED\x07such", "--", "true")
    _, err = process.communicate()
    assert process.returncode == 64
    assert "no␛]0;PWNED␇such" in err
    text_only(err)


CLOSED = (">&-", "<&- 2>&-", "<&- >&- 2>&-")


def test_closed_streams_are_no_error(tmp_path):
    """The run is done, and no file has what was for a closed stream, but that of all lines."""
    running = []
    for number, closed in enumerate(CLOSED):
        runs = tmp_path / str(number)
        script = f'exec "$0" "$@" {closed}'
        python = ("--python", str(warm.interpreter()))  # of torchrun, not of the launcher
        args = [*DOOR, "local", *python, "--runs", str(runs), "--", "echo", "said"]
        running.append((runs, subprocess.Popen(["bash", "-c", script, *args], cwd=tmp_path)))
    for runs, process in running:
        assert process.wait() == 0
        (log,) = runs.glob("2*/logs/*/*/rank-0.out")
        assert log.read_text() == "said\n"
        files = [path for path in runs.rglob("*") if path.is_file() and path.name != "output.log"]
        assert not any("rackrun:" in path.read_text() for path in files)
