"""From the bytes of many ranks to readable lines."""

import random

import pytest

from rackrun.launcher.output.merge import FLOOD_BYTES, Line, LogMerger, readable, readable_lines
from rackrun.launcher.run.events import Output
from rackrun.terminal import clean


def feed(merger: LogMerger, data: bytes, rank: int = 0, stream: str = "out", node: int = 0) -> None:
    merger.feed(Output(node, rank, stream, data))


def texts(shown: list[Line]) -> list[tuple[str, int]]:
    return [(item.text, len(item.sources)) for item in shown]


def test_lines_are_the_same_however_the_bytes_are_cut():
    """Lines with UTF-8 come out alike, whether the bytes arrive whole or one by one."""
    data = "first\nzweite Zeile: äöü 漢字 🐈\n\nlast without an end".encode()
    expected = [("first", 1), ("zweite Zeile: äöü 漢字 🐈", 1), ("", 1), ("last without an end", 1)]
    for size in (1, 2, 3, 7, 1000):
        merger = LogMerger(fold=False)
        shown = []
        for start in range(0, len(data), size):
            feed(merger, data[start : start + size])
            shown += merger.take(0.0)
        assert texts(shown + merger.take(0.0, everything=True)) == expected


def test_equal_lines_of_many_ranks_are_one():
    """64 ranks say the same three lines in their own time: three lines with a count of 64."""
    merger = LogMerger(fold=True)
    chance = random.Random(3)
    args = [(rank, line) for line in ("one", "two", "two") for rank in range(64)]
    chance.shuffle(args)
    for rank, line in args:
        feed(merger, line.encode() + b"\n", rank)
        merger.take(0.0)
    shown = merger.take(1.0)
    assert sorted(texts(shown)) == [("one", 64), ("two", 64), ("two", 64)]


def test_a_line_waits_for_its_equals_a_moment_only():
    """What only one rank says appears after a third of a second, in its order."""
    merger = LogMerger(fold=True)
    feed(merger, b"a\nb\na\n")
    assert merger.take(10.0) == []
    assert texts(merger.take(10.5)) == [("a", 1), ("b", 1), ("a", 1)]


def test_a_progress_bar_is_shown_now_and_then():
    """tqdm writes nothing but \\r for minutes: its newest state after 10 s, and its end."""
    merger = LogMerger(fold=False)
    shown: list[Line] = []
    for second in range(40):
        feed(merger, b"\rstep %d/40" % second, stream="err")
        shown += merger.take(float(second))
    feed(merger, b"\rstep 40/40\n", stream="err")
    shown += merger.take(40.0)
    assert [text for text, _ in texts(shown)] == [
        "step 10/40",
        "step 21/40",
        "step 32/40",
        "step 40/40",
    ]


def test_a_line_without_an_end_is_shown_after_a_while():
    """Dots, one by one, and a question that nobody answers."""
    merger = LogMerger(fold=False)
    shown: list[Line] = []
    for second in range(12):
        feed(merger, b".")
        shown += merger.take(float(second))
    feed(merger, b"continue? ", stream="err")
    for second in (12.0, 22.0, 40.0):
        shown += merger.take(second)
    assert [text for text, _ in texts(shown)] == ["." * 11, ".", "continue? "]


def test_a_bar_below_another_is_a_bar():
    """tqdm in tqdm goes down a line, draws, and goes up again: no line has ended."""
    merger = LogMerger(fold=False)
    feed(merger, b"\repoch 1/3", stream="err")
    for batch in range(9):
        feed(merger, b"\n\rbatch %d/9\x1b[A" % batch, stream="err")
        assert merger.take(1.0) == []
    feed(merger, b"\repoch 3/3\n", stream="err")
    assert texts(merger.take(2.0)) == [("epoch 3/3", 1)]


def test_repeated_lines_of_one_rank_all_stay():
    """Folding is over ranks: one rank that says the same thrice is shown thrice, and in time."""
    merger = LogMerger(fold=True)
    shown = []
    for second in range(3):
        feed(merger, b"tick\n")
        shown += merger.take(second * 0.2)
    assert texts(shown) == [("tick", 1)] * 3
    feed(merger, b"tick\n")
    shown += merger.take(0.6) + merger.take(9.0)
    assert texts(shown) == [("tick", 1)] * 4


def test_a_flood_comes_as_one_block():
    """More than a person reads at once is not cut, and comes after what was waiting before it."""
    merger = LogMerger(fold=True)
    feed(merger, b"before\n")
    merger.take(0.0)
    feed(merger, b"x\n" * FLOOD_BYTES + b"rest")
    before, flood = merger.take(0.1)
    assert texts([before]) == [("before", 1)]
    assert flood.text.split("\n") == ["x"] * FLOOD_BYTES
    assert texts(merger.take(1.0, everything=True)) == [("rest", 1)]


@pytest.mark.parametrize(
    "nasty", [b"\x1b[2J", b"\x9b", b"\xc2\x9b", b"\x07", b"\r", b"\xe2\x80\xae"]
)
def test_a_flood_with_control_characters_is_not_passed_on_as_it_is(nasty):
    """A block may go to the terminal unchanged only if nothing in it is obeyed there."""
    text = readable_lines(b"plain\n" * 10 + nasty)
    assert text.startswith("plain\n" * 10)
    assert not any(character in text for character in "\x1b\x07\r\u202e\x9b")


def test_every_control_character_becomes_visible():
    """No code of C0, C1 or the bidirectional overrides survives; tabs become spaces."""
    codes = [*range(0x20), *range(0x7F, 0xA0), 0x202E, 0x2066]
    shown = clean("".join(chr(code) for code in codes))
    assert not set(shown) & {chr(code) for code in codes}
    assert clean("\x1b[1;31mred\x1b[0m\x1b[2J") == "red␛[2J"
    assert readable(b"50%\r75%\r100%\r") == "100%"


def test_a_progress_bar_that_redraws_itself_is_the_newest_line_only():
    """A bar of carriage returns does not fill the log; the board shows its last state."""
    merger = LogMerger(fold=False)
    for percent in range(100):
        feed(merger, b"\r%d%%" % percent)
        assert merger.take(percent / 10) == []
    assert merger.last[0] == "99%"
    feed(merger, b"\r100%\n")
    assert texts(merger.take(200.0)) == [("100%", 1)]


def test_a_line_without_an_end_is_cut():
    """A megabyte without a newline takes little room on the screen, and in memory."""
    merger = LogMerger(fold=False)
    for _ in range(1000):
        feed(merger, b"x" * 1000)
        assert all(len(item.text) < 8300 for item in merger.take(0.0))
    assert sum(len(item.text) for item in merger.take(0.0, everything=True)) < 10_000


def test_the_traceback_of_a_rank_that_dies_is_held_back():
    """A traceback is shown at the end of the run; one that a rank survives is shown in time."""
    trace = b"Traceback (most recent call last):\n  File x\nValueError: no\n"
    merger = LogMerger(fold=True)
    feed(merger, b"before\n" + trace, rank=1, stream="err")
    survived = trace.replace(b"no\n", b"yes\n")
    feed(merger, survived, rank=2, stream="err")
    feed(merger, trace, rank=3, stream="err")
    merger.forget(3)
    assert texts(merger.take(0.0) + merger.take(1.0)) == [("before", 1)]
    merger.forget(1)
    shown = merger.take(11.0) + merger.take(12.0)
    assert [text for text, _ in texts(shown)] == survived.decode().splitlines()
