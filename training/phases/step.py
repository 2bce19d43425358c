"""A step of the optimizer: the gradient of a batch, computed in parts if needed, and the update.

The gradient of a step is the sum over the samples of all ranks divided by the global batch, which
is constant. DDP divides the sum of the ranks' gradients by their number; the loss is scaled to
compensate for that, and is never reduced before `backward`.
"""

import math
from typing import Any

import torch
from torch.nn.functional import interpolate
from torch.nn.utils import clip_grad_norm_

from rackrun.terminal import say
from rackrun.training.counts import Counter, not_finite
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import seed_step
from rackrun.training.evaluation import answered
from rackrun.training.phases.loss import summed_loss
from rackrun.training.phases.start import TrainingRun
from rackrun.training.state import TrainingState
from rackrun.training.sync.gradient_sync import GradientSync
from rackrun.training.sync.step_exchange import StepExchange
from rackrun.training.task import are_probabilities, check_logits

SOFTMAX = (
    "the model's outputs are probabilities, as of a softmax at its end; the loss takes logits:"
    " leave the softmax out, or training stops far from its best"
)
FIRST_IMAGES, LONGEST_SIDE = 16, 224  # of the first batch, in the report: at most 2.4 MB
LONGEST_NAME = 100


def train_step(
    run: TrainingRun,
    state: TrainingState,
    sync: GradientSync,
    batch: Batch,
    transforms: Transforms,
    exchange: StepExchange,
    sums: Counter,
) -> None:
    """Take a step of the optimizer, and count its loss and correct predictions."""
    if not sync.has_work(len(batch.labels) + batch.skipped):
        # The end of an exact epoch: the ranks that have samples compute the step, and hand over
        # their state as the context of `sync.step` ends.
        exchange.complete()
        return
    config, ranks = run.config, run.ranks
    # By the step, so that a run that resumes draws what it would have drawn.
    seed_step(config, ranks, state.step)
    share = ranks.world / run.data.batch  # DDP divides by the world
    step_sums: list[tuple[torch.Tensor, ...]] = []  # on the device: no step waits for a number
    parts = parts_of(run, state.step, batch)
    for number, (images, labels) in enumerate(parts, start=1):
        with sync.part(len(labels), is_last=number == len(parts)):
            mixed, targets = run.task.mix(config, images, labels, len(run.data.classes))
            logits = run.compute.logits(sync.model, transforms.normalised, mixed)
            check_logits(logits, len(labels), len(run.data.classes))
            if not state.step and number == 1 and ranks.first and are_probabilities(logits):
                say(SOFTMAX)
            # A sum over samples, then a constant: means of uneven parts weigh their samples unlike.
            loss = summed_loss(logits, targets, config, run.class_weights(logits))
            # Elsewhere this would wait for the GPU; there, the next line of metrics looks.
            if ranks.device.type == "cpu" or not state.step:
                require_finite(run, state, batch, transforms, loss)
            state.loss_scale.backward(loss * share)
        # By the labels from before mixing: of a mixed image only one class counts as right.
        step_sums.append((loss.detach(), (logits.detach().argmax(1) == labels).sum()))
    # The last wait for another rank: from here on the step is taken as a whole, or not at all.
    exchange.complete()
    if config.clip_grad:
        # The limit is one of true gradients, not of those that a float16 loss was scaled up for.
        state.loss_scale.unscale(state.optimizer)
        clip_grad_norm_(sync.model.parameters(), config.clip_grad)
    state.advance()
    sums.add(step_sums, len(batch.labels), batch.skipped)


def require_finite(
    run: TrainingRun,
    state: TrainingState,
    batch: Batch,
    transforms: Transforms,
    loss: torch.Tensor,
) -> None:
    """Raise Diverged for a loss that is not finite, with the images that make it so.

    The weights have not changed by this step yet. Images are tried one by one, as a batch norm
    spreads what is not finite in one of them to all.
    """
    if math.isfinite(float(loss.detach())):
        return
    model = state.model.eval()
    with torch.no_grad():
        for buffer in model.buffers():  # a batch norm has taken up what is not finite already
            if buffer.is_floating_point():
                buffer.nan_to_num_(0.0, 0.0, 0.0)
        bad = [
            f"{shard}: {key}"
            for (shard, key), image in zip(batch.keys, torch.split(batch.images, 1), strict=False)
            if not answered(run.compute.logits(model, transforms.normalised, image)).all()
        ]
    if len(bad) == len(batch.labels) > 1:  # it is the weights
        bad = []
    raise not_finite(state.step + 1, bad, len(batch.labels))


def parts_of(run: TrainingRun, step: int, batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the images and labels of a batch in the parts that are computed one after another."""
    count = run.parts_in(step)
    if count == 1:
        return [(batch.images, batch.labels)]
    images, labels = batch.images.tensor_split(count), batch.labels.tensor_split(count)
    return list(zip(images, labels, strict=True))


def training_pictures(run: TrainingRun, step: int, batch: Batch) -> dict[str, Any]:
    """Return images of a step's first part as the model sees them, augmented and mixed.

    "images": uint8 (N, size, size, channels); "captions": the class of each, or classes and shares.
    """
    # The step itself still needs the batch, which a task may mix in place.
    images, labels = (tensor.clone() for tensor in parts_of(run, step, batch)[0])
    seed_step(run.config, run.ranks, step)  # as the step does: so the same images are mixed
    mixed, targets = run.task.mix(run.config, images, labels, len(run.data.classes))
    shown = mixed[:FIRST_IMAGES].float()
    if max(shown.shape[2:]) > LONGEST_SIDE:
        shown = interpolate(shown, (LONGEST_SIDE, LONGEST_SIDE), mode="area")
    classes = [name[:LONGEST_NAME] for name in run.data.classes]
    captions = []
    for target in targets[:FIRST_IMAGES]:
        if target.ndim == 0:
            captions.append(classes[int(target)])
            continue
        shares, numbers = (top.tolist() for top in target.topk(min(2, len(target))))
        pairs = [pair for pair in zip(shares, numbers, strict=True) if pair[0] > 0.005]
        captions.append(", ".join(f"{classes[number]} {share:.0%}" for share, number in pairs))
    pixels = shown.round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy()
    return {"images": pixels, "captions": captions}
