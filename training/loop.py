"""The loop that all tasks share: rate, step, report; evaluate, save; at the end, final.pt.

A step's gradient is the sum over the samples of all ranks divided by the global batch, which is a
constant. DDP divides the sum of the ranks' gradients by their number; the loss makes up for that,
and is itself never reduced before `backward`.
"""

from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_

from training.config import Config, as_plain
from training.counts import Counter, Counts, as_counts, correct_predictions, evaluation_sums
from training.data.first_batch import all_begun
from training.data.open import Data, open_data
from training.data.samples import Batch
from training.data.transforms import Transforms
from training.data.validation import VALIDATION
from training.device import Compute, seed_step, set_up
from training.monitor.stragglers import Waits
from training.profile import PeriodicExchange, measure
from training.ranks import Ranks, joined, without_exchange
from training.run import checkpoint
from training.run.folder import own_folder
from training.run.ledger import Ledger
from training.run.progress import report_start
from training.run.recorder import RunRecorder
from training.run.resume import Earlier, earlier_run
from training.run.weights import load_weights
from training.schedule import Schedule, due, make_schedule
from training.state import TrainingState
from training.stop_requests import SAVE, StopRequests
from training.sync.comm_hooks import gradient_buffer_like, register_comm_hook
from training.sync.local_sgd import average_parameters, is_local_step, meet_when_due
from training.sync.uneven_inputs import UnevenInputs, statistics
from training.task import Task

GRID_PICTURES = 24


@dataclass(frozen=True)
class TrainingRun:
    """What does not change while a run lasts."""

    task: Task
    config: Config
    ranks: Ranks
    wishes: StopRequests
    compute: Compute
    data: Data
    schedule: Schedule
    earlier: Earlier | None


def run(task: Task, config: Config) -> int:
    """Train as one rank of the world that torchrun describes; the exit code."""
    report_start()
    with joined(config) as ranks, StopRequests(config.save_minutes) as wishes:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)
        if earlier:
            config = earlier.with_batch(config)
        data = open_data(
            config, ranks, partial(task.transforms, config), task.name, task.synthetic_classes
        )
        schedule = make_schedule(config, data.epoch_steps, data.batch / config.batch_size)
        return train(TrainingRun(task, config, ranks, wishes, compute, data, schedule, earlier))


def train(run: TrainingRun) -> int:
    """Train to the end (0), or until a signal asks to stop (128 + its number)."""
    model = run.task.model(run.config, len(run.data.classes))
    state = TrainingState(run.compute.placed(model), run.config)
    with begin(run, state) as record:
        return epochs(run, state, record)


def epochs(run: TrainingRun, state: TrainingState, record: RunRecorder) -> int:
    """The loop itself: from where the state is to the end, or to a signal."""
    config, ranks, schedule = run.config, run.ranks, run.schedule
    model = ranks.ddp(state.model)
    register_comm_hook(model, config, schedule.steps, state.step)
    tail = tail_of(run, model, state, record)
    counter = Counter(ranks.device)
    waits = Waits(config.straggler_steps, state.model, state.optimizer, ranks)

    batches = all_begun(run.data.training(state.step), ranks, config.first_batch_seconds)
    for epoch in range(state.epoch, config.epochs):
        transforms = run.task.transforms(config, epoch)
        epoch_end = (epoch + 1) * schedule.epoch_steps
        record.train()
        for batch in waits.watched(islice(batches, epoch_end - state.step)):
            rate = state.set_rate(schedule.rate(state.step))
            step_together(run, state, tail, batch, transforms, counter)
            record.trained(state.step, batch)
            if due(state.step, schedule.log, epoch_end):
                record.measured(state.step, as_counts(ranks.all_reduce_sum(counter.take())), rate)
                record.waited(state.step, waits.take())
            wish = ranks.all_reduce_max(run.wishes.wish)
            saves = wish or due(state.step, config.save_steps, 0)  # an epoch's end has its own
            meet_when_due(config, ranks, state, epoch_end, bool(saves))
            if saves:
                wish = save(run, state, record)
            if wish > SAVE:
                return 128 + wish

        trained = record.epoch_counts()
        judge = run.data.judges and due(state.step, schedule.evaluate, schedule.steps)
        judged = evaluate(run, state, transforms, record) if judge else None
        wish = ranks.all_reduce_max(run.wishes.wish)
        best = False
        if wish <= SAVE:  # else the evaluation may be cut short, and is repeated after a resume
            best = state.epoch_done(judged)
            record.epoch_done(state, trained, judged)
        if wish or best or due(state.step, schedule.save, schedule.steps):
            wish = save(run, state, record, best)
        if wish > SAVE:
            return 128 + wish

    speed = None
    if config.synthetic:
        record.progress.phase("measure")
        sent = gradient_buffer_like(model, config)
        rare = PeriodicExchange(partial(average_parameters, ranks, state), config.local_sgd_steps)
        apart = rare if config.local_sgd_steps else None
        speed = measure(state, model, transforms, run.compute, ranks, batches, sent, apart)
        record.say(speed.table())
    record.finish(state, predictions(run, state) if ranks.first else None, speed)
    return 0


def save(run: TrainingRun, state: TrainingState, record: RunRecorder, best: bool = False) -> int:
    """Save a checkpoint; what the ranks wish then: whoever wants the end waits for no other."""
    record.save(state, best)
    run.wishes.acknowledge()
    return run.ranks.all_reduce_max(run.wishes.wish)


def begin(run: TrainingRun, state: TrainingState) -> RunRecorder:
    """Open the run's folder, and take up the weights or the checkpoint that the settings name."""
    config, ranks = run.config, run.ranks
    settings = as_plain(config)
    described = {
        "task": run.task.name,
        "classes": list(run.data.classes),
        "preparation": asdict(run.task.transforms(config, config.epochs - 1)),
        "config": settings,
    }
    identity = checkpoint.identity(
        described, state.model, run.data.digest, run.data.batch, run.data.epoch_steps
    )
    folder = own_folder(run.task.name, config.run_folder, ranks)
    ledger = Ledger(folder.ledger, ranks, run.data.rows, run.data.epoch_steps)
    record = RunRecorder(
        folder, config, run.schedule, ranks, described, identity, ledger, run.data.judges
    )
    if run.earlier:
        checkpoint.check(identity, run.earlier.content, run.earlier.path)
        state.load_state_dict(run.earlier.content["state"])
    record.begin(state.step, run.earlier)
    if config.earlier_attempts and not run.earlier:
        record.say("no earlier attempt has saved anything: begins anew")
    if config.weights and not run.earlier:
        record.say(load_weights(state.model, Path(config.weights)))
        state.start_average()
    if not run.data.judges:
        record.say(
            f"{config.data} has no split {VALIDATION!r}: trains without evaluation;"
            " python -m convert can hold one out"
        )
    if config.scale_lr:
        record.say(
            f"rate {config.lr:g} for {config.batch_size} pictures, {run.schedule.peak:g}"
            f" for {run.data.batch} (--scale-lr)"
        )
    return record


def tail_of(
    run: TrainingRun, model: nn.Module, state: TrainingState, record: RunRecorder
) -> UnevenInputs:
    """How the run gets through the last steps of its epochs; said, if it is not the usual way."""
    tail = UnevenInputs(run.ranks, model, state)
    if remark := tail.remark(run.data.samples_in(run.schedule.epoch_steps - 1)):
        record.say(remark)
    return tail


def step_together(
    run: TrainingRun,
    state: TrainingState,
    tail: UnevenInputs,
    batch: Batch,
    transforms: Transforms,
    counter: Counter,
) -> None:
    """A step of all ranks, of which some may have no pictures at the end of an exact epoch."""
    with tail.at(run.data.samples_in(state.step)):
        if tail.computes(len(batch.labels) + batch.skipped):
            counter.add(step(run, state, tail.model, batch, transforms), batch)


def step(
    run: TrainingRun, state: TrainingState, model: nn.Module, batch: Batch, transforms: Transforms
) -> torch.Tensor:
    """One step of the optimiser; the sums of loss and right answers, still on the device."""
    config, ranks = run.config, run.ranks
    seed_step(config, ranks, state.step)
    share = ranks.world / run.data.batch  # DDP divides by the world
    sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    largest = -(-run.data.samples_in(state.step) // ranks.world)  # of the ranks' batches
    count = -(-largest * config.grad_accum_steps // config.batch_size)  # the same on all of them
    parts = list(zip(*(part.tensor_split(count) for part in batch[:2]), strict=True))
    for number, (images, labels) in enumerate(parts, start=1):
        local = number < len(parts) or is_local_step(config, run.schedule.steps, state.step)
        with (
            without_exchange(model) if local else nullcontext(),
            statistics(state.model, len(labels)),
        ):
            seen, wanted = run.task.mix(config, images, labels, len(run.data.classes))
            answers = run.compute.answers(model, transforms, seen)
            loss = cross_entropy(
                answers, wanted, reduction="sum", label_smoothing=config.label_smoothing
            )
            torch.autograd.backward(loss * share)
        sums += torch.stack([loss.detach(), correct_predictions(answers, labels, 1)])
    if config.clip_grad:
        clip_grad_norm_(model.parameters(), config.clip_grad)
    state.advance()
    return sums


@torch.no_grad()
def evaluate(
    run: TrainingRun, state: TrainingState, transforms: Transforms, record: RunRecorder
) -> Counts:
    """Counts over the validation set, all ranks together; over less once a rank is to end."""
    record.progress.phase("evaluate")
    model = state.judged
    run.ranks.broadcast_buffers(model)
    model.eval()
    counter = Counter(run.ranks.device)
    for number, batch in enumerate(run.data.evaluation(), start=1):
        if len(batch.labels):
            answers = run.compute.answers(model, transforms, batch.images)
            counter.add(evaluation_sums(answers, batch.labels), batch)
        record.progress.evaluated(number)
        if run.wishes.ending:
            break
    state.model.train()
    return as_counts(run.ranks.all_reduce_sum(counter.sums))


@torch.no_grad()
def predictions(run: TrainingRun, state: TrainingState) -> dict[str, Any] | None:
    """Some validation pictures, and what the model says about each."""
    batch = run.data.grid(GRID_PICTURES)
    if batch is None:
        return None
    transforms = run.task.transforms(run.config, run.config.epochs - 1)
    images = batch.images.to(run.ranks.device)
    answers = run.compute.answers(state.judged.eval(), transforms, images)
    probability, predicted = answers.softmax(1).max(1)
    return {
        "images": batch.images.permute(0, 2, 3, 1).numpy(),  # uint8 (N, size, size, channels)
        "labels": batch.labels.numpy(),
        "predicted": predicted.cpu().numpy(),
        "probability": probability.cpu().numpy(),
        "classes": list(run.data.classes),
    }
