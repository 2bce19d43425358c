"""Training through the node cache: the second epoch, and the second run, fetch nothing."""

import json
from collections import Counter
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
import torch

from catdog.model import TASK
from catdog.recipes import CatDog
from nginx.serve import Server, serving
from nginx.site import Site
from training.data.open import open_data
from training.ranks import Ranks


@pytest.mark.parametrize("exact", [False, True], ids=["resampled", "exact"])
def test_what_one_run_has_read_the_next_one_does_not_fetch(
    shapes: Path, tmp_path: Path, exact: bool
) -> None:
    """Over HTTP only the manifest is asked for again, for training and for validation."""
    shapes.chmod(0o755)
    with serving(Site(shapes, port=0, native=True)) as server:
        words = {"data": server.url, "image_size": 16, "batch_size": 8, "workers": 0}
        config = CatDog(**words, cache=str(tmp_path), exact_epochs=exact)  # type: ignore[arg-type]
        read_everything(config)
        before = asked_for(server)
        assert set(before) > {"/dataset.json", "/shapes-train.index.npy"}
        read_everything(config)
        again = asked_for(server) - before
    assert set(again) == {"/dataset.json"}


def read_everything(config: CatDog) -> None:
    """Ten epochs, and the validation set."""
    data = open_data(
        config,
        Ranks(0, 1, 0, 1, torch.device("cpu")),
        partial(TASK.transforms, config),
        TASK.name,
        TASK.synthetic_classes,
    )
    assert len(list(islice(data.training(0), 10 * data.epoch_steps))) > 100
    assert len(list(data.evaluation())) > 1


def asked_for(server: Server) -> Counter[str]:
    """How often each file was asked for; the two looks of the start are in it."""
    lines = map(json.loads, server.traffic.log.read_text().splitlines())
    return Counter(line["path"] for line in lines)
