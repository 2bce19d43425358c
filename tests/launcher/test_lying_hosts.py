"""What compromised hosts say to a launch is not believed, and does not reach the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from rackrun.launcher.remote.agent import frames
from tests.lab.hosts import WAIT, Lab, wait_for_banner
from tests.lab.oracles import text_only
from tests.launcher.lying_host import FIRST

ESC = "\x1b]0;PWNED\x07\x1b[31m"
LYING = Path(__file__).with_name("lying_host.py")
HONEST: dict[str, Any] = {}
INTERPRETER = {"version": "3.11.7", "torch": "2.0", "cuda": ""}
LIES: list[tuple[dict[str, Any], str]] = [  # answers, as the host changes them, and what is said
    *(
        ({"look": {name: value}}, f"(look.{name}")
        for name, values in {
            "gpus": ["x", 10_000_000, -1, 1.5, None],
            "interpreter": [5, {"version": 3}, {"version": "3", "more": 1}],
            "cores": ["8", 0, 10**12],
            "workdir": [5, "", "relative", "/w\0"],
            "python": [[], ""],
            "disk_free": ["x", -1, 10**30],
            "time": ["now", 10**400],
            "address": [7],
            "machine": [{}, "m" * 1000],
            "lock": ["/etc/passwd", "/tmp/rackrun-../../etc/passwd.lock", 5],
            "holder": [5],
            "user": [{}, {"uid": -1, "gid": 0, "name": "x"}, {"uid": 0, "gid": 0, "name": "x\n"}],
            "problems": [None, {"workdir": 5}],
        }.items()
        for value in values
    ),
    ({"look": {"address": "nowhere"}}, "'nowhere' is no address"),
    ({"look": {"more": 1}}, "unknown field `more`"),
    ({"look": [{}]}, "missing required field"),
    ({"look": [5]}, "not an object"),
    ({"look": [{"error": 5}]}, "(look.error: "),
    ({"route": {"address": 5}}, "(route.address: "),
    ({"route": {"interface": "eth0 --x"}}, "(route.interface: "),
    ({"route": {"unreached": []}}, "(route.unreached: "),
    ({"gpus": {"gpus": [{"name": "x"}]}}, "(gpus.gpus[0]: "),
    ({"gpus": {"problem": 5}}, "(gpus.problem: "),
    ({"raw": '3\n{"a'}, "(no JSON"),
    ({"raw": "1\n5"}, "not an object"),
    ({"raw": "9000\n" + "[" * 9000}, "(nested too deeply"),
    ({"raw": "2\n\xff\xfe"}, "(no JSON"),
    ({"raw": "9" * 5000 + "\n"}, "sent an invalid answer"),
    ({"raw": "-5\n"}, "sent an invalid answer"),
]


def host_of_lies(lab: Lab, lies: list[dict[str, Any]]) -> Path:
    """Write hosts.txt with that many hosts, all of them one sshd, each with a false answer."""
    table = lab.folder / "lies.json"
    table.write_text(json.dumps(lies))
    force = f"ForceCommand {sys.executable} -S {LYING} {table}\n"
    host = lab.start("0.0.0.0", extra=f"{force}MaxStartups 500\n")
    wait_for_banner("127.0.0.1", host.port)
    lab.known_hosts.write_text(f"*:{host.port} {host.public_key}\n* {host.public_key}\n")
    hosts = lab.folder / "hosts.txt"
    lines = [f"{FIRST}{number}:{host.port}" for number in range(len(lies))]
    python = lab.cheap_python()
    hosts.write_text("".join(f"{line} python={python}\n" for line in lines))
    return hosts


@pytest.mark.security("HOST-1")
def test_each_wrong_answer_of_a_probe_is_a_line_with_the_name_of_its_host(start_lab):
    """Types, ranges, paths, addresses, JSON: 69, a line each, no traceback, and no GPU believed."""
    lab = start_lab(0)
    hosts = host_of_lies(lab, [HONEST, *(lie for lie, _ in LIES)])
    code, out, err = lab.result_of("--check", "--json", str(hosts), "--", "true")
    assert (code, err) == (69, "")
    wrong = {row["host"]: row["problem"] for row in json.loads(out) if row["level"] == "refused"}
    assert list(wrong) == [f"{FIRST}{number}" for number in range(1, len(LIES) + 1)]
    for (lie, says), problem in zip(LIES, wrong.values(), strict=True):
        assert says in problem, (lie, problem)
        assert "invalid" in problem or "not that of the probe" in problem, (lie, problem)
        assert "\n" not in problem


def test_no_word_of_a_probe_moves_the_cursor(start_lab):
    """SSH-7: errors, folders, names and versions are shown with escapes made visible."""
    lab = start_lab(0)
    args = (
        {"look": {"interpreter": {"error": ESC}}},
        {"look": {"workdir": f"/{ESC}"}},
        {"look": {"problems": {"workdir": ESC}}},
        {"look": {"holder": ESC}},
        {"look": {"interpreter": {**INTERPRETER, "version": ESC, "torch": ESC, "cuda": ESC}}},
        {"look": {"python": f"/{ESC}"}},
        {"gpus": {"gpus": [{"name": ESC, "total": 1, "used": 1}]}},
        {"look": [{"error": ESC}]},
        {"route": {"unreached": ESC}},
    )
    hosts = host_of_lies(lab, [HONEST, *args])
    code, out, err = lab.result_of("--check", str(hosts), "--", "true")
    assert code == 69
    text_only(out + err)
    assert out.count("␛]0;PWNED␇") >= len(args)
    # what only the last plan shows
    hosts = host_of_lies(lab, [{"look": {"python": f"/{ESC}", "interpreter": INTERPRETER}}])
    code, out, err = lab.result_of("--dry-run", str(hosts), "--", "true")
    assert code == 0, err
    assert "␛]0;PWNED␇" in out
    text_only(out + err)


def event(name: str, local: int = frames.NO_RANK, **fields: Any) -> bytes:
    payload = json.dumps({"event": name, **fields}).encode()
    return frames.HEADER.pack(frames.EVENT, local, len(payload)) + payload


ENDED = {"code": 0, "signal": 0, "oom": False, "ordered": False}
USAGE = {"cpu": 2147483648, "memory": 1, "memory_total": 2, "gpus": []}
NONSENSE = "sent data that is not the agent protocol"
SAID = {  # by the agent of the second of two hosts: why that host is lost
    "its last word first": (event("closed", survivors=[]), "its agent ended before its ranks did"),
    "the end of another's rank": (event("opened", port=1) + event("ended", 1, **ENDED), NONSENSE),
    "no object": (frames.HEADER.pack(frames.EVENT, 0, 1) + b"5", NONSENSE),
    "deep": (frames.HEADER.pack(frames.EVENT, 0, 99_999) + b"[" * 99_999, NONSENSE),
    "endless": (event("usage", **USAGE), NONSENSE),
    "a sequence": (
        event("stopping", reason="\x1b]0;PWNED\x07\nrackrun: done") + event("closed"),
        "]0;PWNED",
    ),
}


@pytest.mark.security("HOST-2")
def test_what_a_lying_agent_says_is_the_end_of_its_own_host(start_lab):
    """SSH-7: one line that names it, 75, no traceback; the other host is clean. A host that is
    alone cannot make a run succeed."""
    lab = start_lab(0)
    lies = [lie for said, _ in SAID.values() for lie in (HONEST, {"agent": said.decode("latin-1")})]
    lines = host_of_lies(lab, lies).read_text().splitlines(keepends=True)
    pairs = [lines[at : at + 2] for at in range(0, len(lines), 2)]

    def launched(name: str, hosts: list[str]) -> Any:
        (lab.folder / f"{name}.txt").write_text("".join(hosts))
        options = ("--ignore-check", "machine", "--name", name)
        return lab.run_ssh(*options, str(lab.folder / f"{name}.txt"), *WAIT)

    runs = [launched(f"run{number}", hosts) for number, hosts in enumerate(pairs)]
    for number, (run, (_, why)) in enumerate(zip(runs, SAID.values(), strict=True)):
        out, err = run.communicate(timeout=120)
        assert run.returncode == 75, err
        text_only(out + err)
        last = err.splitlines()[-1]
        assert last.startswith(f"rackrun: failed: {FIRST}{2 * number + 1}: ") and why in last, err
        (result,) = lab.folder.glob(f"runs/2*-run{number}/result.json")
        assert json.loads(result.read_text())["hosts"][f"{FIRST}{2 * number}"] == "clean"
    alone = launched("alone", pairs[0][1:])
    _, err = alone.communicate(timeout=120)
    assert alone.returncode == 75 and "failed" in err.splitlines()[-1], err
