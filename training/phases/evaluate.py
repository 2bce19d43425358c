"""The evaluation at the end of an epoch, by all ranks together."""

import torch

from rackrun.contract import phases
from training.counts import Confusion, Counter, Counts, HighestLosses, evaluation_sums
from training.phases.pictures import GRID_IMAGES
from training.phases.start import TrainingRun
from training.run.recorder import RunRecorder
from training.state import TrainingState


@torch.no_grad()
def evaluate(run: TrainingRun, state: TrainingState, log: RunRecorder) -> Counts:
    """Return the counts of all ranks over the validation set; incomplete if a rank is to stop."""
    log.progress.phase(phases.EVALUATE)
    transforms = run.task.transforms(run.config, state.epoch)
    model = state.evaluated
    model.eval()
    counter = Counter(run.ranks.device)
    confusion = Confusion(len(run.data.classes), run.ranks.device)
    losses = HighestLosses()
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            flip = run.config.eval_flip
            logits = run.compute.logits(model, transforms.normalised, batch.images, flip)
            counter.add([evaluation_sums(logits, batch.labels)], len(batch.labels), batch.skipped)
            confusion.add(logits, batch.labels)
            losses.add(logits, batch.labels, batch.rows)
        log.progress.evaluated(number)
        if run.requests.ending or (run.membership and run.membership.is_broken):
            break
    run.check_group()  # what was counted until then is no evaluation
    state.train()
    log.results.evaluated(
        run.ranks.all_reduce_sum(confusion.counts),
        confusion.classes,
        losses.rows_of_all(run.ranks, GRID_IMAGES),
    )
    return run.sum_over_ranks(counter.sums)
