"""Wrong input is one line that names the culprit, with a fixed exit code, and changes nothing."""

import pytest

from tests.contract.refusals import rows_launch

ROWS = [*rows_launch.ROWS]


@pytest.mark.parametrize("refusal", ROWS, ids=str)
def test_a_wrong_line_is_refused_in_one_line_that_names_the_culprit(refusal, tmp_path):
    refusal.check(tmp_path)
