"""What is looked at before a run: real hosts as they are, and each judgement on its own."""

import contextlib
import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from rackrun.launcher.errors import AccessRefused, HostUnreachable, PreflightRefused
from rackrun.launcher.output.screen import wants_lines
from rackrun.launcher.preflight import facts
from rackrun.launcher.preflight.check_table import shown
from rackrun.launcher.preflight.checks import CHECKS, TableRow, examine, refusal
from rackrun.launcher.preflight.facts import ClusterFacts, HostFacts, Requirements
from rackrun.launcher.remote import network
from rackrun.launcher.remote.probe import INTERPRETER_SECONDS
from rackrun.launcher.run.host_names import grouped
from rackrun.launcher.run.hosts import Host, parse_hosts
from rackrun.launcher.transport.parallel import all_or_raise
from rackrun.launcher.transport.ssh import ConnectSettings, Network
from tests.lab.data import write_tiny
from tests.lab.hosts import BUSY, ROOT, Lab, wait_for_banner
from tests.lab.needs import need
from tests.lab.waiting import until

GOOD: dict[str, dict[str, Any]] = {
    "clock": {"offset": 0.001, "uncertainty": 0.01},
    "look": {
        "hostname": "a",
        "user": "jo",
        "machine": "1",
        "address": "10.0.0.1",
        "workdir": "/w",
        "workdir_problem": "",
        "tmp_problem": "",
        "lock_problem": "",
        "drained": "",
        "python": "/w/.venv/bin/python",
        "interpreter": {"version": "3.11.7", "torch": "2.13.0", "cuda": "13.0"},
        "cores": 8,
        "gpus": 8,
        "disk_free": 1 << 40,
        "open_files": 1 << 16,
    },
    "gpus": {"gpus": [{"name": "H200", "total": 143000, "used": 4}] * 8},
    "code": {"missing": [], "different": [], "count": 0},
    "route": {"address": "10.0.0.1", "interface": "ib0"},
    "reach": {},
    "shards": {"dataset": "imagenet"},
}


def finding(name: str, **changes: Any) -> HostFacts:
    replies = {question: dict(reply) for question, reply in GOOD.items()}
    replies["look"]["machine"] = name
    for path, value in changes.items():
        question, _, key = path.partition("__")
        replies.setdefault(question, {})
        replies[question] = {**replies[question], key: value} if key else value
    return HostFacts(Host(name), replies=replies)


def judged(*findings: HostFacts, allowed: tuple[str, ...] = ()) -> dict[str, tuple[str, str]]:
    """Check -> level and problem, of what is not ok on the last host."""
    cluster = ClusterFacts(findings, "10.0.0.1", 29500)
    rows = examine(cluster, CHECKS, allowed)
    last = findings[-1].host.label
    return {
        row.check: (row.level, row.problem)
        for row in rows
        if row.host == last and row.level != "ok"
    }


def test_hosts_that_are_alike_and_well_pass_every_check():
    """Nothing is refused or warned of, and each check has something to show."""
    cluster = ClusterFacts((finding("a"), finding("b")), "10.0.0.1", 29500)
    rows = examine(cluster, CHECKS)
    assert {row.level for row in rows} == {"ok"}
    assert refusal(cluster, rows) is None
    shown = {row.check for row in rows}
    assert shown >= {"reachable", "python", "torch", "gpus", "code", "clock", "network", "shards"}


INTERPRETER = {"version": "3.11.7", "torch": "2.13.0", "cuda": "13.0"}


@pytest.mark.parametrize(
    ("changes", "check", "level", "says"),
    [
        ({"look__interpreter": {"error": "/x: not found"}}, "python", "refused", "/x: not found"),
        (
            {"look__interpreter": {**INTERPRETER, "version": "3.12.1"}},
            "python",
            "refused",
            "differs from a: 3.11",
        ),
        ({"look__interpreter": {**INTERPRETER, "torch": ""}}, "torch", "refused", "has no torch"),
        (
            {"look__interpreter": {**INTERPRETER, "torch": "2.15.0"}},
            "torch",
            "refused",
            "differs from a: 2.13.0",
        ),
        ({"look__interpreter": {**INTERPRETER, "cuda": "12.6"}}, "cuda", "refused", "13.0"),
        ({"look__gpus": 4}, "gpus", "refused", "a has 8; write slots=N"),
        (
            {"gpus__gpus": [{"name": "H200", "total": 143000, "used": 9000}]},
            "gpu use",
            "warning",
            "GPU 0: 9000 MiB",
        ),
        (
            {"code": {"missing": ["a.py"], "different": ["b.py"], "count": 2}},
            "code",
            "refused",
            "a.py is missing, b.py",
        ),
        ({"look__workdir_problem": "there is no folder /w"}, "workdir", "refused", "no folder"),
        ({"look__disk_free": 1000}, "disk", "refused", "almost full"),
        ({"look__open_files": 64}, "open files", "refused", "too few"),
        ({"clock": {"offset": 60.0, "uncertainty": 0.1}}, "clock", "warning", "+60 s off"),
        ({"route": {"error": "Network is unreachable"}}, "network", "refused", "no route"),
        ({"address": {"error": "there is no device ib7"}}, "network", "refused", "ib7"),
        (
            {"reach": {"error": "Connection refused"}},
            "master",
            "refused",
            "10.0.0.1 port 29500 cannot be reached: Connection refused",
        ),
        ({"shards": {"error": "404"}}, "shards", "refused", "404"),
        ({"look__machine": "a"}, "machine", "refused", "is the same machine as a"),
    ],
)
def test_what_is_wrong_with_a_host_is_named(changes, check, level, says):
    """Each check refuses or warns of what it is there for, and of nothing else."""
    result = judged(finding("a"), finding("b", **changes))
    assert list(result) == [check]
    assert result[check][0] == level
    assert says in result[check][1]


def test_slots_in_the_host_file_allow_uneven_hosts():
    """With slots=4 a host with 4 GPUs beside one with 8 is what was asked for; 9 of 8 is not."""
    uneven = finding("b", look__gpus=4)
    assert not judged(finding("a"), replace(uneven, host=Host("b", slots=4)))
    assert judged(finding("a"), replace(uneven, host=Host("b", slots=9)))["gpus"][0] == "refused"
    picked = Host("b", slots=1, devices=(5,))
    assert "6 GPUs" in judged(finding("a"), replace(uneven, host=picked))["gpus"][1]


def test_a_clock_that_is_not_known_exactly_is_not_blamed():
    """An offset within the uncertainty of a slow link is no finding."""
    assert not judged(finding("a"), finding("b", clock={"offset": 30.0, "uncertainty": 25.0}))


def test_a_first_host_whose_name_is_loopback_to_itself(pair):
    """Debian's 127.0.1.1: the device of its rank is that towards the other hosts, not lo."""
    lab = pair
    with (lab.etc[2] / "hosts").open("a") as file:
        file.write("10.77.0.11 node1\n")
    common = f"python={lab.cheap_python()} workdir={lab.folder}"
    hosts = str(lab.write_hosts(f"address=node1 {common}", common))
    code, out, err = lab.result_of("--dry-run", "--json", hosts, "--", "true")
    assert code == 0, err
    for host in json.loads(out)["hosts"]:
        assert dict(host["defaults"])["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_name_with_ipv6_alone_is_reached_so(monkeypatch):
    """A name has the family of its addresses; IPv4 where it has both."""
    known = {"six": [socket.AF_INET6], "both": [socket.AF_INET6, socket.AF_INET]}
    monkeypatch.setattr(socket, "getaddrinfo", lambda name, port: [(f,) for f in known[name]])
    families = [network.family_of(name) for name in ("six", "both", "fd79::1")]
    assert families == [socket.AF_INET6, socket.AF_INET, socket.AF_INET6]


@pytest.mark.security("NET-1")
def test_a_public_address_for_the_master_needs_a_word():
    """NET-1: no rendezvous at a public address, unless with --ignore-check public."""
    cluster = ClusterFacts((finding("a"),), "8.8.8.8", 29500)
    error = refusal(cluster, examine(cluster, CHECKS))
    assert isinstance(error, PreflightRefused)
    assert "public address 8.8.8.8" in str(error)
    assert refusal(cluster, examine(cluster, CHECKS, {"public"})) is None


def test_a_name_that_stands_for_a_public_address_is_one():
    """NET-1: the host's own resolution of address= counts; reported once, for the first host."""
    options = {"address": "10.0.0.2", "interface": "eth0", "master": "8.8.8.8"}
    cluster = ClusterFacts(
        (finding("a"), finding("b", route=options), finding("c", route=options)), "gpu1", 1
    )
    error = refusal(cluster, examine(cluster, CHECKS))
    assert str(error).startswith("b: public: ranks would meet at the public address 8.8.8.8;")
    assert len(str(error).splitlines()) == 1


def test_a_check_that_is_allowed_only_warns():
    """--ignore-check torch lets a run start on hosts that differ, and still says that they do."""
    other = finding("b", look__interpreter={**INTERPRETER, "torch": "2.15.0"})
    assert judged(finding("a"), other, allowed=("torch",))["torch"][0] == "warning"


def test_the_worst_reason_gives_the_exit_code():
    """A refused key weighs more than an unreachable host, and that more than a check."""
    bad = finding("b", look__disk_free=0)
    down = HostFacts(Host("c"), HostUnreachable("c: no answer"))
    shut = HostFacts(Host("d"), AccessRefused("d: no key"))
    for findings, code in [((bad,), 78), ((bad, down), 69), ((bad, down, shut), 77)]:
        cluster = ClusterFacts(findings, "10.0.0.1", 29500)
        error = refusal(cluster, examine(cluster, CHECKS))
        assert error is not None
        assert error.exit_code == code
        assert len(str(error).splitlines()) == len(findings)


def test_the_table_folds_hosts_that_are_alike_and_marks_those_that_differ():
    """64 equal hosts are one line; the odd one stands out with its reason."""
    rows = [TableRow("torch", f"gpu{number:02}", "ok", "2.13.0") for number in range(63)]
    rows.append(TableRow("torch", "gpu63", "refused", "2.15.0", "differs", "install the same"))
    rows += [TableRow("cuda", f"gpu{number:02}", "ok", "13.0") for number in range(64)]
    lines = [" ".join(line.split()) for line in shown(rows).splitlines()]
    assert lines == [
        "check hosts found problem",
        "torch gpu[00-62] 2.13.0",
        "X gpu63 2.15.0 differs",
        "cuda all hosts 13.0",
        "",
        "torch: install the same",
        "",
        "not ready: 1 of 64 hosts (gpu63)",
    ]


def test_eight_hosts_with_one_trouble_are_one_line_and_one_hint():
    """Refusals and unknown keys: hosts together, what is the same for all of them once."""
    findings = tuple(finding(f"gpu{number}", look__disk_free=0) for number in range(1, 9))
    cluster = ClusterFacts(findings, "10.0.0.1", 29500)
    rows = [row for row in examine(cluster, CHECKS) if row.check == "disk"]
    assert str(refusal(cluster, rows)) == "gpu[1-8]: disk: almost full; make room"
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


@pytest.mark.parametrize(
    ("environment", "lines"),
    [
        ({"TERM": "xterm"}, False),
        ({"TERM": "xterm", "CI": "false", "RACKRUN_PLAIN": "0"}, False),
        ({"TERM": "xterm", "CI": "true"}, True),
        ({"TERM": "xterm", "RACKRUN_PLAIN": "1"}, True),
        ({"TERM": "dumb"}, True),
        ({}, True),
    ],
)
def test_variables_ask_for_plain_lines(environment, lines):
    """A terminal of a CI job draws no dashboard, nor does one that a screen reader reads."""
    assert wants_lines(environment) == lines


# -- real hosts ---------------------------------------------------------------------------------


@pytest.fixture
def shard_server(tmp_path) -> Iterator[str]:
    """Yield a server of a data set that sends no ranges, which the ranks need."""
    folder = tmp_path / "served"
    write_tiny(folder, shards=1)

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    serve = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def rows_of(text: str) -> dict[tuple[str, str], dict[str, str]]:
    return {(row["check"], row["host"]): row for row in json.loads(text)}


def test_four_good_hosts_pass_and_nothing_is_started(start_lab):
    """--check shows a table, exits 0, and leaves neither run folder nor process."""
    lab = start_lab(4)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, out, err = lab.result_of("--check", str(hosts), "--", "true")
    assert (code, err) == (0, "")
    assert "reachable   all hosts  yes" in out
    assert "master      all hosts  reached" in out
    assert not (lab.folder / "runs").exists()


def test_every_difference_between_real_hosts_is_in_the_json(start_lab, shard_server):
    """Another torch, no interpreter, other code, no workdir, a host that is down: each is named."""
    lab = start_lab(6)
    good, torch = lab.cheap_python("2.0"), lab.cheap_python("2.1", "python-2.1")
    for name in ("same", "edited"):
        folder = lab.folder / name
        folder.mkdir()
        (folder / "train.py").write_text(f"print({name!r})\n")
        subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
        subprocess.run(["git", "-C", folder, "add", "train.py"], check=True)
    lab.hosts[5].stop()
    hosts = lab.write_hosts(
        f"python={good}",
        f"python={torch}",
        "python=/no/such/python",
        f"python={good} workdir={lab.folder}/edited",
        f"python={good} workdir={lab.folder}/none",
        f"python={good}",
    )
    args = ("--check", "--json", str(hosts), "catdog", "--data", shard_server)
    code, out, err = lab.result_of(*args, cwd=lab.folder / "same")
    assert (code, err) == (69, "")
    rows = rows_of(out)
    host = [f"127.0.0.{number}" for number in range(2, 8)]
    assert rows["torch", host[0]]["level"] == "ok"
    assert rows["torch", host[1]]["problem"] == f"differs from {host[0]}: 2.0"
    assert "/no/such/python" in rows["python", host[2]]["problem"]
    assert rows["code", host[3]]["problem"] == "train.py"
    assert rows["code", host[0]]["found"] == "as here"
    assert rows["workdir", host[4]]["problem"] == f"there is no folder {lab.folder}/none"
    assert "refuses connections" in rows["reachable", host[5]]["problem"]
    for number in (0, 1, 3):  # the others have no interpreter, or no folder to start it in
        assert "the server sends no ranges" in rows["shards", host[number]]["problem"]


def test_a_launch_looks_first_and_starts_nothing_on_unfit_hosts(start_lab):
    """The quick part runs before every launch: exit 78, every unfit host named, nothing made."""
    lab = start_lab(3)
    good, torch = lab.cheap_python("2.0"), lab.cheap_python("2.1", "python-2.1")
    hosts = lab.write_hosts(f"python={good}", f"python={torch}", f"python={torch}")
    code, out, err = lab.result_of(str(hosts), "--", "touch", str(lab.folder / "started"))
    assert (code, out) == (78, "")
    assert "127.0.0.3, 127.0.0.4: torch: differs from 127.0.0.2: 2.0; install" in err
    assert not (lab.folder / "runs").exists()
    assert not (lab.folder / "started").exists()
    code, out, err = lab.result_of("--ignore-check", "torch", str(hosts), "--", "true")
    assert code == 0, err
    assert err.count("warning: 127.0.0.3, 127.0.0.4: ") == 1


def test_few_open_files_are_found_out(start_lab):
    """A host where only 64 files may be open is refused, with the limit named."""
    lab = start_lab(1)
    few = lab.start(command=("prlimit", "--nofile=64"))
    wait_for_banner(few.address, few.port)
    lab.trust()
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, _, err = lab.result_of(str(hosts), "--", "true")
    assert code == 78
    assert "127.0.0.3: open files: too few; at least 1024" in err


@pytest.mark.parametrize("ahead", [60, -20])
def test_a_clock_that_is_off_is_reported_and_harms_no_run(start_lab, ahead):
    """Probe and agent of one host live in another minute: a warning, both ranks, and 0."""
    lab = start_lab(2)
    remote = lab.hosts[1].folder
    shifted = f"import time; true = time.time; time.time = lambda: true() + {ahead}"
    (remote / "python3").write_text(
        f'#!/bin/sh\nexec {sys.executable} -I -S -X utf8 -c "{shifted}\n$6"\n'
    )
    (remote / "python3").chmod(0o755)
    (remote / ".bashrc").write_text(f"PATH={remote}:$PATH\n")
    hosts = lab.write_hosts(f"python={lab.cheap_python()}")
    code, out, err = lab.result_of(str(hosts), "--", "sh", "-c", "echo rank $RANK of $WORLD_SIZE")
    assert code == 0, err
    assert f"warning: 127.0.0.3: clock: the clock is {ahead:+d} s off this machine's" in err
    assert "rank 0 of 2" in out and "rank 1 of 2" in out


@pytest.mark.long
def test_ctrl_c_during_the_look_leaves_nothing(start_lab):
    """A host's interpreter does not answer: 130 at once; it is ended when its 20 s are over."""
    lab = start_lab(2)
    slow = lab.folder / "slow"
    slow.write_text("#!/bin/sh\nwhile :; do sleep 0.1; done\n")
    slow.chmod(0o755)
    hosts = lab.write_hosts(f"python={lab.cheap_python()}", f"python={slow}")
    process = lab.run_ssh(str(hosts), "--", "true")
    until(lambda: bool(started_as(slow)), "the interpreter is looked at", 20)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert not (lab.folder / "runs").exists()
    until(lambda: not started_as(slow), "nothing is left", INTERPRETER_SECONDS * BUSY)


def started_as(program: Path) -> list[str]:
    """Return the processes of a script."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            args = (entry / "cmdline").read_bytes().split(b"\0")
            result += [entry.name] * (str(program).encode() in args[:2])
    return result


def test_a_login_shell_that_waits_is_named(start_lab, monkeypatch):
    """A .bashrc that never ends is not a probe that does not answer."""
    lab = start_lab(1)
    (lab.hosts[0].folder / ".bashrc").write_text("sleep 600\n")
    hosts = lab.write_hosts()
    monkeypatch.setattr(facts, "LOOK_SECONDS", 1.0)
    network = Network(ConnectSettings(config=lab.config))
    try:
        named = parse_hosts(hosts.read_text())
        result = facts.gather_facts(named, network.connect(named), facts.Requirements(workdir="/"))
        result.close()
    finally:
        network.close()
    assert "its login shell has started no program in time" in str(result.hosts[0].error)


IN_A_TMP = ("unshare", "-m", "sh", "-c")
FULL = 'mount -t tmpfs -o size=9m tmp /tmp && head -c 8m /dev/zero > /tmp/full && exec "$@"'
READ_ONLY = 'mount -t tmpfs -o ro tmp /tmp && exec "$@"'


@pytest.mark.parametrize(
    ("script", "says"), [(FULL, "/tmp is full"), (READ_ONLY, "/tmp cannot be written")]
)
def test_a_tmp_that_cannot_hold_an_agent_is_found_by_the_check(tmp_path, script, says):
    """Neither a check nor a launch takes such a host, and no --wait is advised."""
    need("root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # seen beside the other /tmp
        lab = Lab(Path(folder)).ready(1, (*IN_A_TMP, script, "sh"))
        try:
            hosts = str(lab.write_hosts("workdir=/"))
            for verb in ((), ("--check",)):
                code, out, err = lab.result_of(
                    "--ignore-check", "torch", *verb, hosts, "--", "true"
                )
                assert code == 78, out + err
                text = re.sub(r"\s+", " ", out + err)
                assert says in text
                assert "make room there, or let every account write to it" in text
                assert "--wait" not in text
        finally:
            lab.stop()


def test_advice_takes_up_that_sync_was_typed():
    """No hint says to type --sync when it has been typed."""
    unfit = finding("b", look__workdir_problem="there is no folder /w", code__count=3)
    unfit.replies["code"]["missing"] = ["x.py"]
    unfit.replies["look"]["interpreter"] = {**INTERPRETER, "torch": ""}
    without, synced = (
        ClusterFacts((finding("a"), unfit), "10.0.0.1", 29500, Requirements("", synced=synced))
        for synced in (False, True)
    )
    advised = [row.hint for row in examine(without, CHECKS) if row.level != "ok"]
    assert len([hint for hint in advised if "--sync" in hint]) == 3
    after = [row.hint for row in examine(synced, CHECKS) if row.level != "ok"]
    assert len(after) == len(advised)
    assert not [hint for hint in after if "with --sync" in hint or "let --sync" in hint]


@pytest.mark.parametrize("remote", [0, 1])
def test_gpus_that_include_names_must_exist(remote):
    """Also on a host without any; slots= in the hosts file counts processes, not GPUs."""
    host = Host("a", devices=(0, 1))
    result = replace(finding("a", look__gpus=remote), host=host)
    says = f"--include names GPU 1, and there are {remote}"
    assert judged(result)["gpus"] == ("refused", says)
    assert "gpus" not in judged(replace(finding("a", look__gpus=0), host=replace(host, slots=2)))


def with_torch_alone(folder: Path, is_rackrun_there: bool = True) -> Path:
    """Write an interpreter that finds torch, rackrun if that is there with click, and no more."""
    site, python = folder / "site", folder / "torch-alone"
    site.mkdir()
    if is_rackrun_there:
        (site / "rackrun").symlink_to(ROOT / "rackrun")
    for package in ("torch", *(["click"] if is_rackrun_there else [])):
        spec = importlib.util.find_spec(package)
        assert spec and spec.origin
        (site / package).symlink_to(Path(spec.origin).parent)
    python.write_text(f'#!/bin/sh\nPYTHONPATH={site} exec {sys.executable} -S "$@"\n')
    python.chmod(0o755)
    return python


def test_a_deep_check_needs_rackrun_where_the_ranks_run(start_lab, tmp_path):
    """In a project of one's own with python=: 78 and what to type, not a traceback of Python."""
    lab, work = start_lab(1), tmp_path / "work"
    work.mkdir()
    hosts = lab.write_hosts(f"python={with_torch_alone(tmp_path, False)} workdir={work}")
    code, out, err = lab.result_of("--check", "--deep", str(hosts), cwd=work)
    assert code == 78, out + err
    assert "torch-alone has no rackrun; install rackrun there" in err, out + err
    assert not (work / "runs").exists()


@pytest.mark.parametrize("verb", [(), ("--check",), ("--dry-run",), ("--detach",)])
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        ("--model timm:resnet18", 78, "torch-alone has no timm"),
        ("--track mlflow,wandb", 78, "torch-alone has no mlflow, wandb"),
        ("--model nomod:Net", 78, "no module nomod in {work} or installed"),
        ("--optimizer nolion.of:Lion", 78, "no module nolion in {work} or installed"),
        ("--weights own/net.pt", 78, "{work}/own/net.pt: No such file or directory"),
        ("--cache shards/dataset.json/c", 78, "{work}/shards/dataset.json is not a folder"),
        ("--eval-split test", 65, "tiny: no samples in the split 'test'; there are in: train, val"),
        (
            "--resampled --batch-size 4 --resume runs/20260101-120000-catdog",
            64,
            "8 images per step here, 24 in the checkpoint; with as many ranks as here type"
            " --batch-size 12",
        ),
    ],
)
def test_what_ranks_would_refuse_is_refused_before_they_start(
    start_lab, tmp_path, verb, options, code, says
):
    """What hosts lack, and a number of ranks: by their facts, for every way to start a run."""
    lab, work, local = start_lab(2), tmp_path / "work", tmp_path / "here"
    write_tiny(work / "shards", shards=1, splits=("train", "val"))
    earlier = local / "runs" / "20260101-120000-catdog"
    earlier.mkdir(parents=True)
    (earlier / "config.json").write_text(json.dumps({"resolved": {"batch": 24}}))
    hosts = lab.write_hosts(f"python={with_torch_alone(tmp_path)} workdir={work}")
    args = (str(hosts), "catdog", "--device", "cpu", "--data", "shards", *options.split())
    ended, out, err = lab.result_of(*verb, *args, cwd=local)
    assert ended == code, out + err
    # A table breaks long paths.
    assert re.sub(r"\s+", "", says.format(work=work)) in re.sub(r"\s+", "", out + err)
    assert not (work / "runs").exists()
    assert [path.name for path in (local / "runs").iterdir()] == [earlier.name]
