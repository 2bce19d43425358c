"""What happened to hosts: what counts against one, for how long, and what is passed over."""

import json
import os
import random
from pathlib import Path

import pytest

from launcher.remote import history as files
from launcher.run.events import Gpu, Lost, Report, Usage
from launcher.run.incidents import (
    MOST_OF_RUN,
    REMEMBERED_SECONDS,
    THROTTLED_REPORTS,
    Incident,
    IncidentLog,
    Kind,
    history,
    lines_of,
)
from launcher.run.job import Command, Job
from launcher.run.plan import PlannedHost, make_plan
from launcher.run.state import RunState
from launcher.supervision.reports import valid_fields
from rackrun.run_folder import RunFolder

NOW = 1_800_000_000.0


def past(*incidents: tuple[float, Kind, str]) -> str:
    """Return lines of a file: seconds ago, what happened, in which run."""
    return lines_of(Incident(NOW - ago, kind, "why", run) for ago, kind, run in incidents)


def kinds(text: str) -> list[str]:
    return [incident.kind for incident in history(text).troubles(NOW)]


def test_one_loss_counts_and_a_failure_only_in_a_second_run() -> None:
    """A program may be to blame for a failure, wrong bytes and slowness; not for a lost host."""
    assert kinds(past((60, "lost", "a"), (50, "gpu", "a"))) == ["lost", "gpu"]
    for kind in ("failed", "slow", "bytes"):
        assert kinds(past((60, kind, "a"), (50, kind, "a"))) == []
        assert kinds(past((60, kind, "a"), (50, kind, "b"))) == [kind, kind]


def test_what_is_old_or_made_up_for_counts_no_more() -> None:
    """Two weeks, a long run that ended well, or a person who puts the host back."""
    assert kinds(past((REMEMBERED_SECONDS + 1, "lost", "a"))) == []
    assert kinds(past((60, "lost", "a"), (50, "done", "b"))) == []
    assert kinds(past((60, "lost", "a"), (50, "undrained", ""))) == []
    assert kinds(past((60, "done", "a"), (50, "lost", "b"))) == ["lost"]


def test_the_last_word_about_a_drain_counts() -> None:
    """Whatever the order of the lines, and however often a line comes: once by each machine."""
    drained = past((60, "drained", ""))
    assert history(drained, drained).drained == Incident(NOW - 60, "drained", "why")
    assert history(past((50, "undrained", "")), drained).drained is None
    assert history(past((70, "undrained", "")), drained).drained is not None
    assert history(drained).shown(NOW) == ""


def test_what_is_no_incident_is_passed_over() -> None:
    """Other shapes, damage, nonsense, lines of the far future: the rest is read."""
    lines = past((60, "lost", "a"))
    for nonsense in ("[]", '{"at": NaN, "kind": "lost"}', '{"at": 1}', "\x1b[2J", "[" * 9000, "{"):
        assert kinds(f"{nonsense}\n{lines}{nonsense}") == ["lost"]
    assert kinds(lines_of([Incident(NOW + 1e6, "lost")])) == []
    for bad in ({"run": "../x"}, {"kind": "gone"}, {"text": "x" * 400}, {"more": 1}):
        line = json.dumps({"at": NOW, "kind": "lost", **bad})
        assert kinds(line) == []


def test_a_run_notes_what_happens_to_its_hosts() -> None:
    """A loss, and a GPU that stays throttled; not a moment's heat, nor a host that refused."""
    log = IncidentLog()
    hot = Usage(0, 0.5, 1, 2, (Gpu(9, 1, 2), Gpu(9, 1, 2, slowed="heat")))
    for _ in range(THROTTLED_REPORTS - 1):
        log.take(hot, "a")
    assert log.of_run("x", ["a", "b"], False) == {}
    for _ in range(THROTTLED_REPORTS):
        log.take(hot, "a")
    log.take(Lost(1, "no heartbeat\x1b[2J for 15 s"), "b")
    log.take(Lost(2, "no room", 78), "c")
    noted = log.of_run("x", ["a", "b", "c"], False)
    assert {host: [(one.kind, one.text) for one in those] for host, those in noted.items()} == {
        "a": [("gpu", "GPU 1 slowed by heat")],
        "b": [("lost", "no heartbeat␛[2J for 15 s")],
    }
    assert {one.run for those in noted.values() for one in those} == {"x"}
    assert list(log.of_run("x", ["a", "b"], True)) == ["a"], "whoever forces the end loses hosts"


def test_a_host_that_sends_wrong_bytes_is_remembered_not_the_one_that_reads_them() -> None:
    """Whatever the reports of other ranks say: ranks that are not of the run, anything else."""
    job = Job(Command(("true",)), RunFolder(Path("/runs/x")))
    hosts = [PlannedHost(name, "10.0.0.1", 2, "python3", "/", "/x") for name in "abc"]
    run = RunState(make_plan(job, hosts, 29500), NOW)
    for liars in ([2], [2], [2, 99], "2", [-1], [True], [[]], list(range(99))):
        fields = valid_fields(json.dumps({"step": 1, "liars": liars}).encode())
        assert fields is not None
        run.take(Report(0, 1, fields), NOW)
    noted = run.incidents.of_run("x", list("abc"), False)
    assert {host: [(each.kind, each.text) for each in those] for host, those in noted.items()} == {
        "b": [("bytes", "of its cache, for a")]
    }


def test_when_all_hosts_are_lost_at_once_our_own_network_was() -> None:
    """No host is to blame; the only host of a run may be."""
    log = IncidentLog()
    for node, host in enumerate("ab"):
        log.take(Lost(node, "no heartbeat"), host)
    assert log.of_run("x", ["a", "b"], False) == {}
    assert list(log.of_run("x", ["a"], False)) == ["a"]
    for number in range(99):
        log.add("a", "slow", f"rank {number}")
    assert len(log.of_run("x", ["a"], False)["a"]) == MOST_OF_RUN


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a home that is this process's."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_file_keeps_its_newest_lines_and_is_closed_to_others(home: Path) -> None:
    """However often something happens, it stays small, and each line whole; mode 0600 in 0700."""
    for number in range(2000):
        files.append("gpu[01]:22", lines_of([Incident(NOW, "failed", f"{number}", "run")]))
    path = Path(files.path_of("gpu[01]:22"))
    text = files.read("gpu[01]:22")
    numbers = [json.loads(line)["text"] for line in text.splitlines()]
    assert numbers == [str(number) for number in range(2000 - len(numbers), 2000)]
    assert len(numbers) > 100 and path.stat().st_size <= files.MOST_BYTES
    assert path.parent == home / ".rackrun" / "hosts"
    modes = [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]
    assert [each.name for each in path.parent.iterdir()] == [path.name], "and no partial file"


def test_names_of_hosts_lead_nowhere_else(home: Path) -> None:
    """A label of hosts.txt becomes a file of that folder."""
    for name in ("../../etc/passwd", "[2001:db8::7]:22", "a" * 300, ".."):
        files.append(name, "x\n")
        assert Path(files.path_of(name)).parent == home / ".rackrun" / "hosts"
    assert len(list((home / ".rackrun" / "hosts").iterdir())) == 4


def test_what_lies_there_instead_is_not_read_or_followed(home: Path) -> None:
    """A link, a pipe, a folder: nothing is remembered, and nothing waits."""
    folder = home / ".rackrun" / "hosts"
    folder.mkdir(parents=True)
    (home / "secret").write_text("{}\n")
    (folder / "link.jsonl").symlink_to(home / "secret")
    os.mkfifo(folder / "pipe.jsonl")
    (folder / "folder.jsonl").mkdir()
    for name in ("link", "pipe", "folder", "nothing"):
        assert files.read(name) == ""
    with pytest.raises(OSError, match="symbolic links"):
        files.append("link", "x\n")
    assert (home / "secret").read_text() == "{}\n"


def test_no_bytes_in_a_file_keep_a_host_from_being_read(home: Path) -> None:
    """500 damaged files: each line is an incident or nothing, and never an error."""
    folder = home / ".rackrun" / "hosts"
    folder.mkdir(parents=True)
    good = past(*((number, "lost", "a") for number in range(20))).encode()
    for seed in range(500):
        chance = random.Random(seed)
        damaged = bytearray(good)
        for _ in range(chance.randrange(1, 30)):
            damaged[chance.randrange(len(damaged))] = chance.randrange(256)
        (folder / "a.jsonl").write_bytes(damaged)
        assert len(history(files.read("a")).troubles(NOW)) <= 20
