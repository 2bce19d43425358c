"""Hosts that hold up the others: real ranks find out, the launcher says so, the run goes on."""

import sys

import pytest

from tests.lab.hosts import ROOT


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


LATE = """
import os, time
import rackrun.reports
from rackrun import report
rackrun.reports.SECONDS_BETWEEN_REPORTS = 0
late = os.environ["RANK"] == "1"
for step in range(1, 201):
    report(step=step, data_seconds=0.03 if late else 0.002, compute_seconds=0.07)
    time.sleep(0.005)
"""


def test_a_script_that_reports_its_own_seconds_has_its_straggler_named(start_lab):
    """Rank 1 reads slowly: one line names it, its host and why, while the script runs."""
    lab = start_lab(2)
    words = ("--env", f"PYTHONPATH={ROOT}", lab.cheap_hosts(), "--", sys.executable, "-c", LATE)
    code, _, err = lab.result_of(*words)
    assert code == 0, err
    (line,) = (line for line in err.splitlines() if "is slow" in line)
    assert line == (
        "rackrun: 127.0.0.3 is slow: last 50 steps: the others wait for rank 1 on 127.0.0.3"
        " 28.0 of 100.0 ms a step: its data takes 30.0 ms, theirs 2.0 ms"
    )
