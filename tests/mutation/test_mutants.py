"""The tests fail on nearly every small change of training and conversion."""

import pytest

from tests.mutation.mutate import PARTS, ROOT, listed, survivors, walk


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("part", PARTS)
def test_no_mutant_survives_that_is_not_listed(tmp_path, part):
    """docs/testing.md lists those that do, each with the reason."""
    assert survivors(walk(part, tmp_path)) <= listed()


def test_the_page_lists_changes_of_code_that_is_there():
    """A line that has changed since is walked anew, and not listed."""
    assert listed()
    for mutant in listed():
        path, _, change = mutant.partition(" ")
        before = change.partition(": ")[2].partition(" -> ")[0]
        code = " ".join((ROOT / path).read_text().split())
        assert " ".join(before.split()) in code, mutant
