"""The preflight's judgements, each on its own: facts about hosts -> refusals, and the table."""

import re
from dataclasses import replace
from typing import Any

import pytest

from rackrun.contract.task_needs import TaskNeeds
from rackrun.errors import Problem
from rackrun.launcher.errors import AccessRefused, HostUnreachable, PreflightRefused
from rackrun.launcher.preflight import gpus
from rackrun.launcher.preflight.check_table import shown
from rackrun.launcher.preflight.checks import CHECKS
from rackrun.launcher.preflight.examine import TableRow, are_only_busy, examine, refusal
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts
from rackrun.launcher.preflight.replies import REPLIES
from rackrun.launcher.preflight.requirements import Requirements
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.hosts import Host, parse_hosts
from rackrun.launcher.run.job import Command, TaskWork, Work
from rackrun.launcher.transport.parallel import all_or_raise
from rackrun.shapes import shaped

INTERPRETER = {"version": "3.11.7", "torch": "2.13.0+cu130", "cuda": "13.0"}
GPU = {"name": "H200", "total": 143000, "used": 4}
GPUS = {"gpus": [GPU] * 8, "driver": "580.65", "capabilities": ["9.0"] * 8}
SHAPES = {shape.order_name: shape for shape in REPLIES}
GOOD: dict[str, dict[str, Any]] = {
    "look": {
        "time": 0.0,
        "machine": "1",
        "address": "10.0.0.1",
        "lock": "/tmp/rackrun-1.lock",
        "holder": "",
        "workdir": "/w",
        "problems": {},
        "lock_problem": "",
        "drained": "",
        "python": "/w/.venv/bin/python",
        "interpreter": INTERPRETER,
        "cores": 8,
        "gpus": 8,
        "disk_free": 1 << 40,
        "user": {"uid": 0, "gid": 0, "name": "root"},
    },
    "gpus": GPUS,
    "code": {"missing": [], "different": [], "count": 0},
    "route": {"address": "10.0.0.1", "interface": "ib0"},
    "shards": {"dataset": "imagenet", "splits": ["train", "val"]},
}


def finding(name: str, clock_ahead: float = 0.001, **changes: Any) -> HostFacts:
    """Return a good host with other replies, or with other fields: `look__gpus=4`."""
    replies = {question: dict(reply) for question, reply in GOOD.items()}
    replies["look"]["machine"] = name
    for path, value in changes.items():
        question, _, key = path.partition("__")
        replies.setdefault(question, {})
        replies[question] = {**replies[question], key: value} if key else value
    shapes = {SHAPES[asked]: shaped(reply, SHAPES[asked]) for asked, reply in replies.items()}
    return HostFacts(Host(name), replies=shapes, clock_ahead=clock_ahead, clock_error=0.01)


TASK, COMMAND = TaskWork("catdog"), Command(("true",))
ON_CPU = TaskWork("catdog", ("--device", "cpu"))


def facts(
    *hosts: HostFacts, master: str = "10.0.0.1", work: Work = TASK, **asked: Any
) -> ClusterFacts:
    return ClusterFacts(hosts, master, 29500, Requirements(work, **asked))


def rows_of(cluster: ClusterFacts) -> list[TableRow]:
    """Return what is not well on the last host."""
    rows = examine(cluster, CHECKS)
    last = cluster.hosts[-1].host.label
    return [row for row in rows if row.host == last and row.level != "ok"]


def refused(cluster: ClusterFacts, *allowed: str) -> Problem | None:
    return refusal(cluster, CHECKS, examine(cluster, CHECKS, allowed))


def test_hosts_that_are_alike_and_well_pass_every_check():
    """Nothing is refused or warned of; the table shows what was found."""
    cluster = facts(finding("a"), finding("b"))
    rows = examine(cluster, CHECKS)
    assert {row.level for row in rows} == {"ok"}
    assert refusal(cluster, CHECKS, rows) is None
    assert {row.check: row.found for row in rows if row.host == "b"} == {
        "reachable": "yes",
        "python": "3.11.7",
        "torch": "2.13.0+cu130, CUDA 13.0",
        "gpus": "8 H200 140 GiB, 9.0",
        "driver": "580.65",
        "code": "as here",
        "workdir": "/w",
        "disk": "1024 GiB free",
        "clock": "in step",
        "network": "ib0 10.0.0.1",
        "master": "reached",
        "shards": "imagenet",
        "lock": "free",
    }


NEEDS = TaskNeeds(("timm",), ("wandb",), ("own",), splits=("test",))
LACKS = {**INTERPRETER, "missing": ["timm", "wandb", "own"]}
SICK = {**GPU, "uncorrected": 2}
WRONG = [
    ({"look__interpreter": {"error": "/x: not found"}}, "python", "/x: not found"),
    ({"look__interpreter": {**INTERPRETER, "version": "3.12.1"}}, "python", "from a: 3.11"),
    ({"look__interpreter": {**INTERPRETER, "torch": ""}}, "torch", "has no torch"),
    ({"look__interpreter": {**INTERPRETER, "torch": "2.15"}}, "torch", "from a: 2.13.0+cu130"),
    ({"look__interpreter": {**INTERPRETER, "cuda": "12.6"}}, "torch", "CUDA differs from a: 13.0"),
    ({"look__problems": {"weights": "net.pt: gone"}}, "files", "net.pt: gone"),
    ({"look__problems": {"cache": "/c is no folder"}}, "files", "/c is no folder"),
    ({"image": {"error": "no such image"}}, "image", "no such image"),
    ({"look__gpus": 4}, "gpus", "a has 8; write slots=N"),
    ({"gpus": {"gpus": [], "problem": "nvidia-smi: mismatch"}}, "driver", "nvidia-smi: mismatch"),
    ({"gpus__gpus": [GPU, SICK]}, "gpu health", "GPU 1: 2 uncorrected ECC errors"),
    ({"code": {"missing": ["a"], "different": ["b"], "count": 2}}, "code", "a is missing, b"),
    ({"look__problems": {"workdir": "there is no folder /w"}}, "workdir", "no folder"),
    ({"look__disk_free": 1000}, "disk", "almost full"),
    ({"look__problems": {"tmp": "/tmp is full"}}, "disk", "/tmp is full"),
    ({"hold": {"error": "denied"}}, "disk", "/tmp/rackrun-1.lock cannot be locked: denied"),
    ({"look__problems": {"open files": "64 are too few"}}, "limits", "64 are too few"),
    ({"route": {"error": "unreachable"}}, "network", "no route to 10.0.0.1: unreachable"),
    ({"look__problems": {"interface": "there is no device ib7"}}, "network", "ib7"),
    ({"route__unreached": "refused"}, "master", "10.0.0.1 port 29500 cannot be reached: refused"),
    ({"listen": {"error": "taken"}}, "master", "cannot listen there: taken"),
    ({"shards": {"error": "404"}}, "shards", "404"),
    ({"look__holder": "jo"}, "lock", "in use by another run: jo"),
    ({"look__holder": "jo", "look__queued": True}, "lock", "others wait for it: jo"),
    ({"look__drained": "fan is broken"}, "drained", "fan is broken"),
    ({"look__machine": "a"}, "machine", "is the same machine as a"),
]
DOUBTFUL = [
    ({"gpus__gpus": [{**GPU, "used": 9000}]}, "gpus", "in use: GPU 0: 9000 MiB"),
    ({"gpus__gpus": [GPU, {**GPU, "name": "A100"}]}, "gpus", "model A100 and H200, elsewhere H200"),
    ({"gpus__driver": "590.1"}, "gpus", "driver 590.1, elsewhere 580.65"),
    ({"gpus__gpus": [{**GPU, "slowed": "heat"}]}, "gpu health", "GPU 0: slowed by heat"),
    ({"look__problems": {"shared memory": "/dev/shm has 64 MiB"}}, "limits", "/dev/shm has 64 MiB"),
    ({"look__problems": {"locked memory": "may lock 1 KiB"}}, "limits", "may lock 1 KiB"),
    ({"clock_ahead": 60.0}, "clock", "+60 s off"),
]


@pytest.mark.parametrize(
    ("changes", "check", "says", "level"),
    [(*row, "refused") for row in WRONG] + [(*row, "warning") for row in DOUBTFUL],
)
def test_what_is_wrong_with_a_host_is_named(changes, check, says, level):
    """Each check refuses or warns of what it is there for, and of nothing else."""
    (row,) = rows_of(facts(finding("a"), finding("b", **changes)))
    assert (row.check, row.level, says in row.problem) == (check, level, True), row
    assert row.hint or check in ("gpus", "image")


def test_what_the_task_needs_is_looked_for_where_its_ranks_run():
    """Trackers on the first host alone; a split without samples ends with 65."""
    bad = finding("a", look__interpreter=LACKS)
    first, second = (facts(bad, needs=NEEDS), facts(bad, replace(bad, host=Host("b")), needs=NEEDS))
    assert [row.problem for row in rows_of(first)] == [
        "/w/.venv/bin/python has no timm, wandb",
        "no module own in /w or installed",
        "imagenet: no samples in the split 'test'; there are in: train, val",
    ]
    assert rows_of(second)[0].problem == "/w/.venv/bin/python has no timm"
    assert refused(facts(finding("a"), needs=NEEDS)).exit_code == 65
    assert refused(first).exit_code == 78


def test_where_no_image_runs_its_line_alone_says_why():
    """The data would be read in it."""
    without = finding("a", image={"error": "no such image"}, shards={"error": "docker: not found"})
    assert [row.check for row in rows_of(facts(without))] == ["image"]


def test_the_command_that_installs_an_extra_is_printed_where_it_can_be_typed(monkeypatch):
    """On this machine, for the interpreter that runs rackrun; else in words."""
    lacking = finding("a", look__interpreter={**INTERPRETER, "missing": ["timm", "wandb"]})
    needs = facts(lacking, needs=replace(NEEDS, splits=()), is_here=True)
    assert "name another interpreter with --python" in rows_of(needs)[0].hint
    monkeypatch.setattr("sys.executable", "/w/.venv/bin/python")
    assert re.fullmatch(r"type: .*\[timm,wandb\].*", rows_of(needs)[0].hint)


def test_gpus_do_not_matter_to_ranks_on_the_cpu_nor_those_that_are_not_used():
    """With --device cpu, and with --include host:0."""
    broken = finding("a", gpus={"gpus": [], "problem": "mismatch"})
    sick = finding("a", look__gpus=2, gpus__gpus=[GPU, SICK])
    assert refused(facts(broken)) and refused(facts(sick))
    assert not rows_of(facts(broken, work=ON_CPU))
    assert not rows_of(facts(sick, work=ON_CPU))
    assert not rows_of(facts(replace(sick, host=Host("a", slots=1, devices=(0,)))))
    assert gpus.temperature(finding("a", gpus__gpus=[{**GPU, "temperature": 83}])) == "to 90 °C"


def test_slots_in_the_host_file_allow_uneven_hosts():
    """With slots=4 a host with 4 GPUs beside one with 8 is what was asked for; 9 of 8 is not."""
    four = finding("b", look__gpus=4)
    for host, says in (
        (Host("b", slots=4), ""),
        (Host("b", slots=9), "slots ask for 9 GPUs"),
        (Host("b", slots=1, devices=(5,)), "slots ask for 6 GPUs"),
        (Host("b", devices=(0, 7)), "--include names GPU 7, and there are 4"),
    ):
        rows = rows_of(facts(finding("a"), replace(four, host=host)))
        assert [row.problem for row in rows] == ([says] if says else [])
    none = finding("b", look__gpus=0, gpus={})
    assert not rows_of(facts(replace(none, host=Host("b", slots=2, devices=(0, 1)))))


def test_more_ranks_of_a_task_than_memory_holds_are_refused():
    """The line says how much they need and what is there; a command may be a small one."""
    small = finding("a", look__memory=4_100_000_000)
    many = facts(replace(small, host=Host("a", slots=8, devices=None)), work=ON_CPU)
    assert not rows_of(many)
    many = facts(replace(small, host=Host("a", slots=200)), work=ON_CPU)
    (row,) = rows_of(many)
    needed = "200 ranks need 100.0 GB, at least 500.0 MB each"
    assert (row.check, row.problem) == ("memory", f"{needed}, and there are 4.1 GB")
    own = facts(*many.hosts, work=COMMAND)
    assert "memory" not in {row.check for row in rows_of(own)}


def test_on_this_machine_alone_a_command_may_share_gpus_and_no_one_else_matters():
    """A task's ranks need a GPU each; locks, drains and clocks are for launches on hosts."""
    eight = replace(finding("a"), host=Host("a", slots=9))
    (row,) = rows_of(facts(eight, is_here=True))
    assert (row.check, row.problem) == ("gpus", "slots ask for 9 GPUs")
    assert "--device cpu" in row.hint
    assert not rows_of(facts(eight, is_here=True, work=COMMAND))
    assert not rows_of(facts(eight, is_here=True, work=ON_CPU))
    others = finding("a", look__holder="jo", look__drained="fan", clock_ahead=99.0)
    assert not rows_of(facts(others, is_here=True))
    bare = finding("a", look__interpreter={**LACKS, "torch": ""})
    (row,) = rows_of(facts(bare, is_here=True, needs=replace(NEEDS, modules=(), splits=())))
    assert (row.check, "--python" in row.hint) == ("torch", True)


def test_a_clock_that_is_not_known_exactly_is_not_blamed():
    """An offset within the uncertainty of a slow link is no finding."""
    slow = replace(finding("b", 30.0), clock_error=25.0)
    assert not rows_of(facts(finding("a"), slow))


@pytest.mark.security("NET-1")
def test_a_public_address_for_the_master_needs_a_word():
    """NET-1: no rendezvous at a public address, also by a name that stands for one."""
    error = refused(facts(finding("a"), master="8.8.8.8"))
    assert isinstance(error, PreflightRefused)
    assert "public address 8.8.8.8" in str(error)
    assert refused(facts(finding("a"), master="8.8.8.8"), "public") is None
    route = {"address": "10.0.0.2", "interface": "eth0", "master": "8.8.8.8"}
    hosts = (finding("a"), finding("b", route=route), finding("c", route=route))
    (line,) = str(refused(facts(*hosts, master="gpu1"))).splitlines()
    assert line.startswith("b: public: ranks would meet at the public address 8.8.8.8;")


def test_only_busy_hosts_are_waited_for():
    """Not those where something else is wrong, too."""
    busy = finding("a", look__holder="jo")
    assert are_only_busy(rows_of(facts(busy)))
    assert not are_only_busy(rows_of(facts(finding("a", look__holder="jo", look__disk_free=0))))
    assert "--wait" in str(refused(facts(busy)))


def test_the_worst_reason_gives_the_exit_code():
    """A refused key weighs more than an unreachable host, and that more than a check."""
    data, bad = finding("b", shards={"error": "404"}), finding("b", look__disk_free=0)
    down = HostFacts(Host("c"), HostUnreachable("c: no answer"))
    shut = HostFacts(Host("d"), AccessRefused("d: no key"))
    for hosts, code in [((data,), 65), ((bad, data), 78), ((bad, down), 69), ((down, shut), 77)]:
        error = refused(facts(*hosts))
        assert error is not None
        assert error.exit_code == code


def test_a_check_that_is_allowed_only_warns():
    """--ignore-check torch lets a run start on hosts that differ, and still says that they do."""
    other = finding("b", look__interpreter={**INTERPRETER, "torch": "2.15.0"})
    cluster = facts(finding("a"), other)
    levels = {row.check: row.level for row in examine(cluster, CHECKS, ("torch",))}
    assert (levels["torch"], refused(cluster, "torch")) == ("warning", None)


def test_advice_takes_up_that_sync_was_typed():
    """No hint says to type --sync when it has been typed."""
    unfit = finding(
        "b",
        look__problems={"workdir": "there is no folder /w"},
        code={"missing": ["x.py"], "different": [], "count": 1},
        look__interpreter={**INTERPRETER, "torch": ""},
    )
    advised = [row.hint for row in rows_of(facts(finding("a"), unfit))]
    after = [row.hint for row in rows_of(facts(finding("a"), unfit, synced=True))]
    assert len([hint for hint in advised if "--sync" in hint]) == len(after) == 3
    assert not [hint for hint in after if "with --sync" in hint or "let --sync" in hint]


def test_what_the_launch_will_mend_is_no_fault():
    """But --sync leaves an interpreter of python= as it is."""
    bad = finding("a", look__interpreter={"error": "x"}, code__count=1, code__missing=["x"])
    own = replace(bad, host=Host("a", python="/p"))
    pending = {"code": "copied", "python": "made"}
    for host, levels in ((bad, {"ok"}), (own, {"ok", "refused"})):
        rows = examine(facts(host, pending=pending), CHECKS)
        assert {row.level for row in rows if row.check in pending} == levels


# -- what is shown


def test_the_table_folds_hosts_that_are_alike_and_marks_those_that_differ():
    """64 equal hosts are one line; the odd one stands out with its reason."""
    rows = [TableRow("torch", f"gpu{number:02}", "ok", "2.13.0") for number in range(63)]
    rows.append(TableRow("torch", "gpu63", "refused", "2.15.0", "differs", "install the same"))
    rows += [TableRow("disk", f"gpu{number:02}", "ok", "9 GiB") for number in range(64)]
    lines = [" ".join(line.split()) for line in shown(rows).splitlines()]
    assert lines == [
        "check hosts found problem",
        "torch gpu[00-62] 2.13.0",
        "X gpu63 2.15.0 differs",
        "disk all hosts 9 GiB",
        "",
        "torch: install the same",
        "",
        "not ready: 1 of 64 hosts (gpu63)",
    ]


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table_wraps_at_words(columns, monkeypatch):
    """On a terminal of 80 columns no word is broken, and no host is cut."""
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    problem = "127.0.9.1 port 29500 refuses connections; is sshd running there, and reachable?"
    rows = [TableRow("reachable", f"gpu{n:02}", "refused", "", problem) for n in range(1, 9)]
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown(rows))
    assert max(map(len, text.splitlines())) <= columns
    assert set(problem.split()) <= set(text.split())
    assert "gpu[01-08]" in text


def test_hosts_with_one_trouble_are_one_line_and_one_hint():
    """Refusals and unknown keys: hosts together, what is the same for all of them once."""
    hosts = [finding(f"gpu{number}", look__disk_free=0) for number in range(1, 9)]
    assert str(refused(facts(*hosts))) == "gpu[1-8]: disk: almost full; make room"
    keys = [
        AccessRefused(f"gpu{n}: the key is not known\n    shown {n}\n    or add --accept-new")
        for n in (1, 2)
    ]
    with pytest.raises(AccessRefused) as raised:
        all_or_raise(keys)
    assert str(raised.value).splitlines() == [
        "gpu1: the key is not known",
        "    shown 1",
        "gpu2: the key is not known",
        "    shown 2",
        "    or add --accept-new",
    ]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["gpu01", "gpu02", "gpu03", "gpu10", "login"], "gpu[01-03,10], login"),
        (["gpu9", "gpu10", "gpu11"], "gpu[9-11]"),
        (["rack1-gpu2", "rack1-gpu3", "rack2-gpu2"], "rack1-gpu[2-3], rack2-gpu2"),
        (["10.0.0.1", "10.0.0.2", "2001:db8::7"], "10.0.0.1, 10.0.0.2, 2001:db8::7"),
        (["a1.lab", "a2.lab"], "a[1-2].lab"),
    ],
)
def test_names_of_hosts_in_short(names, short):
    """As hosts.txt takes them, so the short form can be typed."""
    assert grouped(names) == short
    if "[" in short and ":" not in short:
        text = "\n".join(short.replace(", ", "\n").split("\n"))
        assert sorted(host.name for host in parse_hosts(text, "hosts.txt")) == sorted(names)
