"""Training through the node cache: the second epoch, and the second run, fetch nothing."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from rackrun.catdog.model import TASK
from rackrun.catdog.recipes import CatDog
from rackrun.nginx.serve import serving
from rackrun.nginx.site import Site
from rackrun.shards import source
from rackrun.shards.index import Manifest, parse_index
from rackrun.training.data.loader import waits_reported
from rackrun.training.data.open import Data, open_data
from rackrun.training.ranks import Ranks
from tests.lab.servers import access_log


@pytest.mark.parametrize(
    "exact",
    [pytest.param(False, id="resampled", marks=pytest.mark.long), pytest.param(True, id="exact")],
)
def test_what_one_run_has_read_the_next_one_does_not_fetch(shapes, tmp_path, exact):
    """Over HTTP only the manifest is asked for again, for training and for validation."""
    shapes.chmod(0o755)
    with access_log() as log, serving(log.site(shapes)) as server:
        options = {"data": server.url, "image_size": 16, "batch_size": 8, "workers": 0}
        config = CatDog(**options, cache=str(tmp_path), exact_epochs=exact)
        read_everything(config)
        before = Counter(path for path, _, _ in log.requests)
        assert set(before) > {"/dataset.json", "/shapes-train.index.npy"}
        read_everything(config)
        again = Counter(path for path, _, _ in log.requests) - before
    assert set(again) == {"/dataset.json"}


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


def test_readers_of_a_pool_share_one_manifest_and_one_index(shapes, tmp_path, monkeypatch):
    """All reader threads of a process read each file once, whether the cache is cold or warm."""
    read = Counter[str]()

    def counted(data: bytes, *args: Any) -> np.ndarray:
        read["index"] += 1
        return parse_index(data, *args)

    def parsed(text: bytes, where: str) -> Manifest:
        read["manifest"] += 1
        return parse(text, where)

    parse = Manifest.parse
    monkeypatch.setattr(source, "parse_index", counted)
    monkeypatch.setattr(Manifest, "parse", parsed)
    options = {"data": str(shapes), "image_size": 16, "batch_size": 8, "workers": 0}
    for _ in range(2):
        read.clear()
        config = CatDog(**options, cache=str(tmp_path), exact_epochs=True)
        data = opened(config)
        assert len(list(islice(data.training(0), 3 * data.epoch_steps))) > 10
        assert read["index"] == 1
        assert read["manifest"] <= 2  # of the cache, and of the folder below it


def opened(config: CatDog) -> Data:
    """Return the data set, for one process."""
    transforms = partial(TASK.transforms, config)
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    return open_data(config, alone, transforms, TASK.name, TASK.synthetic_classes)


def read_everything(config: CatDog) -> None:
    """Read ten epochs, and the validation set."""
    data = opened(config)
    assert len(list(islice(data.training(0), 10 * data.epoch_steps))) > 100
    assert len(list(data.evaluation())) > 1
