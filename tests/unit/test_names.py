"""Names of people become names of data sets, classes and samples that every program can keep."""

from hashlib import blake2b

import pytest

from rackrun.convert.readers.names import (
    class_table,
    dataset_name,
    free_key,
    safe_key,
)
from rackrun.shards.writer import MAX_KEY_BYTES


@pytest.mark.parametrize(
    ("text", "name"),
    [("My photos (2)", "My_photos_2"), ("__a-b__", "a_b"), ("X_9", "X_9"), ("!!!", "pictures")],
)
def test_a_data_set_is_named_after_its_source(text, name):
    """Letters, digits and _ stay, with their case; what has none of them gets a name."""
    assert dataset_name(text) == name


def test_classes_are_in_the_order_of_their_numbers_or_names():
    """Numbers by value, equal ones by text; anything else by text, also beside numbers."""
    assert list(class_table({"10", "9", "01", "1"})) == ["01", "1", "9", "10"]
    assert class_table({"b", "10", "9"}) == {"10": 0, "9": 1, "b": 2}


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
