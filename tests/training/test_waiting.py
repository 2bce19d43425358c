"""How a rank waits for its data."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.training.test_log import log


def test_any_thread_may_drop_the_batches_that_a_stopped_loop_leaves():
    """Ctrl-C leaves the iterator to whoever holds its traceback last, as a thread that saves."""
    two: Any = ["a", "b"]
    batches = log().waits_reported(iter(two))
    assert next(batches) == two[0]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(batches.close).result()
