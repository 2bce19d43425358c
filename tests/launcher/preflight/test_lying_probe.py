"""Answers of a compromised host to a launch, and what reaches the terminal."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.hosts import Lab, wait_for_banner
from tests.lab.oracles import text_only
from tests.launcher.preflight.lying_probe import FIRST

ESC = "\x1b]0;PWNED\x07\x1b[31m"
LYING = Path(__file__).with_name("lying_probe.py")
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


@pytest.mark.parametrize(
    "lies", [LIES[::2], pytest.param(LIES, marks=pytest.mark.long)], ids=["half", "all"]
)
@pytest.mark.security("HOST-1")
def test_each_wrong_answer_of_a_probe_is_a_line_with_the_name_of_its_host(start_lab, lies):
    """Types, ranges, paths, addresses, JSON: 69, a line each, no traceback, and no GPU believed."""
    lab = start_lab(0)
    hosts = host_of_lies(lab, [HONEST, *(lie for lie, _ in lies)])
    code, out, err = lab.result_of("--check", "--json", str(hosts), "--", "true")
    assert (code, err) == (69, "")
    wrong = {row["host"]: row["problem"] for row in json.loads(out) if row["level"] == "refused"}
    assert list(wrong) == [f"{FIRST}{number}" for number in range(1, len(lies) + 1)]
    for (lie, says), problem in zip(lies, wrong.values(), strict=True):
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
