"""Text from elsewhere is shown and never obeyed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rackrun.tables import table
from rackrun.terminal import UNSAFE, clean, clean_lines, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b]0;owned\x07", "\u241b]0;owned\u2407"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("a\rb\x7f", "a\u240db\u2421"),
        ("\u202egnp.exe", "\\u202egnp.exe"),
        ("\u2028\ufeff\u200b\u061c\x9b", "\\u2028\\ufeff\\u200b\\u061c\\x9b"),
        ("\ud800", "\\ud800"),
        ("na\u00efve \u732b", "na\u00efve \u732b"),
    ],
)
def test_unsafe_characters_become_visible(text, shown):
    """Control characters as symbols, invisible ones as code points, colors not at all."""
    assert clean(text) == shown


@given(st.text(st.characters()))
def test_nothing_unsafe_is_left(text):
    """Whatever was in it, and however it is cut into lines."""
    assert not UNSAFE.search(clean(text))
    assert not UNSAFE.search(one_line(text))
    assert not UNSAFE.search(clean_lines(text).replace("\n", ""))
    assert clean_lines(text).count("\n") == text.count("\n")
    clean(text).encode()


def test_a_table_holds_text():
    """Cells with text of hosts and archives show control characters, and obey none."""
    drawn = table(("", "host"), [("X", "gpu01\x1b]0;PWNED\x07\u202e")])
    assert not UNSAFE.search(drawn.replace("\n", ""))
    assert "PWNED" in drawn
