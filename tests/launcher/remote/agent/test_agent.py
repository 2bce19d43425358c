"""The agent alone: what it reads, what it refuses, when it gives up."""

import io
import json
import os
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from subprocess import PIPE

from rackrun.launcher.remote import locks
from rackrun.launcher.run.events import (
    Event,
    Opened,
    Output,
    RankEnded,
    Report,
)
from rackrun.launcher.run.plan import HostPlan
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.transport import bootstrap
from rackrun.launcher.transport.local import LocalChannel
from tests.lab.waiting import until
from tests.launcher.conftest import agent_plan, started_agent
from tests.launcher.drive import peak_mib


def test_output_without_a_reader_waits_in_the_ranks_pipe(tmp_path):
    """While the launcher does not read, the agent's memory stays small; later all of it arrives.

    Of reports it then gets the newest of every rank, however many there were.
    """
    code = (
        "import json, os, socket, subprocess\n"
        "ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "ear.connect(os.environ['RACKRUN_REPORTS'])\n"
        "flood = subprocess.Popen(['head', '-c', '50000000', '/dev/zero'])\n"
        "for step in range(50_000):\n"
        "    ear.send(json.dumps({'rank': 0, 'step': step, 'why': 'x' * 1000}).encode())\n"
        "open('told', 'w').close()\n"
        "flood.wait()\n"
    )
    plan = agent_plan(tmp_path, sys.executable, "-c", code)
    channel = started_agent(plan)
    while not (tmp_path / "told").exists():
        time.sleep(0.3)
        channel.send(agent_protocol.BEAT)
    agent_pid, *_ = json.loads(Path(plan.scratch, "agent.pid").read_text())
    assert peak_mib(agent_pid) < 40
    decoder, arrived, step = agent_protocol.Decoder(plan), 0, 0
    while data := channel.receive():
        for event in decoder.feed(data):
            arrived += len(event.data) if isinstance(event, Output) else 0
            step = event.fields["step"] if isinstance(event, Report) else step
            if isinstance(event, RankEnded):
                channel.send(agent_protocol.stop_order(9, 0))
    assert arrived == 50_000_000
    assert step == 49_999


def locked(tmp_path: Path, *command: str) -> tuple[HostPlan, Path]:
    """Return a plan whose agent locks a file."""
    path = tmp_path / "lock"
    return HostPlan(
        **{**vars(agent_plan(tmp_path, *command)), "locks": ((str(path), False),)}
    ), path


def wait_for(channel: LocalChannel, decoder: agent_protocol.Decoder, kind: type[Event]) -> None:
    """Read until there was such an event."""
    while not any(isinstance(event, kind) for event in decoder.feed(channel.receive())):
        pass


def is_free(path: Path) -> bool:
    """Return whether no process holds a lock."""
    return locks.holder_in(str(path)) is None


def test_a_lock_stays_young_and_goes_with_its_run(tmp_path):
    """PROC-4: a cleaner of /tmp does not find it old; it names the run; kill -9 sets it free."""
    plan, path = locked(tmp_path, "sleep", "98764")
    channel = started_agent(plan)
    wait_for(channel, agent_protocol.Decoder(plan), Opened)
    os.utime(path, (0, 0))
    until(lambda: path.stat().st_mtime > 0)
    holder = locks.holder_in(str(path))
    assert (holder["run"], holder["name"]) == (plan.scratch.split("-")[1], Path(plan.folder).name)
    agent_pid, *_ = json.loads(Path(plan.scratch, "agent.pid").read_text())
    os.kill(agent_pid, signal.SIGKILL)
    until(lambda: is_free(path) and not Path(plan.scratch).exists())
    channel.close()
    while channel.receive():
        pass


def test_a_rank_that_starts_after_the_order_to_end_gets_it_too(tmp_path):
    """Ctrl-C while ranks are being started: the last one is not waited for in vain."""
    torchrun = (
        "import os, subprocess, sys, time\n"
        "words = sys.argv[sys.argv.index('--no-python') + 1:]\n"
        "def start(n): return subprocess.Popen(words,"
        " env={**os.environ, 'RANK': n, 'LOCAL_RANK': n, 'WORLD_SIZE': '2'},"
        " start_new_session=True)\n"
        "first = start('0')\n"
        "while not os.path.exists('DIR/asked'): time.sleep(0.01)\n"
        "second = start('1')\n"
        "first.wait(), second.wait()\n"
    ).replace("DIR", str(tmp_path))
    rank = (
        "import os, signal, time\n"
        "def ask(*_): open('asked', 'w').close()\n"
        "if os.environ['RANK'] == '0': signal.signal(signal.SIGTERM, ask)\n"
        "print('ready', flush=True)\n"
        "while not os.path.exists('done'): time.sleep(0.01)\n"
    )
    plan = agent_plan(tmp_path, sys.executable, "-c", rank)
    args = (sys.executable, "-c", torchrun, *plan.torchrun[plan.torchrun.index("--no-python") :])
    port = next(name for name in plan.torchrun if name.startswith("--master-port"))
    plan = HostPlan(**{**vars(plan), "torchrun": (*args[:3], port, *args[3:]), "processes": 2})
    channel, decoder = started_agent(plan), agent_protocol.Decoder(plan)
    wait_for(channel, decoder, Output)
    channel.send(agent_protocol.stop_order(signal.SIGTERM, 60))
    events: list[Event] = []
    while data := channel.receive():
        channel.send(agent_protocol.BEAT)
        events += decoder.feed(data)
        if RankEnded(0, 1, 0, 15, ordered=True) in events:
            (tmp_path / "done").touch()
    assert RankEnded(0, 1, 0, 15, ordered=True) in events
    assert RankEnded(0, 0, 0, 0, ordered=True) in events


def test_a_signal_reaches_a_program_that_is_only_just_being_started():
    """Between fork and exec it is not taken by the handler of the starting process."""
    script = (
        "import os, signal\n"
        "from rackrun.launcher.remote import processes\n"
        "for number in processes.HANDLED: signal.signal(number, lambda *_: None)\n"
        "reading, writing = os.pipe(); os.set_blocking(writing, False)\n"
        "signal.set_wakeup_fd(writing)\n"
        "for _ in range(20):\n"
        "    pid = processes.spawn(['sleep', '98764'], dict(os.environ), '/', (0, 1, 2), 9)\n"
        "    os.kill(pid, signal.SIGTERM)\n"
        "    assert os.waitpid(pid, 0)[1] == signal.SIGTERM\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_bootstrap_is_fixed_and_shell_safe():
    """The only words on a remote command line: no quote of its own kind, no `!`, no newline."""
    args = bootstrap.bootstrap("python3.9")
    assert args[:6] == ("python3.9", "-I", "-S", "-X", "utf8", "-c")
    assert not set(bootstrap.BOOTSTRAP) & set("'!\n\\$`")
    order = json.loads(agent_protocol.stop_order(15, 1.5).partition(b"\n")[2])
    assert order == {"do": "stop", "signal": 15, "grace_seconds": 1.5}


def test_a_program_that_does_not_arrive_is_not_waited_for():
    """The link may break while it is sent; once it is here, it has all the time it takes."""
    hasty = bootstrap.BOOTSTRAP.replace("alarm(60)", "alarm(1)")
    with zipfile.ZipFile(made := io.BytesIO(), "w") as archive:
        code = "import time\ndef serve(): time.sleep(1.5); print('served')\n"
        for package in ("rackrun", "rackrun/launcher", "rackrun/launcher/remote"):
            archive.writestr(f"{package}/__init__.py", "")
        archive.writestr("rackrun/launcher/remote/program.py", code)
    program, size = made.getvalue(), b"%d\n" % len(made.getvalue())
    for sent, code, out in ((program[:-1], -signal.SIGALRM, b""), (program, 0, b"served\n")):
        with subprocess.Popen([sys.executable, "-c", hasty], stdin=PIPE, stdout=PIPE) as started:
            assert started.stdin is not None and started.stdout is not None
            started.stdin.write(size + sent)
            started.stdin.flush()
            assert (started.stdout.read(), started.wait()) == (out, code)
