"""The numbers of training are those of a second loop."""

import pytest
import torch

from rackrun.imagenet.model import mixed
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.config import Config
from rackrun.training.device import seed_step
from rackrun.training.ranks import Ranks
from rackrun.training.world import joined
from tests.lab.ranks import on_ranks
from tests.training.reference_ranks import EQUAL, OF_RANKS, RECIPES, distance

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_ends_like_the_reference(name, tmp_path):
    """Weights, their average, losses and evaluation of one rank, in parts, to a millionth.

    Steps whose gradients overflow move nothing, but the schedule and the average go on.
    """
    assert distance(ALONE, tmp_path, name) < EQUAL


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The distutils package")  # inductor imports it
def test_a_compiled_run_ends_like_the_reference(tmp_path):
    """--compile, by inductor: steps are compiled, and the average of their weights is the same."""
    assert distance(ALONE, tmp_path, "sgd", compile=True) < EQUAL


@on_ranks(3)
def test_several_ranks_end_like_the_reference(tmp_path):
    """Each number is the reference's, also where several ranks compute it.

    A scaled loss is summed over parts and ranks, unscaled and clipped, and no rank skips alone;
    ranks without a sample in a step miss nothing of it.
    """
    with joined(Config(device="cpu")) as ranks:
        by_file = {name: distance(ranks, tmp_path / name, name) for name in OF_RANKS}
    assert max(by_file.values()) < EQUAL, by_file


def test_shares_of_mixup_are_drawn_from_beta_by_every_rank():
    """Mean 1/2 and variance 1/(8a + 4) of Beta(a, a), and no two ranks draw the same."""
    config = ImageNet(mixup=0.2)
    images = torch.tensor([0, 1]).view(2, 1, 1, 1)
    labels = torch.tensor([0, 1])
    shares = []
    for rank in (0, 1):
        for step in range(1000):
            seed_step(config, Ranks(rank, 2, rank, 2, torch.device("cpu")), step)
            shares.append(float(mixed(config, images, labels, 2)[1][0, 0]))
    drawn = torch.tensor(shares)
    assert abs(float(drawn.mean()) - 0.5) < 0.03
    assert abs(float(drawn.var()) - 1 / (8 * 0.2 + 4)) < 0.015
    assert (drawn[:1000] != drawn[1000:]).float().mean() > 0.9
