"""Hosts that several people use: who holds them, waiting, taking what is free, and ends."""

import json
import os
import pwd
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rackrun.launcher.remote import locks
from tests.lab.detached import SHORT, WAIT
from tests.lab.hosts import ROOT, Lab
from tests.lab.needs import need
from tests.lab.waiting import until

WAITING = ("--", sys.executable, "-c", WAIT)
OVER = ("--", sys.executable, "-c", "print('over')")
KEEP = "import pathlib, sys; pathlib.Path({!r}).write_text(sys.stdin.read()); sys.exit(3)"


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> Lab:
    """Return two hosts that have names in the user's ssh_config."""
    lab = start_lab(2)
    pairs = enumerate(lab.hosts, start=1)
    lab.configure(*(f"Host gpu{n}\n  HostName {h.address}\n  Port {h.port}" for n, h in pairs))
    return lab


@pytest.mark.security("PROC-4")
def test_who_holds_a_host_is_named_waited_for_and_gone_around(rack):
    """The refusal names run, owner and command; those that --wait start in order of arrival.

    One that dies leaves the line, and one without --wait comes after those that wait.
    """
    common = ("--python", str(rack.cheap_python()), "--workdir", str(rack.folder), *SHORT)
    first = rack.run_ssh("-H", "gpu1", "--name", "night", *common, *WAITING)
    until(lambda: any(rack.folder.glob("runs/2*-night/logs/gpu1/1/rank-0.out")), "it runs", 60)
    (folder,) = rack.folder.glob("runs/2*-night")
    plan = json.loads((folder / "plan.json").read_text())
    run, ((path, _),) = plan["run_id"], plan["hosts"][0]["locks"]
    os.utime(path, (0, 0))
    until(lambda: Path(path).stat().st_mtime > 0, "no cleaner of /tmp finds it old", 60)
    code, _, err = rack.result_of("-H", "gpu1", *common, *OVER)
    assert code == 78
    for args in (f"run {run[:8]} ({folder.name}) of ", ", since ", f"stop {run[:8]}", "--wait"):
        assert args in err
    code, out, err = rack.result_of("-H", "gpu1,gpu2", "--hosts-needed", "1", *common, *OVER)
    assert (code, out) == (0, "over\n"), err
    code, _, err = rack.result_of("-H", "gpu1,gpu2", "--hosts-needed", "2", *common, *OVER)
    assert (code, "2 hosts needed, 1 free and fit" in err) == (78, True)
    line = {}
    for name, hosts in {"killed": "1", "early": "1,2", "hasty": "1", "late": "2,1"}.items():
        append = f"open({str(rack.folder / 'order')!r}, 'a').write('{name} ')"
        work = ("--", sys.executable, "-c", append)
        line[name] = rack.run_ssh("-H", f"gpu[{hosts}]", "--wait", *common, *work)
        while "waiting" not in (errors := line[name].stderr.readline()):
            assert errors, name
    code, _, err = rack.result_of("-H", "gpu2", *common, *OVER)
    assert (code, "gpu2: lock: others wait for it: " in err) == (78, True), err
    line["killed"].kill()
    line["hasty"].send_signal(signal.SIGINT)
    for name in ("killed", "hasty"):
        line[name].communicate(timeout=60)
    assert line["hasty"].returncode == 130
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=120)
    for name in ("early", "late"):
        _, err = line[name].communicate(timeout=120)
        assert line[name].returncode == 0, err
    assert (rack.folder / "order").read_text().split() == ["early"] * 2 + ["late"] * 2


def test_a_time_limit_ends_a_run_and_a_command_gets_the_result(rack, tmp_path):
    """Exit code 124 with its cause; the command's own failure is reported and changes nothing."""
    kept = tmp_path / "result.json"
    command = f'{sys.executable} -c "{KEEP.format(str(kept))}"'
    args = ("--python", str(rack.cheap_python()), "--time-limit", "1s", "--on-event", command)
    code, _, err = rack.result_of("-H", "gpu2", *args, *SHORT, *WAITING)
    assert code == 124, err
    event = json.loads(kept.read_text())
    result = event["result"]
    assert (event["event"], event["folder"]) == ("end", result["folder"])
    assert (result["verdict"], result["cause"]) == ("interrupted", "stopped by --time-limit")
    assert f"--on-event {sys.executable}, end: exit code 3" in err
    assert "time limit reached" in err


# -- the files


SOMEBODY = 65534
HOLDER = """
import os
from rackrun.launcher.remote import locks
os.setuid({})
locks.lock({!r}, False)
print(1, flush=True)
input()
"""


@contextmanager
def holding(path: Path, user: int = 0) -> Iterator[subprocess.Popen[bytes]]:
    """Lock a file in a process of an account; the process is yielded."""
    need("root")
    code = [sys.executable, "-c", HOLDER.format(user, str(path))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(code, cwd=ROOT, umask=0o077, **pipes) as process:
        assert process.stdout and process.stdout.readline() == b"1\n"
        yield process
        process.kill()


@pytest.fixture
def lock() -> Iterator[Path]:
    """Yield the path of a lock in /tmp, which all accounts share."""
    path = Path(f"/tmp/rackrun-test-{os.getpid()}.lock")
    yield path
    for left in path.parent.glob(f"{path.name}*"):
        left.unlink()


def test_a_lock_is_for_all_accounts_and_goes_with_its_process(lock):
    """PROC-4: whoever made the file, whatever the umask is, also by kill -9; the file stays."""
    for user in (SOMEBODY, 0, SOMEBODY):
        with holding(lock, user) as process:
            assert lock.stat().st_mode & 0o777 == 0o666
            assert lock.stat().st_uid == SOMEBODY
            assert locks.holder_in(str(lock))
            name = pwd.getpwuid(user).pw_name
            assert locks.holder_of(str(lock), [""], "")["holder"].startswith(f"{name}, since ")
            with pytest.raises(BlockingIOError, match="another run holds this host"):
                locks.lock(str(lock), False, seconds=0.1)
            process.kill()
            process.wait()
        assert locks.holder_of(str(lock), [""], "") == {"holder": ""}
        os.close(locks.lock(str(lock), False))


def test_parts_of_a_host_exclude_the_whole_and_the_other_way_round(lock):
    """Runs on parts share the lock of the host, and each has that of its GPU alone."""
    shared = locks.lock(str(lock), True)
    with holding(Path(f"{lock}.gpu1")):
        assert locks.holder_in(str(lock)) is None
        assert locks.holder_of(str(lock), [""], "")["holder"]
        assert locks.holder_of(str(lock), [".gpu0", ".gpu1"], "")["holder"]
        assert locks.holder_of(str(lock), [".gpu0"], "") == {"holder": ""}
        assert locks.taken_gpus(str(lock), 3, "") == [1]
        assert [use["part"] for use in locks.uses(str(lock), 3)] == [".gpu1"]
    os.close(shared)
    with holding(lock):
        assert locks.taken_gpus(str(lock), 2, "") == [0, 1]
        with pytest.raises(BlockingIOError):
            locks.lock(str(lock), True, seconds=0.1)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"[" * 4000,
        b"\xff",
        b'{"user": 5, "run": "", "name": "", "since": 1.0}',
        b'{"user": "a\\u001b[2J", "run": "", "name": "", "since": 1.0}',
        b'{"user": "a\\ud800", "run": "", "name": "", "since": 1.0}',
        b'{"user": "a", "run": "../x", "name": "", "since": 1.0}',
        b'{"user": "a", "run": "", "name": "", "since": NaN}',
        b'{"user": "a", "run": "", "name": "", "since": 1e300}',
        b'{"user": "a", "run": "", "name": "' + b"x" * 5000 + b'", "since": 1.0}',
    ],
)
@pytest.mark.security("PROC-5")
def test_what_no_holder_writes_says_nothing(lock, text):
    """PROC-5: any account can write into a lock: what has not the shape is passed over."""
    with holding(lock):
        lock.write_bytes(text)
        assert locks.holder_of(str(lock), [""], "") == {"holder": "another launch"}


@pytest.mark.security("PROC-3")
def test_no_lock_leads_to_another_file(lock, tmp_path):
    """PROC-3: a link, a second name of a file, a pipe and a folder are refused, not written to."""
    target = tmp_path / "target"
    target.write_text("mine")
    second = Path(f"/tmp/rackrun-test-{os.getpid()}-target")
    second.write_text("mine")
    plant = {
        "link": lambda: lock.symlink_to(target),
        "second name": lambda: lock.hardlink_to(second),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }
    try:
        for what, make in plant.items():
            make()
            with pytest.raises(OSError, match=str(lock)):
                locks.lock(str(lock), False, seconds=0.1)
            assert "cannot be locked" in locks.lock_problem([str(lock)]), what
            lock.rmdir() if what == "folder" else lock.unlink()
        assert target.read_text() == second.read_text() == "mine"
    finally:
        second.unlink()


# -- the queue

EARLY, LATE = ("1700000001.000000-00000001", "1700000002.000000-00000000")


def test_tickets_that_cross_on_two_hosts_have_one_order(lock):
    """The late launch is the first to arrive on the second host; the early one has both."""
    other = Path(f"{lock}-other.lock")
    for path, turns in ((lock, (EARLY, LATE)), (other, (LATE, EARLY))):
        for turn in turns:
            Path(f"{path}{locks.TICKET}{turn}").touch()
        assert [turn for turn, *_ in locks.tickets(str(path))] == [EARLY, LATE]
        assert locks.holder_of(str(path), [""], EARLY) == {"holder": ""}
        assert locks.holder_of(str(path), [".gpu1"], LATE)["queued"]
        assert locks.holder_of(str(path), [""], "") == {"holder": ""}, "a restart does not queue"


def test_gpus_have_queues_of_their_own(lock):
    """But for launches that wait for the whole host, and those behind them."""
    locks.take_tickets(str(lock), [".gpu0", ".gpu1"], EARLY)
    assert locks.holder_of(str(lock), [".gpu1"], LATE)["queued"]
    assert locks.holder_of(str(lock), [""], LATE)["queued"]
    assert locks.holder_of(str(lock), [".gpu2"], LATE) == {"holder": ""}
    locks.take_tickets(str(lock), [".gpu2"], EARLY)
    assert [part for _, part, _ in locks.tickets(str(lock))] == [".gpu2"]
    locks.release()
    assert locks.tickets(str(lock)) == []


def test_a_ticket_that_nobody_touches_is_that_of_a_dead_launch(lock):
    """Each look touches it; it is removed after a minute, and who was only suspended is back."""
    locks.take_tickets(str(lock), [""], EARLY)
    ticket = Path(f"{lock}{locks.TICKET}{EARLY}")
    now = time.time()
    os.utime(ticket, (now - 50, now - 50))
    assert locks.holder_of(str(lock), [""], LATE)["queued"]
    locks.take_tickets(str(lock), [""], EARLY)
    assert ticket.stat().st_mtime > now - 10
    os.utime(ticket, (now - 70, now - 70))
    assert locks.holder_of(str(lock), [""], LATE) == {"holder": ""}
    assert not ticket.exists()
    locks.take_tickets(str(lock), [""], EARLY)
    assert locks.holder_of(str(lock), [""], LATE)["queued"]
    locks.release()


@pytest.mark.parametrize("turn", ["1", "1e300", "x", f"{EARLY}-polite", f"{EARLY}\n"])
@pytest.mark.security("PROC-5")
def test_a_file_that_is_no_ticket_ends_no_look(lock, turn):
    """Any account may leave a file of such a name."""
    Path(f"{lock}{locks.TICKET}{turn}").touch()
    assert locks.holder_of(str(lock), [""], LATE) == {"holder": ""}
