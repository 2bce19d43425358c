"""Whatever happens to a run: its exit code and cause are true, in time, and nothing is left.

The next launch works at once. A row per fault; those of `python -m tests.contract.faults` at random
moments are the same.
"""

import pytest

from tests.contract.faults import rows_attached, rows_others
from tests.lab.fault import play
from tests.lab.fault_labs import LABS
from tests.lab.hosts import BUSY

ROWS = [
    pytest.param(
        fault,
        id=str(fault),
        marks=[
            pytest.mark.slurm if fault.started_as == "slurm" else pytest.mark.root,
            *([] if fault.short else [pytest.mark.long]),
        ],
    )
    for fault in (*rows_attached.ROWS, *rows_others.ROWS)
]


@pytest.mark.security("PROC-1", "PROC-2")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ROWS)
def test_a_fault_ends_a_run_as_promised_and_leaves_nothing(fault, tmp_path):
    lab = LABS[fault.started_as]()
    try:
        outcome = play(fault, lab, tmp_path, BUSY)
    finally:
        lab.stop()
    assert not outcome.violations, outcome
