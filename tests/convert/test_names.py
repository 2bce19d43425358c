"""Names of people become names of data sets, classes and samples that every program can keep."""

from hashlib import blake2b

import pytest

from rackrun.convert.readers.names import (
    MAX_NAME,
    class_table,
    dataset_name,
    free_key,
    is_class_name,
    is_meta,
    refuse_similar,
    safe_key,
)
from rackrun.errors import DataError
from rackrun.shards.writer import MAX_KEY_BYTES


@pytest.mark.parametrize(
    ("text", "name"),
    [("My photos (2)", "My_photos_2"), ("__a-b__", "a_b"), ("X_9", "X_9"), ("!!!", "pictures")],
)
def test_a_data_set_is_named_after_its_source(text, name):
    """Letters, digits and _ stay, with their case; what has none of them gets a name."""
    assert dataset_name(text) == name


def test_a_class_name_can_be_shown():
    """Not empty, of at most 200 characters, and on one line."""
    assert is_class_name("ä") and is_class_name("x" * MAX_NAME)
    for text in ("", "x" * (MAX_NAME + 1), "a\nb", "a\x1b"):
        assert not is_class_name(text)


def test_classes_are_in_the_order_of_their_numbers_or_names():
    """Numbers by value, equal ones by text; anything else by text, also beside numbers."""
    assert list(class_table({"10", "9", "01", "1"})) == ["01", "1", "9", "10"]
    assert class_table({"b", "10", "9"}) == {"10": 0, "9": 1, "b": 2}


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (("Rose", "rose"), "'Rose' and 'rose'"),
        (("0", "000"), "'0' and '000'"),
        (("07", "7"), "'07' and '7'"),
        (("G\u00e4nse", "Ga\u0308nse"), r"'G\\xe4nse' and 'Ga\\u0308nse'"),
    ],
)
def test_names_that_differ_in_what_people_do_not_see_are_refused(names, shown):
    """Both are shown so that the difference can be seen; others may be as alike as they are."""
    with pytest.raises(
        DataError, match=f"^classes {shown} differ only by .*; make them one, or add"
    ):
        refuse_similar(["other", *names])
    refuse_similar(["a", "ab", "XX", "0", "100", "01a", "1a"])


@pytest.mark.parametrize(
    ("file", "meta"),
    [
        *(("__info__.json", True), ("__a__.b__.c", True), ("__info.json", False)),
        *(("info__.json", False), ("a.__b__", False), ("__.json", True)),
    ],
)
def test_what_describes_a_tar_is_no_sample(file, meta):
    """The name up to the first dot begins and ends with two underscores."""
    assert is_meta(file) == meta


def mark(name: str) -> str:
    return blake2b(name.encode("utf-8", "surrogateescape"), digest_size=4).hexdigest()


def test_a_key_is_its_name_or_has_a_mark_of_it():
    """What is replaced or cut is made up for by eight digits, so that two names are two keys."""
    longest = "k" * MAX_KEY_BYTES
    assert [safe_key(name) for name in ("a-B_9", longest)] == ["a-B_9", longest]
    assert safe_key("a b.c") == f"a_b_c-{mark('a b.c')}"
    assert safe_key("__info__") == f"__info__-{mark('__info__')}"
    assert safe_key("\udcff") == f"_-{mark(chr(0xDCFF))}"
    cut = safe_key(longest + "k")
    assert cut == f"{'k' * (MAX_KEY_BYTES - 9)}-{mark(longest + 'k')}"
    assert len(cut) == MAX_KEY_BYTES


def test_the_first_free_key_is_taken():
    """Keys differ by more than their case; where none is free, the image's own name marks one."""
    taken: set[str] = set()
    assert free_key(["cat", "x-cat"], "x/cat.jpg", taken) == "cat"
    assert free_key(["Cat", "y-Cat"], "y/Cat.jpg", taken) == "y-Cat"
    assert free_key(["CAT", "Y-CAT"], "z/CAT.jpg", taken) == f"CAT-{mark('z/CAT.jpg')}"
    assert taken == {"cat", "y-cat", f"cat-{mark('z/CAT.jpg')}"}
