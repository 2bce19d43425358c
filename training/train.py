"""Train an image classifier: loop, step, report, evaluate, save; read from top to bottom.

The position of a run is one number, the step: the learning rate, the samples, their augmentation
and random numbers follow from it, so that a checkpoint needs no more than `TrainingState`. A run
has one stage, or two with --head-epochs, which train different layers (training/schedule.py).

The gradient of a step is the sum over the samples of all ranks divided by the global batch, which
is constant. DDP divides the sum of the ranks' gradients by their number; the loss is scaled to
compensate for that, and is never reduced before `backward`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import replace
from itertools import chain, islice

import torch
from torch.nn.utils import clip_grad_norm_

from rackrun.contract import phases
from rackrun.errors import Problem
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.data.ring import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import seed_step
from rackrun.training.divergence import not_finite
from rackrun.training.dry_step import require_gradients
from rackrun.training.loss import summed_loss
from rackrun.training.prefetch import prefetch
from rackrun.training.ranks import is_of_exchange, text_of_exchange
from rackrun.training.results import training_pictures, write_grid, write_results
from rackrun.training.save_while_hung import saves_while_hung
from rackrun.training.schedule import Stage, due
from rackrun.training.scores import Scores, Table
from rackrun.training.setup import begin, started
from rackrun.training.step_times import COMPUTE, Times
from rackrun.training.stop_requests import SAVE
from rackrun.training.stragglers import waiting_in
from rackrun.training.task import PROBABILITIES, Task, are_probabilities, check_logits
from rackrun.training.trace import trace_remark, traced
from rackrun.training.training_run import TrainingRun
from rackrun.training.uneven_inputs import norms_of_one_image, require_join, taken_by_all
from rackrun.units import plural


def run(task: Task, config: Config) -> int:
    """Train as one rank of the world that torchrun describes; return the exit code."""
    with started(task, config) as run:
        return train(run)


def train(run: TrainingRun) -> int:
    """Train to the end (0), or until a signal asks to stop (128 + its number)."""
    with run.log, run.checkpoints:
        begin(run)
        try:
            with run.data.cache.filling():
                # A signal while caches fill ends the run before a step is taken.
                if run.config.prefetch and (request := prefetch(run)):
                    return request
                with saves_while_hung(run):
                    # Closed, so that loader workers end here, not when garbage is collected.
                    with closing(remaining_batches(run)) as batches:
                        request = train_epochs(run, batches)
                    run.checkpoints.wait()
                    if not request:
                        finish(run)
                    return request
        except (RuntimeError, OSError) as error:
            if run.ranks.world == 1 or not is_of_exchange(error):
                raise
            # On a GPU, steps that are counted here may not have been computed.
            if run.ranks.device.type == "cpu":
                # Another rank has failed: a restart goes on from here.
                run.checkpoints.keep_step(run.state)
            if isinstance(error, OSError):  # the user's own code may talk to servers
                raise
            raise Problem(
                f"an exchange with other ranks failed: {text_of_exchange(error)}"
            ) from error


def remaining_batches(run: TrainingRun) -> Generator[Batch]:
    """Return this rank's batches of all steps that are left, whose trace is written if asked for.

    One iterator for the whole run: loader workers read ahead across the end of an epoch.
    """
    steps = run.config.profile_steps
    if steps and run.ranks.first:
        return traced(_batches(run), steps, run.state.step, run.log.folder.trace)
    return _batches(run)


def _batches(run: TrainingRun) -> Generator[Batch]:
    batches = run.log.waits_reported(run.data.training(run.state.step))
    first = next(batches)
    # No step is taken before every rank has a batch: a host that cannot read its data ends the run
    # with its own error, and not as one that others wait for in the middle of their first step.
    run.ranks.all_reduce_max(0)
    for batch in chain([first], batches):
        run.log.note_rows(run.state.step, batch)
        yield batch


def train_epochs(run: TrainingRun, batches: Iterator[Batch]) -> int:
    """Train the remaining epochs; return the request that ends the run early, or 0."""
    config, state, log, schedule = run.config, run.state, run.log, run.schedule
    part_size = config.batch_size // config.grad_accum_steps
    while state.epoch < config.epochs and not state.exhausted:
        if run.stage != (stage := schedule.stage(state.epoch)):
            enter(run, stage)
        # New ones for each epoch: images may grow with the epochs.
        transforms = run.task.transforms(config, state.epoch)
        epoch_end = (state.epoch + 1) * schedule.epoch_steps
        log.train()
        for batch in run.times.watched(islice(batches, epoch_end - state.step)):
            run.exchange.begin()  # of requests to save or to stop: travels while this step computes
            # A function of the step, so that a run that resumes has nothing to restore.
            state.set_lr(schedule.lr(state.step))
            parts, fewest = run.steps.parts(state.step, part_size)
            with compiling(run, (stage, batch.images.shape[2:])), shared(run, fewest):
                step(run, batch, parts[run.ranks.rank], transforms)
            # From here on, state.step is the number of steps that are done.
            log.step(state.step)
            if schedule.logs(state.step, epoch_end):
                log_interval(run)
            request = run.exchange.request
            saves = request >= SAVE or due(state.step, config.save_steps, 0)  # and in end_epoch
            if request := save_or_stop(run, request, saves):
                return request
        if request := end_epoch(run):
            return request
    return 0


def enter(run: TrainingRun, stage: Stage) -> None:
    """Train the layers of a stage from here on."""
    state, ranks = run.state, run.ranks
    run.stage = stage
    # First: the clock of steps and DDP look at the weights that train.
    state.freeze(stage.frozen, len(run.data.classes))
    last_samples = run.steps.samples_in(run.schedule.epoch_steps - 1)
    require_join(state.model, last_samples, ranks.world)
    run.times.watch(state.model, state.optimizer)
    run.ddp = ranks.ddp(state.model, run.config.grad_compression)


def compiling(run: TrainingRun, kind: object) -> AbstractContextManager[None]:
    """Report the phase "compile" at the first batch of a kind, for which torch compiles.

    That may take minutes. A batch of one image compiles anew, too, and is not reported.
    """
    if not run.compute.compile or kind in run.compiled:
        return nullcontext()
    run.compiled.add(kind)
    return run.log.during(phases.COMPILE)


def shared(run: TrainingRun, fewest: int) -> AbstractContextManager[None]:
    """Return the context of a step, whose parts have `fewest` samples or more on any rank."""
    if not run.ddp:
        return nullcontext()
    samples = run.steps.samples_in(run.state.step)
    return taken_by_all(run.ddp, run.state, run.ranks, samples, fewest)


def step(run: TrainingRun, batch: Batch, parts: int, transforms: Transforms) -> None:
    """Take a step of the optimizer, and count its loss and correct predictions."""
    config, state, classes = run.config, run.state, len(run.data.classes)
    if not len(batch.labels) + batch.skipped:
        # The end of an exact epoch: the ranks that have samples compute the step, and hand over
        # their state as Join ends.
        state.is_whole = False
        run.exchange.complete()
        return
    # By the step, so that a run that resumes draws what it would have drawn.
    seed_step(config, run.ranks, state.step)
    share = run.ranks.world / run.steps.batch  # DDP divides by the world
    model, sums = run.ddp or state.model, torch.zeros_like(run.sums)
    for number, (images, labels) in enumerate(batch.split(parts), start=1):
        # Only the last part exchanges gradients; DDP prepares for that during forward.
        own = run.ddp.no_sync() if run.ddp and number < parts else nullcontext()
        is_one = len(labels) == 1
        norms = norms_of_one_image(state.model, config.compile) if is_one else nullcontext()
        with own, norms:
            mixed, targets = images, labels
            if run.task.mix:
                mixed, targets = run.task.mix(config, images, labels, classes)
            logits = run.compute.logits(model, transforms.normalized, mixed)
            if len(labels) and run.is_unseen:
                look_at_first(run, mixed, targets, logits)
            # A sum over samples, then a constant: means of uneven parts weigh their samples unlike.
            loss = summed_loss(logits, targets, config, run.class_weights)
            # Elsewhere this would wait for the GPU; there, the next line of metrics looks.
            is_known = run.ranks.device.type == "cpu" or not state.step
            if is_known and not loss.detach().isfinite():
                raise not_finite(run.compute, state, batch, transforms.normalized)
            torch.autograd.backward(state.scaler.scale(loss * share))
        # By the labels from before mixing: of a mixed image only one class counts as right.
        right = (logits.detach().argmax(1) == labels).sum()
        sums += torch.stack([loss.detach().double(), right.double()])
    if run.ddp:
        require_gradients(state.model, state.optimizer, config)
    # The last wait for another rank: from here on the step is taken as a whole, or not at all.
    run.exchange.complete()
    if config.clip_grad:
        # The limit is one of true gradients, not of those that a float16 loss scales up.
        state.scaler.unscale_(state.optimizer)
        clip_grad_norm_(state.model.parameters(), config.clip_grad)
    with state.changing():
        state.advance()
    run.sums += sums
    run.samples += len(batch.labels)
    run.skipped += batch.skipped


def look_at_first(
    run: TrainingRun, mixed: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor
) -> None:
    """Look at the first images that this rank computes: their outputs, and for the report.

    UsageError for a model with other outputs than one of each class.
    """
    run.is_unseen = False
    check_logits(logits, len(mixed), len(run.data.classes))
    if not run.state.step and are_probabilities(logits):
        run.log.say(PROBABILITIES)
    path = run.log.folder.first_batch
    if run.ranks.first and not run.config.synthetic and not path.exists():
        write_grid(path, training_pictures(mixed, targets, run.data.classes))


def log_interval(run: TrainingRun) -> None:
    """Record the steps since the last time, of all ranks."""
    # Exchanges: every rank comes here after the same steps, also one that writes nothing. Here the
    # rank waits for the device, which is why `logs` is true only now and then.
    state, ranks = run.state, run.ranks
    waited = run.times.data_seconds() / ranks.world
    own = [*run.sums.tolist(), run.samples, run.skipped, waited]
    run.sums.zero_()
    run.samples = run.skipped = 0
    total = ranks.all_reduce_sum(torch.tensor(own, dtype=torch.float64)).tolist()
    loss, right, samples, skipped, data_seconds = total
    counts = Counts(
        loss,
        top1=int(right),
        samples=int(samples),
        skipped=int(skipped),
        data_seconds=data_seconds,
        skipped_steps=state.take_skipped_steps(),
    )
    lr = run.schedule.lr(state.step - 1) * state.improvement.lr_factor
    run.log.interval(state.step, counts, lr, state.loss_scale)
    if (times := run.times.of_all_ranks()) is not None:
        compare_ranks(run, times)


def compare_ranks(run: TrainingRun, times: Times) -> None:
    """Record who waited for whom in the last steps; give fast ranks more images."""
    config, state, log, balance = run.config, run.state, run.log, run.balance
    if balance and balance.recut(state.step, times[:, :, COMPUTE]):
        run.checkpoints.images_by_rank = balance.counts
        log.shares(run.steps.newest_cut.step, balance.counts)
    if waiting := waiting_in(times, run.ranks):
        remedy = ""
        if waiting.why == "compute" and balance:
            remedy = balance.remedy(waiting.rank)
        elif waiting.why == "compute" and config.balance == "even" and not config.synthetic:
            remedy = "--balance auto gives it fewer images"
        log.waits(state.step, replace(waiting, remedy=remedy))


def end_epoch(run: TrainingRun) -> int:
    """Evaluate and save if due; return the request that ends the stage early, or 0."""
    state, schedule = run.state, run.schedule
    for model in state.models:
        run.ranks.share_statistics(model)  # each rank's batch norms have seen other images
    # One predicate for all that is due, true at the last step: no run ends without a result.
    evaluates = run.data.has_evaluation and due(state.step, schedule.evaluate, schedule.steps)
    counts = evaluate(run).counts if evaluates else None
    request, is_best = run.exchange.agreed_now(), False
    if request <= SAVE:  # otherwise the evaluation may be incomplete; a resumed run repeats it
        is_best = state.finish_epoch(counts)
        run.log.epoch(state, counts)
    saves = request >= SAVE or is_best or due(state.step, schedule.save, schedule.steps)
    return save_or_stop(run, request, saves or state.exhausted, is_best)


@torch.no_grad()
def evaluate(run: TrainingRun) -> Scores:
    """Return the scores of the validation set; incomplete if a rank is to stop."""
    config, state, log = run.config, run.state, run.log
    log.phase(phases.EVALUATE)
    normalized = run.task.transforms(config, state.epoch).normalized
    model, table = state.evaluated.eval(), Table(len(run.data.classes))
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            with compiling(run, batch.images.shape[2:]):
                logits = run.compute.logits(model, normalized, batch.images, config.eval_flip)
            table.add(logits, batch)
        else:
            table.skip(batch)
        log.report(epoch_step=number)
        if run.requests.ending:  # a stop does not wait for the rest of the validation set
            break
    state.train()
    run.scores = table.scores(run.ranks)
    log.say(run.scores.remark)
    return run.scores


def save_or_stop(run: TrainingRun, request: int, saves: bool, is_best: bool = False) -> int:
    """Save a checkpoint if due; return the request that ends the stage early, or 0."""
    run.checkpoints.report_ended()
    if saves:
        run.checkpoints.save(run.state, is_best)
        run.requests.acknowledge()
        request = run.exchange.agreed_now()  # a save takes long: a signal may have arrived
    return 0 if request == SAVE else request


def finish(run: TrainingRun) -> None:
    """Write final.pt, and the report with images and predictions."""
    state, log = run.state, run.log
    if steps := run.config.profile_steps:
        log.say(trace_remark(steps, log.folder.trace))
    if state.exhausted:
        log.say(
            f"ends after epoch {state.epoch}: {plural(state.improvement.stale, 'evaluation')}"
            " without a better one (--patience)"
        )
    if run.config.final == "best":
        run.checkpoints.restore_best(state)
    report = write_results(run) if run.ranks.first else ""
    log.finish(state.accuracy, report)
