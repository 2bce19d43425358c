"""The loop that all tasks share: lr, step, log; evaluate, save; at the end, final.pt.

A run is one stage or two (--head-epochs), in which other layers train (training/schedule.py).

A step's gradient is the sum over the samples of all ranks divided by the global batch, which is a
constant. DDP divides the sum of the ranks' gradients by their number; the loss makes up for that,
and is itself never reduced before `backward`.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from rackrun.units import plural
from training.begin import begin
from training.config import Config
from training.counts import Confusion, Counter, Counts, correct_predictions, evaluation_sums
from training.data.samples import Batch
from training.data.transforms import Transforms
from training.device import seed_step
from training.models.dropout import with_dropout
from training.models.recomputed import with_recomputed_blocks
from training.monitor.profile import measure
from training.monitor.stragglers import StragglerMonitor
from training.monitor.trace import StepTrace
from training.run.compilation import compilation_reported
from training.run.recorder import RunRecorder
from training.run.stop_requests import SAVE
from training.schedule import Stage, due
from training.start import TrainingRun, started
from training.state import TrainingState
from training.sync.gradient_sync import GradientSync
from training.task import Task

GRID_IMAGES = 24


def run(task: Task, config: Config) -> int:
    """Train as one rank of the world that torchrun describes; return the exit code."""
    with started(task, config) as opened:
        return train(opened)


def train(run: TrainingRun) -> int:
    """Train to the end (0), or until a signal asks to stop (128 + its number)."""
    model = with_dropout(run.task.model(run.config, len(run.data.classes)), run.config.dropout)
    model = with_recomputed_blocks(model, run.config.gradient_checkpointing)
    state = TrainingState(
        run.compute.placed(model), run.config, float16=run.compute.precision == "fp16"
    )
    with begin(run, state) as log, compilation_reported(log.progress, run.compute.compile):
        return train_stages(run, state, log)


def train_stages(run: TrainingRun, state: TrainingState, log: RunRecorder) -> int:
    """Train from where the state is to the end (0), or until a signal (128 + its number)."""
    trace = StepTrace(run.config.profile_steps, log.folder.trace, run.ranks)
    batches = trace.watched(run.batches(state.step), state.step)
    for stage in run.schedule.stages_from(state.epoch):
        if signal := train_stage(run, state, log, stage, batches):
            trace.close()
            return 128 + signal
    trace.close()
    log.remark(trace.remark())
    finish(run, state, log, batches)
    return 0


def train_stage(
    run: TrainingRun,
    state: TrainingState,
    log: RunRecorder,
    stage: Stage,
    batches: Iterator[Batch],
) -> int:
    """Train the epochs of a stage that are left; return the signal that asks to stop, or 0."""
    config, schedule = run.config, run.schedule
    state.freeze(stage.frozen)
    sync = GradientSync(config, run.ranks, state, schedule.steps)
    log.remark(sync.remark(run.data.samples_in(schedule.epoch_steps - 1)))
    sums = Counter(run.ranks.device)  # stay on the device: reading them would wait for the step
    stragglers = StragglerMonitor(config.straggler_steps, state.model, state.optimizer, run.ranks)

    while state.epoch < stage.last and not state.exhausted:
        transforms = run.task.transforms(config, state.epoch)
        epoch_end = (state.epoch + 1) * schedule.epoch_steps
        log.train()
        for batch in stragglers.watched(islice(batches, epoch_end - state.step)):
            # A signal reaches ranks at different steps, and clocks differ. All ranks must do the
            # same after a step, so they agree on the strongest request while they compute it.
            strongest_request = run.exchange_requests()
            lr = state.set_lr(schedule.lr(state.step))
            with sync.step(run.data.samples_in(state.step), run.parts_in(state.step)):
                train_step(run, state, sync, batch, transforms, sums)
            log.step(state.step, batch.rows)
            if due(state.step, schedule.log, epoch_end):
                counts, scaling = run.sum_over_ranks(sums.take()), state.loss_scale.take()
                log.interval(state.step, counts, lr, stragglers.take(), scaling)
            request = strongest_request()
            saves = bool(request) or due(state.step, config.save_steps, 0)  # epochs' ends: below
            sync.average_weights(epoch_end, before_save=saves)
            if signal := save_or_stop(run, state, log, request, saves):
                return signal
        if signal := end_epoch(run, state, log, transforms):
            return signal
    stragglers.close()
    return 0


def end_epoch(
    run: TrainingRun, state: TrainingState, log: RunRecorder, transforms: Transforms
) -> int:
    """Evaluate and save where that is due; return the signal that asks to stop, 0 to go on."""
    schedule = run.schedule
    evaluates = run.data.judges and due(state.step, schedule.evaluate, schedule.steps)
    metrics = evaluate(run, state, transforms, log) if evaluates else None
    request, is_best = run.agreed_request(), False
    if request <= SAVE:  # else the evaluation may be cut short, and is repeated after a resume
        is_best = state.finish_epoch(metrics)
        log.epoch(state, metrics)
    saves = bool(request) or is_best or due(state.step, schedule.save, schedule.steps)
    return save_or_stop(run, state, log, request, saves or state.exhausted, is_best)


def save_or_stop(
    run: TrainingRun,
    state: TrainingState,
    log: RunRecorder,
    request: int,
    saves: bool,
    is_best: bool = False,
) -> int:
    """Save a checkpoint if that is due; return the signal that asks to stop, 0 to go on."""
    if saves:
        log.save(state, is_best)
        run.requests.acknowledge()
        request = run.agreed_request()  # a save takes long: a signal may have come meanwhile
    return request if request > SAVE else 0


def train_step(
    run: TrainingRun,
    state: TrainingState,
    sync: GradientSync,
    batch: Batch,
    transforms: Transforms,
    sums: Counter,
) -> None:
    """Take a step of the optimizer, and count its loss and right answers."""
    if not sync.has_work(len(batch.labels) + batch.skipped):
        return  # the end of an exact epoch: the ranks that have samples compute the step
    config, ranks = run.config, run.ranks
    seed_step(config, ranks, state.step)
    share = ranks.world / run.data.batch  # DDP divides by the world
    step_sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    parts = list(parts_of(run, state.step, batch))
    for number, (images, labels) in enumerate(parts, start=1):
        with sync.part(len(labels), is_last=number == len(parts)):
            seen, wanted = run.task.mix(config, images, labels, len(run.data.classes))
            answers = run.compute.answers(sync.model, transforms, seen)
            loss = cross_entropy(
                answers,
                wanted,
                weight=run.class_weights(answers),
                reduction="sum",
                label_smoothing=config.label_smoothing,
            )
            state.loss_scale.backward(loss * share)
        step_sums += torch.stack([loss.detach(), correct_predictions(answers, labels, 1)])
    if config.clip_grad:
        state.loss_scale.unscale(state.optimizer)
        clip_grad_norm_(sync.model.parameters(), config.clip_grad)
    state.advance()
    sums.add(step_sums, batch)


def parts_of(
    run: TrainingRun, step: int, batch: Batch
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the images and labels of a batch in the parts that are computed one after the other."""
    count = run.parts_in(step)
    return zip(batch.images.tensor_split(count), batch.labels.tensor_split(count), strict=True)


@torch.no_grad()
def evaluate(
    run: TrainingRun, state: TrainingState, transforms: Transforms, log: RunRecorder
) -> Counts:
    """Return the counts over the validation set, of all ranks; less once a rank is to stop."""
    log.progress.phase("evaluate")
    model = state.evaluated
    run.ranks.broadcast_buffers(model)  # each rank's batch norms have seen other images
    model.eval()
    counter = Counter(run.ranks.device)
    confusion = Confusion(len(run.data.classes), run.ranks.device)
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            flip = run.config.eval_flip
            answers = run.compute.answers(model, transforms, batch.images, flip)
            counter.add(evaluation_sums(answers, batch.labels), batch)
            confusion.add(answers, batch.labels)
        log.progress.evaluated(number)
        if run.requests.ending:
            break
    state.train()
    log.confused(run.ranks.all_reduce_sum(confusion.counts), confusion.classes)
    return run.sum_over_ranks(counter.sums)


def finish(
    run: TrainingRun, state: TrainingState, log: RunRecorder, batches: Iterator[Batch]
) -> None:
    """Write final.pt and the report; with --synthetic, say first where a step's time goes."""
    speed = None
    if run.config.synthetic:
        log.progress.phase("measure")
        transforms = run.task.transforms(run.config, run.config.epochs - 1)
        sync = GradientSync(run.config, run.ranks, state, run.schedule.steps)
        profile = measure(state, sync, transforms, run.compute, run.ranks, batches)
        log.say(profile.table())
        speed = profile.report()
    if state.exhausted:
        log.say(
            f"ends after epoch {state.epoch}: {plural(state.improvement.stale, 'evaluation')}"
            " without a better one (--patience)"
        )
    if run.config.final == "best":
        log.restore_best(state)
    log.finish(state, predictions(run, state) if run.ranks.first else None, speed)


@torch.no_grad()
def predictions(run: TrainingRun, state: TrainingState) -> dict[str, Any] | None:
    """Return some validation images and the model's answers to them, for the report."""
    batch = run.data.grid(GRID_IMAGES)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    answers = run.compute.answers(state.evaluated.eval(), transforms, images)
    probability, predicted = answers.softmax(1).max(1)
    return {
        "images": batch.images.permute(0, 2, 3, 1).numpy(),  # uint8 (N, size, size, channels)
        "labels": batch.labels.numpy(),
        "predicted": predicted.cpu().numpy(),
        "probability": probability.cpu().numpy(),
        "classes": list(run.data.classes),
    }
