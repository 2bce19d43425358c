"""Labels that a trained model doubts: `rackrun doctor DATA RUN`.

The model's own predictions are worth something only on images that it was not trained on. Those of
the split train it may know by heart, wrong labels included; so it gives their features (what its
last layer reads), and five small classifiers, each fitted to four fifths of them, judge the rest.

The rule follows confident learning: Northcutt, Jiang and Chuang, "Confident Learning: Estimating
Uncertainty in Dataset Labels", JAIR 70, 2021, and its "prune by noise rate". An image counts for a
class if its probability reaches what images with that label have on average. How many images of a
label count for another class estimates how many of its labels are wrong; images that count for no
class are taken to be divided likewise. That many are doubted, those first whose label has the
smallest part of the probability that it has on average.

Doubting just the images that count for another class, as the paper's simplest form does, misses
those whose label is impossible while no other class stands out: a sixth of the wrong labels of real
digits (docs/internals/doctor.md). An image counts here from four fifths of the average on.
cleanlab, the authors' own program, is under the AGPL; the rule is twenty lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from rackrun.contract.suspects import Question, SuspectLabel
from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.data.pool import TRAIN, opened
from rackrun.training.data.samples import Batch
from rackrun.training.data.worker_server import start_worker_server
from rackrun.training.device import Compute, set_up
from rackrun.training.evaluation import answered
from rackrun.training.judge.evaluation import open_split, refuse_other_classes, settings
from rackrun.training.layers import heads_of
from rackrun.training.ranks import Ranks
from rackrun.training.trained import Trained, load_of_any_task
from rackrun.training.world import joined

FOLDS = 5
ENOUGH = 0.8  # of a class's average probability
DECAY = 0.02  # of the squared weights: what keeps the classifier from learning single wrong labels
STEPS = 60
LIKELIEST = 8  # classes of an image that are kept: a doubted label's is far above 1 / 9
MOST_FEATURES = 512  # of an image: wider layers are projected, so that 100,000 images take 200 MB


def suspects(question: Question) -> list[SuspectLabel]:
    """Return the images of all splits whose labels the model doubts.

    UsageError where the model has other classes than the data, SaveError for no model.
    """
    start_worker_server("rackrun.training.data.validation")
    trained = load_of_any_task(question.weights, question.model, question.task)
    config = settings(
        trained,
        data=question.data,
        workers=question.workers or -1,
        bad_samples="quarantine",
        bad_samples_limit=2**31,
    )
    classes = opened(config).manifest.classes
    if list(classes) != trained.classes:  # else a label could become one that the data lack
        refuse_other_classes(trained, classes, question.data)
        raise UsageError(
            f"{trained.path}: has {len(trained.classes)} classes, {question.data} has"
            f" {len(classes)} of them, or in another order; type a run trained on these data"
        )
    suspect_labels: list[SuspectLabel] = []
    for split in opened(config).manifest.splits:
        if split.samples:
            of_split = replace(config, eval_split=split.name)
            with joined(of_split) as ranks:
                suspect_labels += _suspects_of_split(of_split, ranks, trained, question.advance)
    return suspect_labels


def _suspects_of_split(
    config: Config, ranks: Ranks, trained: Trained, advance: Callable[[int], None]
) -> Iterator[SuspectLabel]:
    compute = set_up(config, ranks)
    batches = open_split(config, ranks, trained)
    trained = replace(trained, model=compute.placed(trained.model), device=ranks.device)
    names: list[tuple[str, str]] = []
    batch_probabilities: list[Probabilities] = []
    features: list[torch.Tensor] = []
    for batch in batches:
        advance(len(batch.labels) + batch.skipped)
        if not len(batch.labels):
            continue
        logits, inputs = _logits_and_features(compute, trained, batch)
        has_answer = answered(logits)  # an output that is not finite says nothing about a label
        logits, inputs = logits[has_answer], inputs[has_answer]
        batch_probabilities.append(Probabilities.of(logits, batch.labels[has_answer]))
        names += [
            key for key, is_known in zip(batch.keys, has_answer.tolist(), strict=True) if is_known
        ]
        if config.eval_split == TRAIN:
            features.append(inputs)
    if not names:
        return
    probabilities = Probabilities.joined(batch_probabilities)
    if features:
        probabilities = held_out_probabilities(
            torch.cat(features), probabilities.labels, len(trained.classes)
        )
    for doubt in doubts(probabilities, len(trained.classes)):
        shard, key = names[doubt.image]
        yield SuspectLabel(
            config.eval_split, shard, key, trained.classes[doubt.likely], doubt.score
        )


def _logits_and_features(
    compute: Compute, trained: Trained, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    # (B, classes), and what the last layer read: float32 (B, n).
    names = heads_of(trained.model, len(trained.classes))
    if not names:
        raise UsageError(
            f"{trained.path}: no Linear or Conv2d with {len(trained.classes)} outputs, one for each"
            " class, whose inputs could be judged; type another model"
        )
    read: list[torch.Tensor] = []
    hook = trained.model.get_submodule(names[-1]).register_forward_pre_hook(
        lambda layer, inputs: read.append(inputs[0])
    )
    try:
        with torch.inference_mode():
            logits = compute.logits(trained.model, trained.transforms.normalised, batch.images)
            return logits.clone(), _narrowed(read[-1].flatten(1).float())
    finally:
        hook.remove()


def _narrowed(features: torch.Tensor) -> torch.Tensor:
    width = features.shape[1]
    if width <= MOST_FEATURES:
        return features
    # A random projection nearly keeps distances, which is all that the classifiers need.
    random = torch.Generator().manual_seed(0)
    directions = torch.randn(width, MOST_FEATURES, generator=random) / MOST_FEATURES**0.5
    narrowed: torch.Tensor = features @ directions.to(features.device)
    return narrowed


class Probabilities(NamedTuple):
    """The output of a classifier for images that it has not been fitted to."""

    labels: torch.Tensor
    """int64 (images,)."""
    of_label: torch.Tensor
    """float32 (images,): the probability of the label."""
    classes: torch.Tensor
    """int64 (images, k): the likeliest classes."""
    shares: torch.Tensor
    """float32 (images, k): their probabilities."""

    @classmethod
    def of(cls, logits: torch.Tensor, labels: torch.Tensor) -> Probabilities:
        """Return the probabilities in logits (images, classes)."""
        shares = logits.float().softmax(1)
        best = shares.topk(min(LIKELIEST, shares.shape[1]))
        of_label = shares.gather(1, labels[:, None])[:, 0]
        return cls(labels, of_label, best.indices, best.values)

    @classmethod
    def joined(cls, parts: list[Probabilities]) -> Probabilities:
        """Return the probabilities of several batches."""
        return cls(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class Doubt(NamedTuple):
    """A label that is doubted."""

    image: int
    likely: int
    score: float
    """Probability of the likely class less that of the label."""


def doubts(probabilities: Probabilities, classes: int) -> Iterator[Doubt]:
    """Yield the images whose labels are the least likely, as many as are estimated to be wrong."""
    labels, likeliest = probabilities.labels, probabilities.classes[:, 0]
    counts = torch.bincount(labels, minlength=classes)
    sums = torch.bincount(labels, probabilities.of_label.double(), classes)
    usual = torch.where(counts > 0, sums / counts, torch.inf).float()
    relative = probabilities.of_label / usual[labels]
    candidates = torch.nonzero(likeliest != labels)[:, 0]
    order = relative[candidates].argsort(stable=True)[: _wrong(probabilities, usual, counts)]
    for image in candidates[order].tolist():
        score = probabilities.shares[image, 0] - probabilities.of_label[image]
        yield Doubt(image, int(likeliest[image]), float(score.clamp(0, 1)))


def _wrong(probabilities: Probabilities, usual: torch.Tensor, counts: torch.Tensor) -> int:
    # usual: float (classes,), what images with a label give it on average; counts: int (classes,)
    reached = probabilities.shares >= ENOUGH * usual[probabilities.classes]
    first = reached.int().argmax(1)  # of the classes that are reached, the likeliest
    counted = probabilities.classes.gather(1, first[:, None])[:, 0]
    sure = reached.any(1)
    of_label = torch.bincount(probabilities.labels[sure], minlength=len(counts))
    is_other = sure & (counted != probabilities.labels)
    of_others = torch.bincount(probabilities.labels[is_other], minlength=len(counts))
    return round(float((counts * of_others / of_label.clamp(min=1)).sum()))


def held_out_probabilities(
    features: torch.Tensor, labels: torch.Tensor, classes: int
) -> Probabilities:
    """Return probabilities for each image by a linear classifier fitted to the other folds.

    features: float (images, n); labels: int64 (images,). Each fold has its share of each class.
    """
    folds = _folds(labels)
    parts, order = [], []
    for fold in range(FOLDS):
        held_out = torch.nonzero(folds == fold)[:, 0]
        others = torch.nonzero(folds != fold)[:, 0]
        if not len(held_out) or not len(others):
            continue
        mean = features[others].mean(0)
        scale = features[others].std(0).clamp(min=1e-6)
        fitted = _fitted((features[others] - mean) / scale, labels[others], classes)
        logits = ((features[held_out] - mean) / scale) @ fitted[:-1] + fitted[-1]
        parts.append(Probabilities.of(logits, labels[held_out]))
        order.append(held_out)
    positions = torch.cat(order).argsort()
    return Probabilities(*(column[positions] for column in Probabilities.joined(parts)))


def _folds(labels: torch.Tensor) -> torch.Tensor:
    # The images of a class go round the folds, in a random order.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    order = order.to(labels.device)
    order = order[labels[order].argsort(stable=True)]
    folds = torch.empty_like(labels)
    folds[order] = torch.arange(len(labels), device=labels.device) % FOLDS
    return folds


def _fitted(features: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    # Weights and, in the last row, biases of a logistic regression: (n + 1, classes).
    weights = torch.zeros(features.shape[1] + 1, classes, device=features.device)
    weights.requires_grad_()
    optimizer = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        logits = features @ weights[:-1] + weights[-1]
        total = cross_entropy(logits, labels) + DECAY / 2 * weights[:-1].square().sum()
        total.backward()  # type: ignore[no-untyped-call]
        return total

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()
