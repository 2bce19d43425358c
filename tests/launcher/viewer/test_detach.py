"""Runs that outlive what started them, and the commands that look at them or end them."""

import json
import os
import sys

from rackrun.launcher.commands.ssh import ends_at_logout
from tests.lab.detached import WAIT
from tests.lab.run import Terminal
from tests.lab.waiting import until

COUNT = """\
import os, sys, time
for number in range(int(sys.argv[1])):
    print("line", number, "of", os.environ["RANK"], flush=True)
    time.sleep(float(sys.argv[2]))
"""

EACH_SECOND = """\
import time
while True:
    time.sleep(-time.time() % 1)  # all ranks at once, whenever each of them has started
    print("here", flush=True)
"""


def counting(lines, pause):
    return ("--", sys.executable, "-c", COUNT, str(lines), str(pause))


def shown_so_far(detached):
    return "".join(path.read_text() for path in detached.home.glob("runs/2*/logs/*/*/*.out"))


def test_a_run_outlives_what_started_it_and_every_viewer_sees_all_of_it(detached):
    """Killed after it has printed the id; viewers from the start, late and after the end agree."""
    typed = detached.start_detached("999", detached.hosts, *counting(60, 0.1))
    detached.run = typed.first_line()
    typed.process.kill()
    typed.process.communicate()
    early = detached.start("attach")
    until(lambda: "line 20 of" in shown_so_far(detached), "a third of the run is over", 60)
    late = detached.start("attach")
    shown = [process.communicate(timeout=120) for process in (early, late)]
    assert [early.returncode, late.returncode] == [0, 0], shown
    code, out, err = detached.result_of("attach")
    assert (code, "done in" in err) == (0, True)
    wanted = sorted(f"line {n} of {rank}" for n in range(60) for rank in range(3))
    for text in (out, *(text for text, _ in shown)):
        assert sorted(line.partition(" | ")[2] for line in text.splitlines()) == wanted
    detached.wait_until_clean()


def test_a_viewer_on_a_terminal_draws_the_dashboard_and_ctrl_c_ends_only_that(detached):
    """A row for every host; the terminal is left as it was, and the run goes on."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", EACH_SECOND)
    terminal = Terminal()
    attached = detached.start("attach", env={"TERM": "xterm"}, **terminal.streams)
    for text in ("3 ranks on 3 hosts", "127.0.0.4", "● running", "0-2 x3 │ here"):
        until(lambda text=text: terminal.shows(text), text, 60)
    terminal.type(b"\x03")
    assert attached.wait(60) == 0
    assert terminal.shows("detached, the run continues")
    assert terminal.restored()
    assert detached.result_of("stop", "--force")[0] == 0


def test_stop_ends_a_run_between_two_attempts(detached):
    """An attempt has failed and the hosts are looked at again, which takes its time."""
    failed = detached.work / "failed"
    slow = detached.work / "python"
    python = detached.lab.cheap_python()
    slow.write_text(f'#!/bin/sh\n[ -e {failed} ] && sleep 30\nexec {python} "$@"\n')
    slow.chmod(0o755)
    hosts = str(detached.lab.write_hosts(f"python={slow} workdir={detached.work} slots=1"))
    script = f"import pathlib, sys; pathlib.Path({str(failed)!r}).touch(); sys.exit(3)"
    detached.detach("--max-restarts", "1", hosts, "--", sys.executable, "-c", script)
    output = detached.folder / "output.log"
    until(lambda: "restart 1 of 1" in output.read_text(), "it is to start again", 60)
    code, _, err = detached.result_of("stop")
    assert (code, "interrupted: stopped between two attempts" in err) == (0, True), err
    result = json.loads((detached.folder / "result.json").read_text())
    assert (result["exit_code"], len(result["attempts"])) == (130, 1)
    detached.wait_until_clean(60)  # the look at a host ends as slowly as it began


def test_stop_while_a_failed_attempt_ends_prevents_the_next_one(detached):
    """A rank has failed and the others take their time; the result stays that of the failure."""
    script = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True)\n"
        "time.sleep(5 if os.environ['RANK'] == '0' else 999); sys.exit(3)"
    )
    detached.detach("--max-restarts", "1", detached.hosts, "--", sys.executable, "-c", script)
    output = detached.folder / "output.log"
    until(lambda: "stopping all ranks" in output.read_text(), "a rank has failed", 60)
    code, _, err = detached.result_of("stop")
    assert (code, "failed: rank 0 on 127.0.0.2: exit code 3" in err) == (0, True), err
    assert len(json.loads((detached.folder / "result.json").read_text())["attempts"]) == 1


def test_a_launch_that_waits_for_hosts_is_detached_once_it_has_them(detached):
    """Meanwhile what was typed says so, and that a forwarded agent would not outlive the login."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    agent = {"SSH_CONNECTION": "1 1 1 1", "SSH_AUTH_SOCK": "/tmp/ssh-none/agent.1"}
    typed = detached.start_detached("0", "--wait", detached.hosts, *counting(1, 0), env=agent)
    assert typed.process.stderr is not None
    lines = iter(typed.process.stderr.readline, "")
    assert "those of a forwarded agent" in next(lines)
    waiting = next(line for line in lines if "waiting (Ctrl-C ends the wait)" in line)
    assert "in use by another run" in waiting and "--wait" not in waiting, waiting
    assert detached.result_of("stop", "--force")[0] == 0
    code, out, err = typed.wait_for_end()
    assert code == 0, err
    detached.run = out.strip()
    assert detached.result_of("attach")[0] == 0


def test_a_login_whose_end_would_end_the_run_is_noticed(tmp_path):
    """By logind's settings, of which the last counts; comments do not."""
    (tmp_path / "logind.conf.d").mkdir()
    for file, text, ends in (
        ("logind.conf", "[Login]\n#KillUserProcesses=yes\n", False),
        ("logind.conf", "[Login]\nKillUserProcesses=yes\n", True),
        ("logind.conf.d/90-site.conf", "[Login]\nKillUserProcesses=no\n", False),
    ):
        (tmp_path / file).write_text(text)
        assert ends_at_logout(tmp_path) == ends


def test_a_starter_that_is_killed_before_there_is_a_run_leaves_nothing(detached):
    """Before the id is printed, the controller has not been let go."""
    typed = detached.start_detached("999", "--wait", detached.hosts, "--", "sleep", "999")
    typed.process.kill()
    out, _ = typed.process.communicate(timeout=60)
    if out:  # it was faster
        detached.run = out.strip()
        assert detached.result_of("stop", "--force")[0] == 0
    detached.wait_until_clean()


def test_logs_are_those_of_the_wanted_ranks(detached):
    """--host and --rank choose, --follow waits for the end; without it, what is there by now."""
    detached.detach(detached.hosts, *counting(20, 0.05))
    code, out, err = detached.result_of("logs", "--follow", "--rank", "2")
    assert code == 0, err
    assert out == "".join(f"127.0.0.4:2 | line {number} of 2\n" for number in range(20))
    code, out, _ = detached.result_of("logs", "--host", "127.0.0.3")
    assert out == "".join(f"127.0.0.3:1 | line {number} of 1\n" for number in range(20))


def test_no_secret_of_a_detached_run_is_written_down(detached):
    """--secret reaches the ranks, and no file or command line anywhere."""
    script = "import os, time; print(len(os.environ['CANARY']), flush=True); time.sleep(999)"
    secret = "canary-" + os.urandom(8).hex()
    args = ("--secret", "CANARY", detached.hosts, "--", sys.executable, "-c", script)
    detached.detach(*args, env={"CANARY": secret})
    detached.wait_for_ranks(3)
    assert not {line for line in detached.processes().values() if secret in line}
    for path in [*detached.lab.folder.rglob("*")]:
        if path.is_file() and not path.is_symlink():
            assert secret.encode() not in path.read_bytes(), path
    assert detached.result_of("stop", "--force")[0] == 0
    assert shown_so_far(detached).split() == [str(len(secret))] * 3
