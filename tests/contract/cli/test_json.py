"""`--json`: one value on standard output, with the keys of docs/reference/api.md."""

import json
import re
from pathlib import Path

PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "api.md").read_text()


def promised(command):
    """Return the keys that the page has for a command."""
    row = re.search(rf"^\| `{command}`.*?\| (.*) \|$", PAGE, re.MULTILINE)[1]
    return set(re.findall(r"`(\w+)`", row)) - {"ok", "warning", "refused"}


def keys_of(value):
    """Return the keys of objects, also of those in others."""
    if isinstance(value, list):
        return set().union(*map(keys_of, value))
    if isinstance(value, dict):
        return {*value} | keys_of([*value.values()])
    return set()


def test_a_check_says_what_was_found_on_each_host_and_whether_that_will_do(lab, cli):
    hosts = lab.ready(1).write_hosts()
    with hosts.open("a") as file:
        file.write("127.0.0.9:1\n")
    result = cli(f"rackrun check --json --ssh-config {lab.config} {hosts}")
    assert result.code == 69, result
    rows = json.loads(result.out)
    assert {*map(frozenset, rows)} == {frozenset(promised("check --json"))}
    found = {(row["host"], row["check"]): row for row in rows}
    assert found["127.0.0.9", "reachable"]["level"] == "refused"
    reached = found[lab.hosts[0].host.label, "python"]
    assert reached["level"] in ("ok", "refused") and reached["found"]


def test_runs_and_their_hosts_are_listed(cli):
    assert cli("rackrun local --name short -- true").code == 0
    (listed,) = json.loads(cli("rackrun ps --json").out)
    assert listed.keys() == promised("ps --json")
    assert (listed["name"], listed["state"], listed["exit_code"]) == ("short", "done", 0)
    status = json.loads(cli("rackrun status --json short").out)
    assert promised("status --json") == keys_of(status)
    assert (status["run"], status["verdict"]) == (listed["run"], "done")


def test_the_plan_of_a_dry_run_is_that_of_plan_json(cli):
    plan = json.loads(cli("rackrun local --dry-run --json --nproc 2 -- true").out)
    assert plan["world_size"] == 2
    assert {"name", "processes", "node", "first_rank", "command", "folder"} <= plan["hosts"][
        0
    ].keys()
