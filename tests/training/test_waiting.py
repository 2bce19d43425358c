"""How a rank waits for its data."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from threading import Event

import torch

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.training.data.loader import waits_reported
from rackrun.training.data.open import Data, open_data
from rackrun.training.ranks import Ranks


def test_a_rank_waits_for_a_server_that_is_away_and_reports_it(shapes):
    """nginx is stopped and starts again while a batch is late: not one is lost or another one."""
    shapes.chmod(0o755)
    with ExitStack() as servers:
        server = servers.enter_context(serving(Site(shapes, port=0, native=True)))
        stopped, restarted = Event(), Event()

        class Progress:
            """Starts the server again once the rank has reported that it lacks data."""

            current_phase = "train"
            reported: list[str] = []

            def phase(self, name: str) -> None:
                self.reported.append(name)
                self.current_phase = name
                if name == "data" and not server.alive and not restarted.is_set():
                    assert stopped.wait(60)
                    restarted.set()  # a later batch may be late, too, where cores are busy
                    servers.enter_context(serving(server.site))

        options = {"data": server.url, "image_size": 16, "batch_size": 8, "workers": 0}
        data = opened(CatDog(**options))
        expected = [batch.labels.tolist() for batch in islice(data.training(0), 100)]
        progress = Progress()
        read = data.training(0)
        batches = waits_reported(next(read), read, progress, 0.1)
        labels = [next(batches).labels.tolist()]
        server.stop()
        stopped.set()
        labels += [batch.labels.tolist() for batch in islice(batches, 99)]
    assert labels == expected
    assert progress.reported[:2] == ["data", "train"]


def test_any_thread_may_drop_the_batches_that_a_stopped_loop_leaves():
    """Ctrl-C leaves the iterator to whoever holds its traceback last, as a thread that saves."""

    class Progress:
        current_phase = "train"

        def phase(self, name: str) -> None:
            raise AssertionError(name)

    batches = waits_reported("a", iter("b"), Progress())
    assert next(batches) == "a"
    with ThreadPoolExecutor(1) as pool:
        pool.submit(batches.close).result()


def opened(config: CatDog) -> Data:
    """Return the data set, for one process."""
    transforms = partial(TASK.transforms, config)
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    return open_data(config, alone, transforms, TASK.name, TASK.synthetic_classes)
