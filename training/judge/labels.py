"""Labels that a trained model doubts: `rackrun doctor DATA RUN`.

The model's own predictions are worth something only on images that it was not trained on. Those of
the split train it may know by heart, wrong labels included; so it gives their features (what its
last layer reads), and five small classifiers, each fitted to four fifths of them, judge the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from rackrun.contract.suspects import Question, SuspectLabel
from rackrun.errors import UsageError
from training.config import Config
from training.data.pool import TRAIN, opened
from training.data.samples import Batch
from training.data.worker_server import start_worker_server
from training.device import Compute, set_up
from training.judge.confident_learning import Probabilities, doubts, held_out_probabilities
from training.judge.evaluation import open_split, settings
from training.layers import heads_of
from training.ranks import Ranks
from training.trained import Trained, load_of_any_task
from training.world import joined

MOST_FEATURES = 512  # of an image: wider layers are projected, so that 100,000 images take 200 MB


def suspects(question: Question) -> list[SuspectLabel]:
    """Return the images of all splits whose labels the model doubts.

    UsageError where the model has other classes than the data, SaveError for no model.
    """
    start_worker_server("training.data.validation")
    trained = load_of_any_task(question.weights, question.model, question.task)
    config = settings(
        trained,
        data=question.data,
        workers=question.workers or -1,
        bad_samples="quarantine",
        bad_samples_limit=2**31,
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
        batch_probabilities.append(Probabilities.of(logits, batch.labels))
        names += batch.keys
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
    """Return the logits (B, classes) of a batch, and what the last layer read: float32 (B, n)."""
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
    """Return features (B, n), projected at random to MOST_FEATURES where there are more."""
    width = features.shape[1]
    if width <= MOST_FEATURES:
        return features
    random = torch.Generator().manual_seed(0)
    directions = torch.randn(width, MOST_FEATURES, generator=random) / MOST_FEATURES**0.5
    narrowed: torch.Tensor = features @ directions.to(features.device)
    return narrowed
