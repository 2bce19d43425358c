"""How many cores a process may use, whatever the machine has."""

import math

import pytest

from rackrun.contract.cores import cores, quota


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/pod/app\n", {"pod/cpu.max": "150000 100000", "pod/app/cpu.max": "max 100000"}, 1.5),
        ("0::/../other\n", {"cpu.max": "200000 100000"}, 2.0),
        (
            "3:memory:/x\n4:cpu,cpuacct:/docker/1\n",
            {
                "cpu,cpuacct/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/cpu.cfs_period_us": "100000",
            },
            0.5,
        ),
        (
            "4:cpu,cpuacct:/\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000"},
            math.inf,
        ),
        ("", {}, math.inf),
    ],
)
def test_the_quota_of_control_groups(groups, files, expected, tmp_path):
    """Of both versions, of the group itself and of those around it; the least counts."""
    (tmp_path / "own").write_text(groups)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    assert quota(str(tmp_path / "own"), str(tmp_path / "fs")) == expected


def test_a_process_has_a_core_at_least():
    """Here as anywhere."""
    assert cores() >= 1
