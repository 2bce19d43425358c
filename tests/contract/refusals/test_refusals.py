"""Wrong input is one line that names the culprit, with a fixed exit code, and changes nothing."""

from importlib import import_module
from pathlib import Path

import pytest

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("rows_*.py"))
ROWS = [row for name in MODULES for row in import_module(f"{__package__}.{name}").ROWS]


@pytest.mark.parametrize("refusal", ROWS, ids=str)
def test_a_wrong_line_is_refused_in_one_line_that_names_the_culprit(refusal, tmp_path):
    refusal.check(tmp_path)
