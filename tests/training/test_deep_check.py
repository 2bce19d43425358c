"""What `--check --deep` measures, on ranks of this machine, and which hosts it names."""

import pytest

from rackrun.training.deep_check import Measured, report, rounds
from tests.lab.ranks import output_of_ranks

NAMES = ["a", "b", "c", "d"]
EVEN = {pair: 10.0 for pairs in rounds(4) for pair in pairs}


@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 7, 8])
def test_each_two_hosts_meet_once_and_none_is_in_two_pairs(hosts):
    """In as few rounds as there can be, so that many hosts take little longer than few."""
    every = list(rounds(hosts))
    met = [pair for pairs in every for pair in pairs]
    assert sorted(met) == [
        (first, second) for first in range(hosts) for second in range(first + 1, hosts)
    ]
    for pairs in every:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    assert len(every) == (hosts - 1 if hosts % 2 == 0 else hosts if hosts > 1 else 1)


@pytest.mark.parametrize(
    ("result", "named"),
    [
        (Measured(EVEN, 9.0), []),
        (Measured({**EVEN, (1, 3): 2.0}), ["slow links: b and d, 2 Gbit/s, usual 10"]),
        (
            Measured({pair: 1.0 if 2 in pair else 10.0 for pair in EVEN}),
            ["slow links: c, 1 Gbit/s at best"],
        ),
        (Measured({(0, 1): 1.0}), []),  # neither of two is to blame
        (
            Measured(compute={(0, 0): 300.0, (0, 1): 100.0, (1, 0): 310.0}),
            ["slow compute: rank 1 of a, 100 TFLOP/s, usual 300"],
        ),
        (Measured(data={0: 900.0, 1: 910.0, 3: 30.0}), ["slow data: d, 30 MB/s, usual 900"]),
    ],
)
def test_the_slow_link_gpu_or_disk_is_named(result, named):
    """By less than half of the median; a host when all of its links are slow."""
    lines = report(result, NAMES)
    assert [line for line in lines if line.startswith("slow ")] == named
    assert (lines[-1] == "nothing is slower than half of the others") == (not named)


A_HOST_EACH = """
import os, sys
from rackrun.training.deep_check import main
os.environ |= {"GROUP_RANK": os.environ["RANK"], "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
args = ("--device", "cpu", "--seconds", "0.3", "--hosts", "gpu01,gpu02", "--data", sys.argv[1])
code = main(args)
sys.stdout.flush()
os._exit(code)
"""


def test_all_of_it_is_measured_between_real_ranks(make_shards):
    """Two hosts of one rank each, over gloo: links, network, products, and shards that are read."""
    lines = output_of_ranks(2, "-c", A_HOST_EACH, make_shards()).splitlines()
    assert [line.split()[0] for line in lines[:4]] == ["links", "network", "compute", "data"], lines
    assert all(float(line.split()[1]) > 0 for line in lines[:4]), lines
