"""Wrong input is one line that names the culprit, with a fixed exit code, and changes nothing."""

from importlib import import_module
from pathlib import Path

import pytest

from tests.lab.refusal import one_line

MODULES = sorted(path.stem for path in Path(__file__).parent.glob("rows_*.py"))
ROWS = [row for name in MODULES for row in import_module(f"{__package__}.{name}").ROWS]


@pytest.mark.parametrize("refusal", ROWS, ids=str)
def test_a_wrong_line_is_refused_in_one_line_that_names_the_culprit(refusal, tmp_path):
    refusal.check(tmp_path)


def test_a_line_that_is_typed_in_a_folder_that_is_gone_is_refused(cli):
    gone = "import os, sys; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    typed = "[sys.executable, '-m', 'rackrun', 'ssh', '-H', '127.0.0.9', '--', 'true']"
    result = cli(["python", "-c", f"{gone}; os.execv(sys.executable, {typed})"])
    assert (result.code, "is gone" in one_line(result)) == (64, True)
