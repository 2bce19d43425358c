"""The rack: who uses what, what happened to hosts, and hosts that are out of use."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_type_hints

import pytest

from launcher.catalog.rack_table import table
from launcher.errors import HostUnreachable
from launcher.preflight.facts import HostFacts
from launcher.preflight.replies import LookReply
from launcher.remote import history as remote
from launcher.remote.files import explained
from launcher.run.hosts import Host
from launcher.run.incidents import History, Incident, lines_of
from rackrun.shapes import shaped
from tests.launcher.lab import ROOT, Lab
from tests.launcher.planted_rack import SLEEP, PlantedRack
from tests.launcher.preflight.test_gpus import OLDER
from tests.waiting import until

NOBODY = 65534
TRUE = ("--", "true")


@pytest.fixture
def rack(start_lab: Callable[[int], Lab]) -> PlantedRack:
    """Return two hosts with two GPUs each, and one without any."""
    assert os.geteuid() == 0, "device nodes need root; type: sudo ./run-tests"
    return PlantedRack(start_lab(0), (2, 2, 0))


def test_the_table_has_runs_queue_and_health(rack: PlantedRack) -> None:
    """Which GPUs are used, by whom, since when, for which run; who waits; what is sick."""
    rack.set_gpu("gpu02", 1, OLDER)
    hosts = str(rack.hosts)
    night = rack.lab.run_ssh("--include", "gpu01:1", "--name", "night", hosts, *SLEEP)
    until(lambda: any(rack.lab.folder.glob("runs/2*-night/logs/gpu01/rank-0.out")), "it runs", 60)
    waiting = rack.lab.run_ssh("--include", "gpu01", "--wait", hosts, *TRUE)
    until(lambda: rack.inspect()["gpu01"]["queue"], "it waits", 60)
    state = rack.inspect()
    (use,) = state["gpu01"]["uses"]
    assert (use["part"], use["name"].endswith("-night")) == (".gpu1", True)
    assert 0 < time.time() - use["since"] < 600
    assert [host["free"] for host in state.values()] == [[0], [0], []]
    code, out, err = rack.result_of(hosts, verb="rack")
    assert code == 0, err
    rows = {line[3:8]: line for line in out.splitlines() if line[3:6] == "gpu"}
    assert rows["gpu01"].split()[1:7] == ["2", "H100", "80GB", "HBM3", "1:", "0"]
    assert f"GPU 1: {use['user']}, night, " in rows["gpu01"]
    assert rows["gpu02"].startswith("!")
    assert "\ngpu02: " in out and "2 uncorrected ECC errors" in out
    assert rows["gpu03"].split()[1:3] == ["-", "yes"]
    assert "3 hosts, 2 of 4 GPUs free, 1 launch in the queue" in out
    for process in (waiting, night):
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=120)


def test_a_drained_host_is_refused_with_the_reason_until_it_is_put_back(rack: PlantedRack) -> None:
    """By --check and by launches, also from another machine of this account: 78."""
    hosts = str(rack.hosts)
    code, _, err = rack.result_of(hosts, "--drain", "gpu02", "fan is broken", verb="rack")
    assert (code, "gpu02: drained: fan is broken" in err) == (0, True), err
    elsewhere = rack.lab.folder / "elsewhere"
    elsewhere.mkdir()
    for more in ({}, {"env": {"HOME": str(elsewhere)}}):
        code, _, err = rack.result_of("--include", "gpu02", hosts, *TRUE, **more)
        assert code == 78, err
        assert "gpu02: drained: by root@" in err and "ago: fan is broken; leave it out" in err
    assert rack.result_of("--include", "gpu02", "--ignore-check", "drained", hosts, *TRUE)[0] == 0
    code, out, _ = rack.result_of("--check", "--json", hosts)
    rows = {row["host"]: row for row in json.loads(out) if row["check"] == "drained"}
    assert code == 78 and list(rows) == ["gpu02"]
    assert rack.inspect()["gpu02"]["free"] == []
    assert "drained by root@" in rack.result_of(hosts, verb="ps")[2]
    assert rack.result_of(hosts, "--undrain", "gpu02", verb="rack")[0] == 0
    code, _, err = rack.result_of("--include", "gpu02", hosts, *TRUE)
    assert code == 0, err
    assert not list(Path("/tmp").glob(f"*{rack.lab.hosts[1].port}.lock{remote.NOTE}*"))


def test_a_host_that_does_not_answer_can_be_drained_from_here(rack: PlantedRack) -> None:
    """It is down, which is why; the table has a row for it all the same."""
    rack.lab.hosts[2].stop()
    hosts = str(rack.hosts)
    code, _, err = rack.result_of(hosts, "--drain", "gpu03", "no power", verb="rack")
    assert (code, "only launches from this machine know of it" in err) == (0, True), err
    state = rack.inspect()["gpu03"]
    assert "refuses" in state["error"] and "no power" in state["drained"]
    out = rack.result_of(hosts, verb="rack")[1]
    assert "drained: gpu03, no answer: gpu03" in out


def test_a_host_that_was_lost_is_remembered_and_warned_of(rack: PlantedRack) -> None:
    """By the next launch, --check, ps and the table; with the time and the run."""
    hosts = str(rack.hosts)
    args = ("--lease-seconds", "2", "--include", "gpu01,gpu02", hosts)
    run = rack.lab.run_ssh(*args, *SLEEP)
    until(lambda: any(rack.lab.folder.glob("runs/2*/logs/gpu02/rank-2.out")), "it runs", 60)
    for pid in rack.lab.hosts[1].sessions():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 75, err
    (folder,) = rack.lab.folder.glob("runs/2*")
    result = json.loads((folder / "result.json").read_text())
    assert {
        host: [one["kind"] for one in those] for host, those in result["incidents"].items()
    } == {"gpu02": ["lost"]}
    code, _, err = rack.result_of("--include", "gpu02", hosts, *TRUE)
    assert code == 0, err
    assert "warning: gpu02: history: lost " in err and f" ago in {folder.name}: " in err
    assert "gpu01" not in err
    (trouble,) = rack.inspect()["gpu02"]["troubles"]
    assert (trouble["kind"], trouble["run"]) == ("lost", folder.name)
    assert "gpu02: lost " in rack.result_of(hosts, verb="ps")[2]


def test_a_sick_gpu_and_two_crashes_are_remembered_on_the_host(rack: PlantedRack) -> None:
    """A launch from another machine warns as well; a failure of the program is not the host's."""
    hosts = str(rack.hosts)
    crash = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    for code in ("raise SystemExit(3)", "raise SystemExit('no')", crash, crash):
        rack.result_of("--include", "gpu01", hosts, "--", sys.executable, "-c", code)
    rack.set_gpu("gpu02", 1, OLDER)
    sick = ("--ignore-check", "gpu health", "--include", "gpu02", hosts, "--", "false")
    rack.result_of(*sick)
    rack.set_gpu("gpu02", 1)
    elsewhere = rack.lab.folder / "elsewhere"
    elsewhere.mkdir()
    args = ("--include", "gpu01,gpu02", hosts, *TRUE)
    code, _, err = rack.result_of(*args, env={"HOME": str(elsewhere)})
    assert code == 0, err
    assert "gpu01: history: failed " in err and "killed by SIGSEGV" in err
    assert "gpu02: history: bad GPU" in err and "2 uncorrected ECC errors" in err
    lines = (rack.home_of("gpu01") / ".rackrun/hosts/gpu01.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["failed", "failed"]


BLAME = """
import json, os, socket
report = {"rank": int(os.environ["RANK"]), "step": 1, "liars": [2]}
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
    sender.sendto(json.dumps(report).encode(), os.environ["RACKRUN_REPORTS"])
"""


def test_a_host_whose_cache_sends_wrong_bytes_is_remembered(rack: PlantedRack) -> None:
    """By what ranks of another host report, in two runs: rack, ps, --check and launches tell it."""
    hosts = str(rack.hosts)
    for _ in range(2):
        run = ("--include", "gpu01,gpu02", hosts, "--", sys.executable, "-c", BLAME)
        code, _, err = rack.result_of(*run)
        assert (code, "history" in err) == (0, False), err
    lines = (rack.home_of("gpu02") / ".rackrun/hosts/gpu02.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["bytes"] * 2
    shown = "of its cache, for gpu01"
    assert shown in rack.result_of(hosts, verb="rack")[1]
    assert shown in rack.result_of(hosts, verb="ps")[2]
    _, out, _ = rack.result_of("--check", "--json", hosts)
    warned = {row["host"] for row in json.loads(out) if shown in json.dumps(row)}
    assert warned == {"gpu02"}
    code, _, err = rack.result_of("--include", "gpu02", hosts, *TRUE)
    assert (code, "warning: gpu02: history: wrong bytes " in err) == (0, True), err


NONSENSE = (
    b'{"text": "\\ud800\\u001b[2J", "at": NaN}',
    b'{"text": "x", "at": 1e400}',
    b'{"text": ' + b"[" * 4000,
    b"[1]",
    b"\xff",
    b"x" * 9000,
    b'{"text": "boo\\u001b[2J", "at": -5}',
)


@pytest.fixture
def mallory(rack: PlantedRack) -> Iterator[Callable[[bytes | str, int], Path]]:
    """Yield what puts a note of another account beside the lock of the first host."""
    host, planted = rack.lab.hosts[0], []

    def note(content: bytes | str, uid: int = NOBODY) -> Path:
        path = Path(f"/tmp/rackrun-{host.address}-{host.port}.lock{remote.NOTE}{uid}")
        if path.is_dir() or path.is_symlink():
            path.rmdir() if path.is_dir() else path.unlink()
        if content == "folder":
            path.mkdir()
        elif content == "pipe":
            os.mkfifo(path)
        else:
            assert isinstance(content, bytes)
            path.write_bytes(content)
        os.chown(path, NOBODY, NOBODY)
        planted.append(path)
        return path

    yield note
    for path in planted:
        with contextlib.suppress(FileNotFoundError):
            path.rmdir() if path.is_dir() else path.unlink()


def test_the_note_of_another_account_warns_and_keeps_nobody_away(
    rack: PlantedRack, mallory: Callable[..., Path]
) -> None:
    """It is named with its owner, whatever it says; one in our name, or no file, is nothing."""
    args = ("--include", "gpu01", str(rack.hosts), *TRUE)
    mallory(json.dumps({"text": "it is mine", "at": time.time() - 7200}).encode())
    code, _, err = rack.result_of(*args)
    assert code == 0, err
    assert "warning: gpu01: history: drained by nobody 2h00m ago: it is mine" in err
    mallory(NONSENSE[0])
    mallory(b'{"text": "in the name of root", "at": 1}', uid=0)
    code, _, err = rack.result_of(*args)
    assert (code, "\x1b" in err, "in the name of root" in err) == (0, False, False), err


def test_no_note_makes_the_answer_of_its_host_a_malformed_one(tmp_path: Path) -> None:
    """Whatever an account writes there, and whatever lies there instead of a file."""
    lock = tmp_path / "lock"
    path = Path(f"{lock}{remote.NOTE}{NOBODY}")
    for content in NONSENSE:
        path.write_bytes(content)
        os.chown(path, NOBODY, NOBODY)
        reply = json.loads(json.dumps({"notes": remote.notes(str(lock))}))
        shaped(reply["notes"], get_type_hints(LookReply, include_extras=True)["notes"])
    path.unlink()
    os.mkfifo(path)
    os.chown(path, NOBODY, NOBODY)
    assert remote.notes(str(lock)) == []
    for name in ("x", "-1", "9" * 30, "\u0663", f"{NOBODY}.more"):
        Path(f"{lock}{remote.NOTE}{name}").write_text('{"text": "x", "at": 1}')
    assert remote.notes(str(lock)) == []


def test_the_note_of_root_keeps_every_account_away(
    rack: PlantedRack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only root can write a file of root's: it is obeyed."""
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    assert remote.notes(str(rack.lab.folder / "lock")) == []
    monkeypatch.undo()
    lock = str(rack.lab.folder / "lock")
    remote.put_note(lock, "water in the room", 5.0)
    assert oct(Path(f"{lock}{remote.NOTE}0").stat().st_mode)[-3:] == "644"
    monkeypatch.setattr(os, "getuid", lambda: NOBODY)
    (note,) = remote.notes(lock)
    assert note == {"uid": 0, "user": "root", "text": "water in the room", "at": 5}
    monkeypatch.undo()
    remote.put_note(lock, "", 6.0)
    assert not Path(f"{lock}{remote.NOTE}0").exists()


def test_what_lies_in_place_of_our_note_is_named(tmp_path: Path) -> None:
    """A folder of another account: other accounts do not know, and the user does."""
    lock = str(tmp_path / "lock")
    path = Path(f"{lock}{remote.NOTE}{os.getuid()}")
    path.mkdir()
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(FileExistsError) as error:
        remote.put_note(lock, "fan", 5.0)
    assert explained(error.value) == f"{path}: File exists"


def test_the_table_is_drawn_again_on_a_terminal_until_ctrl_c(rack: PlantedRack) -> None:
    """It shows what has changed meanwhile; Ctrl-C is a good end, without a traceback, and leaves
    the last table in the terminal."""
    leading, following = pty.openpty()
    args = ("--ssh-config", str(rack.lab.config), str(rack.hosts))
    env = {**os.environ, "HOME": str(rack.lab.home), "TERM": "xterm", "COLUMNS": "160"}
    process = subprocess.Popen(
        [sys.executable, "-m", "rackrun", "rack", *args],
        **dict.fromkeys(("stdin", "stdout", "stderr"), following),
        env={**env, "PYTHONPATH": str(ROOT)},
    )
    os.close(following)
    output = b""

    def shows(text: bytes) -> bool:
        nonlocal output
        output += os.read(leading, 65536)
        return text in output

    until(lambda: shows(b"4 of 4 GPUs free"), "the first table", 60)
    rack.set_gpu("gpu01", 0, OLDER)
    until(lambda: shows(b"3 of 4 GPUs free"), "a newer one", 60)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(OSError):
        while data := os.read(leading, 65536):
            output += data
    assert process.wait(30) == 0
    assert b"Traceback" not in output
    screen, _, left = output.rpartition(b"\x1b[?1049l")  # the end of the alternate screen
    assert b"\x1b[?1049h" in screen and b"3 of 4 GPUs free" in left
    os.close(leading)


@pytest.mark.parametrize("width", [80, 120])
def test_the_table_fits_a_terminal_whatever_has_happened(
    monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    """A row takes few lines; what is wrong with a host has the whole width, below the table."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    reason = "fan is broken, ask facilities in room 12 before Friday"
    past = History((Incident(time.time() - 7200, "drained", reason, by="alice@desk"),))
    busy = {"part": "", "pid": 7, "user": "bob", "run": "b" * 32, "name": "20261122-093000-night"}
    uses = {"occupancy": {**STATE, "uses": [{**busy, "since": time.time() - 60}]}}
    rack = [
        HostFacts(Host("gpu01"), None, uses),
        HostFacts(Host("gpu02"), None, {"occupancy": {**STATE, "uses": []}}, past),
        HostFacts(Host("gpu03"), HostUnreachable("gpu03: Connection refused")),
    ]
    lines = re.sub(r"\x1b\[[0-9;]*m", "", table(rack)).splitlines()
    assert [line[:8].rstrip() for line in lines[1:4]] == ["   gpu01", "X  gpu02", "X  gpu03"]
    assert max(map(len, lines[:4])) <= width
    assert lines[4:7] == [
        *("", f"gpu02: drained by alice@desk 2h00m ago: {reason}", "gpu03: Connection refused"),
    ]


STATE = {"load": 1.0, "cores": 64, "gpus": 8, "disk_free": 1 << 40, "queue": [], "notes": []}


@pytest.mark.parametrize("lines", [10, 24, 40])
@pytest.mark.parametrize("width", [80, 140])
def test_more_hosts_than_a_screen_has_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch, lines: int, width: int
) -> None:
    """The first ones are shown, some of those with troubles, and always what there is in all."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(width))
    busy = {"part": "", "pid": 7, "user": "bob", "run": "b" * 32, "since": time.time() - 60}
    name = "20261122-093000-resnet50-with-a-name-that-takes-a-second-line"
    uses = {"occupancy": {**STATE, "uses": [{**busy, "name": name}]}}
    rack = [
        HostFacts(Host(f"gpu{number:02}"), None, uses)
        if number % 3
        else HostFacts(Host(f"gpu{number:02}"), HostUnreachable("Connection refused"))
        for number in range(1, 61)
    ]
    text = re.sub(r"\x1b\[[0-9;]*m", "", table(rack, lines))
    rows = re.findall(r"^[X ] +gpu\d\d\b", text, re.M)
    (more,) = re.findall(r"^… (\d+) more hosts$", text, re.M)
    assert len(rows) + int(more) == 60
    told = text.count(": Connection refused")
    (silent,) = re.findall(r"^… (\d+) more hosts? with troubles?$", text, re.M)
    assert told + int(silent) == 20
    assert "60 hosts, 0 of 320 GPUs free, no answer: gpu[03,06," in text
    shown = sum(-(-len(line) // width) or 1 for line in text.splitlines())
    assert lines - 2 <= shown <= lines or len(rows) == 1


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--drain", "gpu01"), "--drain gpu01: say why; for example: "),
        (("hosts.txt", "why"), "'why': a reason is for --drain HOST"),
        (("--drain", "a", "--undrain", "b", "hosts.txt"), "exclude each other"),
        (("hosts.txt", "--drain", "gpu09", "x"), "--drain: gpu09 is not in the host file"),
        (("nowhere.txt",), "nowhere.txt: No such file"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, args: tuple[str, ...], says: str) -> None:
    """64, in one line, before a host is asked."""
    (tmp_path / "hosts.txt").write_text("gpu01\n")
    arguments = [sys.executable, "-m", "rackrun", "rack", *args]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    done = subprocess.run(arguments, capture_output=True, text=True, cwd=tmp_path, env=env)
    assert (done.returncode, says in done.stderr) == (64, True), done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_lines_of_a_file_of_a_host_are_those_of_its_incidents() -> None:
    """What the launcher sends to a host is a line for each, which it can read again."""
    incidents = [Incident(5.0, "lost", 'a "b"\n'), Incident(6.0, "done")]
    assert len(lines_of(incidents).splitlines()) == 2
