"""Hosts that hold up the others: real ranks find out, the launcher says so, the run goes on."""

import sys

import pytest

from rackrun.launcher.run.plan import Plan
from rackrun.launcher.run.state import RunState
from tests.lab.hosts import ROOT
from tests.launcher.conftest import plan_of, training


@pytest.mark.long
def test_the_deep_check_names_a_slow_link(net):
    """Three hosts, of which one sends 1 Mbit/s: a run of its own after the table says so."""
    lab = net(3)
    lab.slow_down(2, 1000)
    hosts = str(lab.write_hosts(f"python={sys.executable} workdir={ROOT}"))
    code, out, err = lab.result_of("--check", "--deep", "--ignore-check", "code", hosts)
    assert code == 0, out + err
    assert out.index("ready: 3 hosts") < out.index("compute"), out
    (slow,) = (line.partition("| ")[2] for line in out.splitlines() if "slow" in line)
    assert slow.startswith("slow links: node2, 0.00"), out
    assert set(lab.result()["hosts"].values()) == {"clean"}


@pytest.mark.parametrize(
    "fields", [{}, {"slow_rank": "1", "slow": "x"}, {"slow_why": "\x1b[2J", "slow": "x"}]
)
def test_malformed_reports_name_no_rank(fields):
    """A rank may report anything: only well-formed reports of stragglers are accepted."""
    plan: Plan = plan_of(2)
    run = RunState(plan, 0.0)
    run.take(training(0, 0, slow_rank=1, slow_why="data", slow="late"), 1.0)
    assert run.slow is not None and run.host_of(run.slow.rank) is run.hosts[1]
    run.take(training(0, 0, **{"slow_rank": 1, "slow_why": "data", "slow": "", **fields}), 1.0)
    assert run.slow is None
