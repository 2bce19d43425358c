"""Labels that a trained model doubts: `rackrun doctor DATA RUN`.

A model may have memorized the labels of its training images, including wrong ones. So only the
input of its last layer is used: classifiers that are fitted to four fifths of the images predict
the rest, and from their predictions cleanlab finds the labels that are probably wrong.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from PIL import Image

from rackrun.errors import DataError, UsageError
from rackrun.shards.images import UNDECODABLE
from rackrun.terminal import say
from rackrun.training.judge.evaluation import refuse_other_classes
from rackrun.training.layers import heads_of
from rackrun.training.trained import Trained, load_of_any_task
from rackrun.units import plural

FOLDS = 5
BATCH = 64
MOST_FEATURES = 512  # of an image: wider layers are projected, so that fitting takes minutes
STRENGTH = 0.02  # of what is fitted: weak classifiers do not learn single wrong labels

Labelled = tuple[int, int, bytes]
"""Number of an image, number of its class, and the image as stored."""


def trained_on(classes: Sequence[str], data: str, weights: str, model: str, task: str) -> Trained:
    """Return a model of these classes; UsageError for one of others, SaveError for none."""
    trained = load_of_any_task(weights, model, task).on_best_device()
    refuse_other_classes(trained, classes, data)
    if list(classes) != trained.classes:  # else a label could become one that the data lack
        raise UsageError(
            f"{trained.path}: has {len(trained.classes)} classes, {data} has {len(classes)}, or the"
            " same in another order; type a run that was trained on these data"
        )
    return trained


def doubts(trained: Trained, images: Iterable[Labelled]) -> Iterator[tuple[int, int, float]]:
    """Yield images whose labels are probably wrong: number, likely class, how sure that is."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    numbers, labels, features = _features(trained, images)
    enough = np.bincount(labels, minlength=1)[labels] >= FOLDS
    if not enough.all():
        few = plural(int((~enough).sum()), "label")
        say(f"{few} not judged: of classes with fewer than {FOLDS} images")
    numbers, labels, features = numbers[enough], labels[enough], features[enough]
    classes, labels = np.unique(labels, return_inverse=True)
    if len(classes) < 2:
        return
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=STRENGTH, max_iter=200))
    with warnings.catch_warnings(action="ignore"):  # of fits that are not at their optimum yet
        answers = cross_val_predict(classifier, features, labels, cv=FOLDS, method="predict_proba")
        wrong = find_label_issues(
            labels, answers, return_indices_ranked_by="self_confidence", n_jobs=1
        )
        quality = get_label_quality_scores(labels, answers)
    for image in wrong.tolist():
        likely = int(answers[image].argmax())
        if likely != labels[image]:
            yield int(numbers[image]), int(classes[likely]), 1 - float(quality[image])


def _features(
    trained: Trained, images: Iterable[Labelled]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return number, label and what the last layer reads of each image that decodes.

    int64 (images,), int64 (images,), float32 (images, n).
    """
    from sklearn.random_projection import GaussianRandomProjection

    names = heads_of(trained.model, len(trained.classes))
    if not names:
        raise UsageError(
            f"{trained.path}: no Linear or Conv2d with {len(trained.classes)} outputs, one for each"
            " class, whose inputs could be judged; type another model"
        )
    read: list[torch.Tensor] = []
    hook = trained.model.get_submodule(names[-1]).register_forward_pre_hook(
        lambda layer, inputs: read.append(inputs[0].flatten(1).float().cpu())
    )
    known: list[tuple[int, int]] = []
    prepared = _prepared(trained, images)
    with torch.inference_mode():
        while batch := list(islice(prepared, BATCH)):
            known += [(number, label) for number, label, _ in batch]
            pixels = torch.from_numpy(np.stack([each for _, _, each in batch]))
            pixels = pixels.to(trained.device).permute(0, 3, 1, 2)
            trained.model(trained.transforms.normalized(pixels).contiguous())
    hook.remove()
    numbers, labels = np.array(known, int).reshape(-1, 2).T
    features = torch.cat(read).numpy() if read else np.empty((0, 1), np.float32)
    if features.shape[1] > MOST_FEATURES:
        features = GaussianRandomProjection(MOST_FEATURES, random_state=0).fit_transform(features)
    return numbers, labels, features


def _prepared(
    trained: Trained, images: Iterable[Labelled]
) -> Iterator[tuple[int, int, np.ndarray]]:
    for number, label, data in images:
        try:
            yield number, label, trained.transforms.for_evaluation(data)
        except (DataError, Image.DecompressionBombError, *UNDECODABLE):
            continue  # named by the look at all images
