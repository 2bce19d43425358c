"""How a rank waits for its data."""

from concurrent.futures import ThreadPoolExecutor

from rackrun.training.data.loader import waits_reported


def test_any_thread_may_drop_the_batches_that_a_stopped_loop_leaves():
    """Ctrl-C leaves the iterator to whoever holds its traceback last, as a thread that saves."""

    class Progress:
        current_phase = "train"

        def phase(self, name: str) -> None:
            raise AssertionError(name)

    batches = waits_reported(iter("ab"), Progress())
    assert next(batches) == "a"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(batches.close).result()
