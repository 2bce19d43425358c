"""Counts over batches: what they add up to, where training ends, and the images of highest loss."""

import math

import pytest
import torch

from rackrun.training.counts import (
    SMALLEST_SCALE,
    Confusion,
    Counter,
    Counts,
    Diverged,
    HighestLosses,
    Scaling,
    check_finite,
    check_weights,
    correct_predictions,
    evaluation_sums,
)
from rackrun.training.ranks import Ranks

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, 0, 1, CPU)
ZEROS = torch.zeros(3, dtype=torch.long)


def logits_of(losses: list[float]) -> torch.Tensor:
    """Return logits of two classes with these losses for label 0."""
    return torch.tensor([[-math.log(math.expm1(loss)), 0.0] for loss in losses])


def test_means_are_per_image_and_none_of_no_image():
    """Loss in nats, accuracies as shares."""
    counts = Counts(6.0, 2, 3, 4, 1).plus(Counts(2.0, 1, 1, 1, 2))
    assert counts == (8.0, 3, 4, 5, 3)
    assert (counts.mean_loss, counts.accuracy, counts.accuracy5) == (1.6, 0.6, 0.8)
    assert (Counts().mean_loss, Counts().accuracy, Counts().accuracy5) == (0, 0, 0)


def test_a_counter_adds_images_and_those_that_were_skipped():
    """Of training, loss and top-1 are known, in parts; of an evaluation, top-5 as well."""
    counter = Counter(CPU)
    counter.add([torch.tensor([1.5, 1.0]), torch.tensor([0.5, 0.0])], samples=2, skipped=3)
    counter.add([torch.tensor([1.5, 1.0, 2.0])], samples=3, skipped=0)
    assert counter.sums.tolist() == [3.5, 2, 2, 5, 3]
    counter.clear()
    assert counter.sums.tolist() == [0] * 5


def test_the_sums_of_an_evaluation():
    """Summed over the batch; top-5 of fewer classes is of all that there are."""
    logits = torch.tensor([[4.0, 0, 1, 2, 3, 5], [0, 1, 2, 3, 4, 5.0]]).half()
    labels = torch.tensor([0, 0])
    loss = torch.nn.functional.cross_entropy(logits.float(), labels) * 2
    assert evaluation_sums(logits, labels).tolist() == [pytest.approx(float(loss)), 0, 1]
    assert evaluation_sums(logits[:, :3], labels).tolist()[1:] == [1, 2]
    assert [int(correct_predictions(logits, labels, first).sum()) for first in (1, 2, 6)] == [
        0,
        1,
        2,
    ]


def test_a_confusion_matrix_has_a_row_for_each_label():
    """Up to 1,024 classes: it would weigh as much as a model."""
    confusion = Confusion(3, CPU)
    confusion.add(torch.tensor([[0.0, 1, 0], [1, 0, 0], [0, 1, 0]]), torch.tensor([2, 0, 2]))
    assert confusion.counts.reshape(3, 3).tolist() == [[1, 0, 0], [0, 0, 0], [0, 2, 0]]
    assert (Confusion(1024, CPU).classes, Confusion(1025, CPU).classes) == (1024, 0)
    assert len(Confusion(1025, CPU).counts) == 0


@pytest.mark.parametrize(
    ("counts", "scaling", "says"),
    [
        (Counts(math.nan, samples=1), None, "the loss is nan at step 7: type a lower --lr"),
        (Counts(math.inf, samples=1), Scaling(1, 0), "loss is inf .*, or --precision fp32"),
        (Counts(1.0, samples=1), Scaling(SMALLEST_SCALE / 2, 3), "overflow float16 at any scale"),
    ],
)
def test_training_that_cannot_go_on_ends(counts, scaling, says):
    """With what to type."""
    with pytest.raises(Diverged, match=says):
        check_finite(7, counts, scaling)


def test_training_that_can_go_on_goes_on():
    """A rank may have no sample in the last step; a scale of 2^-16 is the least of any use."""
    check_finite(7, Counts(math.nan), None)
    check_finite(7, Counts(1.0, samples=1), Scaling(2.0**-16, 32))
    check_weights(7, are_finite=True)
    with pytest.raises(Diverged, match="weights are not finite at step 7"):
        check_weights(7, are_finite=False)


def test_the_highest_losses_come_first_with_their_rows():
    """A loss that is no number is the highest; of equal ones, the first; noise has no rows."""
    losses = HighestLosses()
    losses.add(logits_of([0.5, 2.0, 0.1]), ZEROS[:3], torch.tensor([10, 11, 12]))
    losses.add(logits_of([math.nan, 1.0]), ZEROS[:2], torch.tensor([13, 14]))
    losses.add(logits_of([9.0]), ZEROS[:1], None)
    assert losses.rows_of_all(ALONE, 3) == [13, 11, 14]
    assert losses.rows_of_all(ALONE, 9) == [13, 11, 14, 10, 12]
    assert HighestLosses().rows_of_all(ALONE, 3) == []
    certain = HighestLosses()
    certain.add(torch.tensor([[100.0, 0.0]]), ZEROS[:1], torch.tensor([0]))  # a loss of exactly 0
    assert certain.rows_of_all(ALONE, 2) == [0]
