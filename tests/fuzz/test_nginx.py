"""Odd logs and odd records: a value, or a Problem."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as some

from rackrun.nginx.registry import read
from tests.fuzz.targets_nginx import (
    NAME,
    fuzz_nginx_log,
    fuzz_nginx_log_line,
    fuzz_nginx_record,
    server_folder,
)

ANYTHING = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(),
    lambda inside: some.lists(inside) | some.dictionaries(some.text(), inside),
    max_leaves=5,
)
LINE: dict[str, Any] = {
    "time": "2026-11-22T01:31:00+00:00",
    "client": "10.0.0.1",
    "method": "GET",
    "path": "/dataset.json",
    "range": "",
    "status": "200",
    "bytes": 1000,
    "seconds": 0.1,
}
RECORD: dict[str, Any] = {
    "name": NAME,
    "folder": "/data/shards",
    "url": "http://10.0.0.1:8080/",
    "process": {
        "pid": 1234,
        "ticks": 5678,
        "boot": f"{0:08}-0000-0000-0000-{0:012}",
        "namespace": "pid:[4026531836]",
    },
    "container": False,
    "since": 1.8e9,
}


@some.composite
def nearly(draw: Any, good: dict[str, Any]) -> bytes:
    """Draw JSON with some fields and some bytes exchanged."""
    changed = good | draw(some.dictionaries(some.sampled_from(sorted(good)), ANYTHING, max_size=2))
    text = json.dumps(changed, ensure_ascii=draw(some.booleans())).encode(errors="surrogatepass")
    index = draw(some.integers(0, len(text)))
    return text[:index] + draw(some.binary(max_size=3)) + text[index + draw(some.integers(0, 3)) :]


@given(some.binary() | nearly(LINE))
def test_a_line_of_a_log_is_a_request_or_misshapen(data: bytes) -> None:
    """Clients choose what is in it."""
    fuzz_nginx_log_line(data)


@given(some.binary() | some.lists(nearly(LINE)).map(b"\n".join))
def test_every_log_is_counted(data: bytes) -> None:
    """A request for each line, and never an error."""
    fuzz_nginx_log(data)


@given(some.binary() | nearly(RECORD))
def test_a_record_is_one_of_ours_or_refused(data: bytes) -> None:
    """What is ended and removed by it is what was started."""
    fuzz_nginx_record(data)


def test_what_the_targets_begin_with_is_right() -> None:
    """Or they would only ever look at refusals."""
    fuzz_nginx_log_line(json.dumps(LINE).encode())
    with server_folder() as home:
        (home / "record.json").write_text(json.dumps(RECORD))
        result = read(home)
    assert result is not None and result.process.pid == 1234
