"""Runs without a launcher: a controller on the first host, and commands from any machine."""

import fcntl
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun import runs as runs_here
from rackrun.launcher.commands.detached import VERBS
from rackrun.launcher.detached import known_runs, results
from rackrun.launcher.detached.controller import RunOrder
from rackrun.launcher.detached.locate import ReachedRun
from rackrun.launcher.detached.start import sources, start_controller
from rackrun.launcher.detached.status import status_of_all
from rackrun.launcher.detached.stop import is_left
from rackrun.launcher.errors import HostUnreachable, PreflightRefused
from rackrun.launcher.lifecycle.launch_spec import resolved
from rackrun.launcher.remote import processes, run_manager
from rackrun.launcher.remote.relay import call
from rackrun.launcher.remote.sockets import tls
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.settings import HostOptions
from rackrun.launcher.supervision.agents import drain
from rackrun.launcher.transport.certificate import new_key
from rackrun.launcher.transport.local import LocalChannel, LocalTransport
from rackrun.launcher.transport.relay import RelayListener
from rackrun.launcher.transport.rpc import RpcClient
from rackrun.runs import find_run
from rackrun.shapes import Misshapen, parsed
from tests.lab.detached import RANK, SHORT, WAIT, DetachedLab
from tests.lab.hosts import children, with_signal
from tests.lab.run import Terminal
from tests.lab.waiting import until

COUNT = """\
import json, os, socket, sys, time
for number in range(int(sys.argv[1])):
    print("line", number, "of", os.environ["RANK"], flush=True)
    time.sleep(float(sys.argv[2]))
with open(os.environ["RACKRUN_RUN_FOLDER"] + "/final.pt", "w") as file:
    file.write("weights")
ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
ear.connect(os.environ["RACKRUN_REPORTS"])
said = {"phase": "done", "final": file.name, "rank": int(os.environ["RANK"])}
ear.send(json.dumps(said).encode())
"""


def counting(lines: int, pause: float) -> tuple[str, ...]:
    return ("--", sys.executable, "-c", COUNT, str(lines), str(pause))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


# -- attach -------------------------------------------------------------------------------------


def test_a_run_outlives_its_terminal_and_every_attached_launcher_sees_all_of_it(detached):
    """Two attached at once, a late one and one after the end show the same bytes."""
    args = ["--detach", *SHORT, detached.hosts, *counting(60, 0.1)]
    env = {"HOME": str(detached.home)}
    started = detached.lab.run_ssh(*args, env=env, cwd=detached.home, start_new_session=True)
    assert started.stdout is not None
    detached.run = started.stdout.readline().strip()
    with suppress(ProcessLookupError):  # it may have ended by itself
        os.killpg(started.pid, signal.SIGKILL)  # the terminal, and all that was started in it
    started.communicate()
    early = [
        detached.start("attach"),
        detached.start("attach", home=detached.machine("second")),
    ]
    until(lambda: "line 20 of" in shown_so_far(detached), "a third of the run is over", 60)
    late = detached.start("attach", home=detached.machine("third"))
    shown = [process.communicate(timeout=120) for process in (*early, late)]
    assert [process.returncode for process in (*early, late)] == [0, 0, 0], shown
    code, out, err = detached.result_of("attach")
    assert (code, "done in" in err) == (0, True)
    assert {digest(text) for text, _ in shown} == {digest(out)}
    lines = [line.partition(" | ")[2] for line in out.splitlines()]
    assert sorted(lines) == sorted(f"line {n} of {rank}" for n in range(60) for rank in range(3))
    detached.wait_until_clean()


def shown_so_far(detached: DetachedLab) -> str:
    return "".join(path.read_text() for path in detached.work.glob("runs/2*/logs/*/*.out"))


def test_the_results_come_to_every_machine_that_attaches(detached):
    """Logs byte for byte, final.pt, plan and result; a folder that is shared is left alone."""
    detached.detach(detached.hosts, *counting(3, 0.0))
    second = detached.machine("second")
    for home in (detached.home, second, second):
        code, _, err = detached.result_of("attach", home=home)
        assert code == 0, err
        (folder,) = (home / "runs").glob("2*")
        for path in ("logs/127.0.0.3/rank-1.out", "final.pt", "plan.json", "result.json"):
            assert (folder / path).read_bytes() == (detached.folder / path).read_bytes()
        assert f"run: runs/{folder.name}" in err
        assert f"model: runs/{folder.name}/final.pt" in err
    shared = detached.machine("shared")
    (shared / "runs").symlink_to(detached.work / "runs")
    before = sorted(path.stat().st_ino for path in detached.folder.rglob("*"))
    assert detached.result_of("attach", home=shared)[0] == 0
    assert sorted(path.stat().st_ino for path in detached.folder.rglob("*")) == before


@pytest.mark.long
def test_ctrl_c_in_attach_detaches_again(detached):
    """The run goes on, and what is said names the two ways on."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    attached = detached.start("attach")
    assert attached.stdout is not None
    assert "here" in attached.stdout.readline()
    attached.send_signal(signal.SIGINT)
    _, err = attached.communicate(timeout=60)
    assert attached.returncode == 0
    assert f"./run-ssh attach {detached.run}" in err
    assert f"./run-ssh stop {detached.run}" in err
    assert [host["state"] for host in detached.status()["hosts"]] == ["running"] * 3
    assert detached.result_of("stop", "--force")[0] == 0


def test_attach_on_a_terminal_draws_the_board_and_leaves_the_terminal_as_it_was(detached):
    """A row for every host while it runs; Ctrl-C on the keyboard takes it away again."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    terminal = Terminal()
    attached = detached.lab.run_ssh(
        detached.run,
        verb=("attach",),
        cwd=detached.home,
        env={"HOME": str(detached.home), "TERM": "xterm"},
        **terminal.streams,
    )
    for text in ("3 ranks on 3 hosts", "127.0.0.4", "● running", "0-2 x3 │ here"):
        until(lambda text=text: terminal.shows(text), text, 60)
    terminal.type(b"\x03")
    assert attached.wait(60) == 0
    assert terminal.shows("detached, the run continues")
    assert terminal.restored()
    assert detached.result_of("stop", "--force")[0] == 0


def test_code_and_cause_of_a_failure_are_reported_later(detached):
    """One rank fails: all hosts end while no launcher is attached; attach ends with its code."""
    script = "import os, sys, time; os.environ['RANK'] == '1' and sys.exit(7); time.sleep(999)"
    detached.detach(detached.hosts, "--", sys.executable, "-c", script)
    detached.wait_until_clean(60)
    status = detached.status()
    assert (status["exit_code"], status["verdict"]) == (7, "failed")
    assert [host["state"] for host in status["hosts"]] == ["stopped"] * 3
    code, _, err = detached.result_of("attach", home=detached.machine("second"))
    assert code == 7
    assert "failed: rank 1 on 127.0.0.3: exit code 7" in err.splitlines()[-1]


def test_restarts_and_spares_work_without_a_launcher(detached):
    """A relay dies, its host is left out, the spare takes its place, and attach shows both."""
    first = detached.work / "first"
    script = (
        f"import os, pathlib, time; mark = pathlib.Path({str(first)!r} + os.environ['RANK'])\n"
        "again = mark.exists(); mark.touch(); print('again', again, flush=True)\n"
        "again or time.sleep(999)"
    )
    rules = ("--max-restarts", "1", "--spares", "1")
    detached.detach(*rules, detached.hosts, "--", sys.executable, "-c", script)
    detached.wait_for_ranks(2)
    for pid in detached.on(detached.lab.hosts[1]):
        with_signal(pid, signal.SIGKILL)
    code, out, err = detached.result_of("attach")
    assert code == 0, err
    assert "restart 1 of 1" in err
    assert out.count("again True") + 2 * out.count("x2 | again True") >= 1
    plan = json.loads((detached.folder / "plan.json").read_text())
    assert [host["name"] for host in plan["hosts"]] == ["127.0.0.2", "127.0.0.4"]
    assert len(list((detached.home / "runs").glob("2*"))) == 2
    detached.wait_until_clean()


# -- stop ---------------------------------------------------------------------------------------


def test_stop_from_another_machine_lets_the_ranks_save_and_verifies_every_host(detached):
    """SIGTERM and time for a checkpoint, then nothing is left anywhere, and stop says so."""
    script = (
        "import pathlib, signal, sys, time\n"
        "def save(*_): print('saved', flush=True); sys.exit(143)\n"
        "signal.signal(signal.SIGTERM, save); print('here', flush=True)\n"
        "while True: time.sleep(0.1)"
    )
    detached.detach(detached.hosts, "--", sys.executable, "-c", script)
    until(lambda: shown_so_far(detached).count("here") == 3, "all ranks are there", 60)
    code, _, err = detached.result_of("stop", home=detached.machine("second"))
    assert code == 0, err
    assert "3 of 3 hosts clean" in err
    assert shown_so_far(detached).count("saved") == 3
    detached.wait_until_clean(5)
    assert detached.status()["exit_code"] == 130
    code, _, err = detached.result_of("stop")
    assert (code, "the run has already ended" in err) == (0, True)
    assert detached.result_of("attach")[0] == 130


def test_stop_now_does_not_wait_for_ranks_that_ignore_it(detached):
    """--force is the second Ctrl-C: ranks that ignore SIGTERM are killed at once."""
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    patient = ("--checkpoint-seconds", "600")
    detached.detach(*patient, detached.hosts, "--", sys.executable, "-c", ignore + WAIT)
    detached.wait_for_ranks(3)
    code, _, err = detached.result_of("stop", "--force")
    assert code == 0, err
    detached.wait_until_clean(5)


# -- what dies ----------------------------------------------------------------------------------


ENDED = pytest.param(signal.SIGTERM, marks=pytest.mark.long)
KILLED = pytest.param(signal.SIGKILL, marks=pytest.mark.long)
STOPPED = pytest.param(signal.SIGSTOP, marks=pytest.mark.long)


@pytest.mark.parametrize("how", [KILLED, signal.SIGSTOP, ENDED])
def test_no_host_outlives_the_controller(detached, how):
    """The first host hangs, or the controller is killed: all are clean within the timeout."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    controller = detached.controller()
    os.kill(controller, how)
    if how == signal.SIGSTOP:
        code, _, err = detached.result_of("attach")
        assert (code, f"its controller (process {controller}) was stopped" in err) == (75, True)
        assert detached.status()["controller"]["stopped"] == controller
        assert (
            f"its controller on 127.0.0.2 (process {controller}) was stopped"
            in detached.result_of("status")[1]
        )
        until(lambda: not any(map(is_rank, detached.processes().values())), "ranks end", 30)
        os.kill(controller, signal.SIGKILL)
    detached.wait_until_clean(30)
    status = detached.status()
    assert not status["controller"]["alive"]
    assert [host["state"] for host in status["hosts"]] == ["stopped"] * 3
    code, _, err = detached.result_of("attach")
    if how == signal.SIGTERM:
        assert code == 143
    else:
        assert (code, "controller on 127.0.0.2 is gone" in err) == (75, True)
    code, _, err = detached.result_of("stop")
    assert (code, "3 of 3 hosts clean" in err) == (0, True)


@pytest.mark.parametrize("how", [signal.SIGKILL, STOPPED])
def test_a_host_whose_relay_is_gone_ends_by_itself_and_stop_sees_to_the_rest(detached, how):
    """Killed alone, its carriers end with it; stopped with them, it is missed within the lease."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    on_host = set(detached.on(detached.lab.hosts[1]))
    relay, *carriers = [pid for pid in detached.relays() if pid in on_host]
    for pid in (relay, *(carriers if how == signal.SIGSTOP else ())):
        os.kill(pid, how)
    code, _, err = detached.result_of("attach")
    assert (code, "failed: 127.0.0.3: " in err.splitlines()[-1]) == (75, True), err
    assert not any(map(is_rank, detached.processes().values()))
    code, _, err = detached.result_of("stop")
    assert (code, "3 of 3 hosts clean" in err) == (0, True), err
    detached.wait_until_clean(5)


def is_rank(line: str) -> bool:
    return line.startswith(RANK)


def test_a_host_that_does_not_answer_is_named(detached):
    """status and stop report the others, and that one host was not reached."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    attached = detached.start("attach")
    assert attached.stdout is not None
    assert "here" in attached.stdout.readline()
    for pid in detached.lab.hosts[0].sessions():
        with_signal(pid, signal.SIGKILL)
    _, err = attached.communicate(timeout=60)
    assert (attached.returncode, "the connection broke; the run continues" in err) == (75, True)
    detached.lab.hosts[2].stop()  # its sshd: the run does not need that
    status = detached.status()
    assert [host["state"] for host in status["hosts"]] == ["running", "running", "not reached"]
    assert "refuses connections" in status["hosts"][2]["error"]
    code, _, err = detached.result_of("stop")
    assert (code, "2 of 3 hosts clean" in err) == (75, True)
    detached.wait_until_clean(5)
    detached.lab.hosts[0].stop()
    code, out, err = detached.result_of("status")
    assert (code, "does not answer" in out) == (69, True)
    code, _, err = detached.result_of("attach")
    assert (code, "127.0.0.2" in err) == (69, True)


def test_nothing_is_left_of_a_launcher_that_is_killed_before_it_lets_go(detached):
    """Killed as soon as there is a controller, --detach leaves neither it nor a relay, at once:
    an orphaned controller waits for no relay."""
    args = ["--detach", *SHORT, detached.hosts, "--", sys.executable, "-c", WAIT]
    process = detached.lab.run_ssh(*args, env={"HOME": str(detached.home)}, cwd=detached.home)

    def kept() -> bool:
        return any(
            "rackrun.launcher.detached.controller" in line for line in detached.processes().values()
        )

    until(kept, "a controller is started", 60)
    process.kill()
    out, _ = process.communicate()
    if out:  # it was faster
        detached.run = out.strip()
        assert detached.result_of("stop", "--force")[0] == 0
    until(lambda: not detached.processes(), "nothing is left", 20)
    if not out:
        assert not list((detached.lab.hosts[0].folder / ".rackrun").iterdir())


def test_an_order_comes_back_from_json_as_it_was():
    """A controller gets task, GPUs, variables and image of a run as the launcher had them."""
    options = HostOptions(image="torch:1", volume=("/data",), env=("A=b",), runs=Path("my runs"))
    hosts = (Host("a"), Host("b", devices=(1, 2), env=(("X", "y"),)))
    task = TaskWork("catdog", ("--epochs", "2"))
    order = RunOrder("0a1b2c3d", task, resolved(options), hosts, "10.0.0.1", "PEM", ("t",), 3.0)
    for work in (task, Command(("sh", "-c", "true"))):
        plain = json.dumps({**replace(order, work=work).plain, "state": "/home/me/state"})
        assert parsed(plain, RunOrder, 10**5) == replace(order, work=work, state="/home/me/state")
    with pytest.raises(Misshapen, match="settings.jobs.limits"):
        parsed(plain.replace("lease_seconds", "least_seconds"), RunOrder, 10**5)


def test_an_orphaned_controller_awaits_no_host(tmp_path, monkeypatch):
    """The launcher goes while the hosts are awaited: controller and port are gone at once."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run, transport = os.urandom(4).hex(), Here("here")
    hosts = [Host("127.0.0.1"), Host("127.0.0.2")]
    order = RunOrder(
        *(run, Command(("true",)), resolved(HostOptions()), tuple(hosts), "127.0.0.1"),
        key=new_key(run),
        tokens=("token",),
        gather_seconds=120,
    )
    client = RpcClient(transport, run_manager)
    start_controller(client, order, sys.executable, str(tmp_path))
    client.order("ready")
    assert run_manager.controller_of(run)
    client.close()
    until(lambda: not run_manager.controller_of(run), "the controller is gone", 60)
    for channel in transport.opened:
        drain(channel)
    assert not list((tmp_path / ".rackrun").iterdir())


def test_nothing_is_left_of_a_run_whose_controller_cannot_start(detached):
    """The controller's error is printed; neither its code nor its folder stays on the host."""
    broken = detached.lab.folder / "broken"
    refuse = 'case "$*" in *detached.controller*) echo "a broken Python" >&2; exit 1;; esac'
    broken.write_text(f'#!/bin/sh\n{refuse}\nexec {detached.lab.cheap_python()} "$@"\n')
    broken.chmod(0o755)
    hosts = str(detached.lab.write_hosts(f"python={broken} workdir={detached.work} slots=1"))
    args = ("--detach", "--include", "127.0.0.2", hosts, "--", "true")
    code, _, err = detached.lab.result_of(
        *args, env={"HOME": str(detached.home)}, cwd=detached.home
    )
    assert (code, err) == (
        78,
        "error: 127.0.0.2: no detached run could be started: a broken Python\n",
    )
    states = detached.lab.hosts[0].folder / ".rackrun"
    until(lambda: not list(states.iterdir()), "nothing is left", 20)


# -- what can be said ---------------------------------------------------------------------------


def test_status_shows_what_really_runs(detached):
    """Processes by what they are for, since when, the lease; step and phase as ranks report."""
    script = (
        "import json, os, socket, time\n"
        "ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
        "said = {'rank': int(os.environ['RANK']), 'phase': 'train', 'step': 7, 'steps': 9}\n"
        "ear.send(json.dumps(said).encode()); time.sleep(999)"
    )
    detached.detach("--hang-seconds", "600", detached.hosts, "--", sys.executable, "-c", script)
    detached.wait_for_ranks(3)
    second = detached.machine("second")
    until(lambda: detached.status(second)["hosts"][2]["step"] == 7, "the step is told", 60)
    status = detached.status(second)
    assert status["controller"] == {"host": "127.0.0.2", "alive": True, "error": "", "stopped": 0}
    for host in status["hosts"]:
        roles = [process["role"] for process in host["processes"]]  # all hosts share one /proc
        assert sorted({*roles} - {"controller", "relay"}) == ["agent", "rank", "shim", "torchrun"]
        assert roles.count("relay") == 4  # and a carrier for each agent
        assert host["heartbeat"]["lease_seconds"] == 3
        assert host["heartbeat"]["heard_seconds_ago"] < 30
        assert host["seconds"] < 600
    code, out, _ = detached.result_of("status")
    assert code == 0
    assert "agent, torchrun, shim, rank" in out
    assert re.search(r"127\.0\.0\.4 +training +7 ", out)
    (detached.lab.hosts[2].folder / ".bashrc").write_text("exit 3\n")
    lines = Path(detached.hosts).read_text().splitlines(keepends=True)
    Path(detached.hosts).write_text("".join(reversed(lines)))  # it is asked for the run first
    code, out, err = detached.result_of("status", home=second)
    assert code == 0, err
    assert re.search(r"127\.0\.0\.4 +not reached: Python could not be started", out), out
    assert re.search(r"127\.0\.0\.2 +training +7 ", out), out
    (detached.lab.hosts[2].folder / ".bashrc").unlink()
    assert detached.result_of("stop", "--force")[0] == 0


def test_logs_are_those_of_the_wanted_ranks(detached):
    """--host and --rank choose, --follow waits for the end; without it, what is there by now."""
    detached.detach(detached.hosts, *counting(20, 0.05))
    code, out, err = detached.result_of(
        "logs", "--follow", "--rank", "2", home=detached.machine("second")
    )
    assert code == 0, err
    assert out == "".join(f"127.0.0.4:2 | line {number} of 2\n" for number in range(20))
    code, out, _ = detached.result_of("logs", "--host", "127.0.0.3")
    assert out == "".join(f"127.0.0.3:1 | line {number} of 1\n" for number in range(20))
    code, _, err = detached.result_of("logs", "--host", "gpu99")
    assert (code, "there are: 127.0.0.2, 127.0.0.3, 127.0.0.4" in err) == (64, True)
    code, _, err = detached.result_of("logs", "--rank", "99")
    assert (code, "--rank 99: there are: 0 to 2" in err) == (64, True)


def test_an_unknown_run_is_named_with_what_to_type(detached):
    """A wrong id, one that no host knows, and one that only another machine could know."""
    second = detached.machine("second")
    detached.run = "0123abcd"
    for verb in VERBS:
        code, _, err = detached.result_of(verb, home=second)
        assert (code, "no run 0123abcd on 127.0.0.2" in err) == (64, True), err
        code, _, err = detached.result_of(verb)
        assert (code, "--hosts FILE" in err) == (64, True), err
        assert len(err.splitlines()) == 1
    detached.run = "../../etc"
    code, _, err = detached.result_of("attach")
    assert (code, "cannot be a run" in err) == (64, True)


def test_shards_that_only_the_launcher_could_serve_are_refused(detached):
    """The launcher goes, and its server with it: said before a host is asked for anything."""
    code, _, err = detached.lab.result_of(
        "--detach",
        "--serve",
        detached.hosts,
        "catdog",
        "--data",
        "x",
        env={"HOME": str(detached.home)},
    )
    assert (code, "does not stay" in err) == (64, True), err


# -- secrets and ports --------------------------------------------------------------------------


def test_no_port_is_open_during_a_run_and_no_secret_is_written_down(detached):
    """Neither controller nor relays listen; --secret reaches the ranks and no file or command."""
    script = "import os, time; print(len(os.environ['CANARY']), flush=True); time.sleep(999)"
    secret = "canary-" + os.urandom(8).hex()
    args = ("--secret", "CANARY", detached.hosts, "--", sys.executable, "-c", script)
    detached.detach(*args, env={"CANARY": secret})
    detached.wait_for_ranks(3)
    assert detached.controller() in detached.processes()
    assert not {line for line in detached.processes().values() if secret in line}
    for pid in detached.processes():
        assert not listening(pid)
    for path in [*detached.lab.folder.rglob("*")]:
        if path.is_file() and not path.is_symlink():
            assert secret.encode() not in path.read_bytes(), path
    assert oct(detached.state.stat().st_mode & 0o777) == "0o700"
    assert detached.result_of("stop", "--force")[0] == 0
    assert shown_so_far(detached).split() == [str(len(secret))] * 3


def listening(pid: int) -> bool:
    """Return whether a process listens on a TCP port."""
    sockets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            sockets.add(str(descriptor.readlink()))
        except OSError:
            continue
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                return True
    return False


def test_the_controller_needs_nothing_but_the_standard_library(tmp_path):
    """It is sent to hosts where the project may not be installed, and starts without site."""
    for name, text in sources().items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    start = f"import sys; sys.path.insert(0, {str(tmp_path)!r})"
    start += "; import rackrun.launcher.detached.controller"
    subprocess.run([sys.executable, "-I", "-S", "-c", start], check=True)


def test_the_state_of_a_run_is_removed_a_month_after_its_end(tmp_path, monkeypatch):
    """Old records go, unless a controller holds them, and what never began; young ones stay."""
    monkeypatch.setattr(run_manager, "STATES", str(tmp_path))
    for name, age_days in (("old", 40), ("kept", 40), ("young", 20)):
        (tmp_path / name).mkdir()
        record = tmp_path / name / "record"
        record.touch()
        os.utime(record, (time.time() - 86400 * age_days,) * 2)
    (tmp_path / "never began" / "code").mkdir(parents=True)
    os.utime(tmp_path / "never began" / "code", (time.time() - 86400 * 40,) * 2)
    with (tmp_path / "kept" / "record").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run_manager.clear_old()
    assert {path.name for path in tmp_path.iterdir()} == {"kept", "young"}


def test_only_relays_of_the_run_are_accepted():
    """Another key and a wrong word are refused; the run's own gets in all the same."""
    key = new_key("one")
    gate = RelayListener("127.0.0.1", key)
    with ThreadPoolExecutor() as pool:
        gathered = pool.submit(gate.gather, ["host"], ["word"], 30)
        with pytest.raises(OSError, match="certificate"):
            call(tls(new_key("two"), server=False), gate.address, gate.port, "word")
        for text in ("wrong", "word"):
            call(tls(key, server=False), gate.address, gate.port, text).close()
        (transport,) = gathered.result()
    assert transport.name == "host"
    transport.close()
    with pytest.raises(HostUnreachable, match="late: could not connect"):
        RelayListener("127.0.0.1", key).gather(["late"], ["word"], 0.1)
    with pytest.raises(PreflightRefused, match=r"192\.0\.2\.1: .* type .*address=ADDRESS"):
        RelayListener("192.0.2.1", key)


# -- the parts --------------------------------------------------------------------------------


def test_a_host_without_a_python_of_the_system_is_swept_by_the_one_that_answers_there(
    tmp_path, monkeypatch
):
    """`python=` of hosts.txt leads to the run manager, and its interpreter to the agent."""
    monkeypatch.setenv("PATH", "/nowhere")
    run, transport = os.urandom(4).hex(), Here("here")
    host = Host("127.0.0.1", python=sys.executable)
    scratch = f"/tmp/rackrun-{run}{'0' * 24}-0"
    variables = {"RACKRUN_RUN_ID": run, "RACKRUN_REPORTS": f"{scratch}/reports"}
    wait = [sys.executable, "-c", WAIT]
    with subprocess.Popen(wait, env=variables, stdout=subprocess.DEVNULL) as left:
        try:
            reached = ReachedRun(run, None, [host], host, "", transports=[transport])
            (status,) = status_of_all(reached)
            assert [process.pid for process in status.processes] == [left.pid]
            assert not is_left(reached, linger_seconds=0.0)
            assert left.wait(10) == -signal.SIGKILL
        finally:
            left.kill()
    for channel in transport.opened:
        if not channel.complaints.closed:
            drain(channel)


class Here(LocalTransport):
    """This machine, and what was started there."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.opened: list[LocalChannel] = []

    def open(self, argv: Sequence[str]) -> LocalChannel:
        self.opened.append(super().open(argv))
        return self.opened[-1]


def test_only_the_process_that_wrote_down_itself_is_an_agent(tmp_path):
    """In a container it is number 1: so is another process outside, or in a container beside it."""
    run = os.urandom(4).hex()
    scratch = Path(f"/tmp/rackrun-{run}{'0' * 24}-0")
    apart = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", WAIT]
    scratch.mkdir(0o700)
    with subprocess.Popen(apart, stdout=subprocess.PIPE) as outer:
        try:
            assert outer.stdout and outer.stdout.readline()
            (inner,) = children(outer.pid)
            started = processes.identity(inner)[1]
            spaces = (Path(f"/proc/{pid}/ns/pid").readlink() for pid in (inner, "self"))
            space, beside = map(str, spaces)
            expected = {(1, 0, space): [], (1, started, beside): [], (1, started, space): [inner]}
            for (pid, since, where), agents in expected.items():
                (scratch / "agent.pid").write_text(json.dumps([pid, since, 1, since, where]))
                pids = run_manager.processes(run)["processes"]
                assert [process["pid"] for process in pids] == agents
        finally:
            outer.kill()
            shutil.rmtree(scratch)


def test_a_mark_that_cannot_be_looked_for_is_removed(tmp_path, monkeypatch):
    """Whether two folders are one is asked with a file in them, which never stays."""
    monkeypatch.setenv("PATH", "/nowhere")
    hosts = ReachedRun("", None, (), Host("127.0.0.1"), "", transport=LocalTransport("localhost"))
    with pytest.raises(HostUnreachable):
        results.is_same(hosts, tmp_path, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("umask", [0o022, 0o000])
def test_what_is_kept_in_the_home_is_closed_whatever_the_umask_is(detached, umask):
    """~/.rackrun and each folder in it are for their account alone, here and on the first host."""
    for host in detached.lab.hosts:
        (host.folder / ".bashrc").write_text(f"umask {umask:03o}\n")
    in_shell = ("sh", "-c", f'umask {umask:03o}; exec "$@"', "sh")
    detached.detach(detached.hosts, *counting(1, 0.0), before=in_shell)
    kept = [home / ".rackrun" for home in (detached.home, detached.lab.hosts[0].folder)]
    assert {path.name for path in kept[0].iterdir()} == {"known"}
    assert kept[1] / detached.run in kept[1].iterdir()
    folders = [path for home in kept for path in (home, *home.iterdir()) if path.is_dir()]
    assert {path: mode_of(path) for path in folders} == dict.fromkeys(folders, 0o700)
    assert detached.result_of("attach")[0] == 0
    assert mode_of(detached.work / "runs") == 0o777 & ~umask
    detached.wait_until_clean()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_records_of_runs_are_whole_and_expire(tmp_path, monkeypatch):
    """A full disk leaves no half file; what was asked for within three months stays."""
    monkeypatch.setattr(runs_here, "RECORDS", tmp_path / "known")
    hosts = [Host("127.0.0.1", python=sys.executable)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        refusal = known_runs.remember("0123", hosts, tmp_path, "")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--hosts FILE" in refusal
    assert not list((tmp_path / "known").iterdir())
    for run in ("0123", "4567"):
        assert known_runs.remember(run, hosts, tmp_path, "") == ""
        os.utime(tmp_path / "known" / f"{run}.json", (0, 0))
    run = find_run("45")
    assert run is not None and run.record is not None
    assert (run.id, list(known_runs.hosts_of(run.record))) == ("4567", hosts)
    known_runs.keep(run.id)
    known_runs.remember("89ab", hosts, tmp_path, "")
    assert {path.stem for path in (tmp_path / "known").iterdir()} == {"4567", "89ab"}
    for other in ({"name": "a", "rack": 7}, {"name": 5}, {"label": "a"}, "a"):  # damage
        (tmp_path / "known" / "cdef.json").write_text(json.dumps({"hosts": [other]}))
        runs = runs_here.recorded_runs()
        assert {run for run in runs if known_runs.hosts_of(runs[run])} == {"4567", "89ab"}
