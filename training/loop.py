"""The training loop of all tasks: lr, step, log; evaluate, save; at the end, final.pt.

A run has one stage, or two with --head-epochs, which train different layers (training/schedule.py).
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice

from rackrun.errors import UserCodeError
from rackrun.training.config import Config
from rackrun.training.data.samples import Batch
from rackrun.training.dry_step import unused_layers, why_unused
from rackrun.training.monitor.stragglers import StragglerMonitor
from rackrun.training.monitor.trace import StepTrace
from rackrun.training.phases.balance import Balance, begin_balance, remedy
from rackrun.training.phases.begin import begin, new_state
from rackrun.training.phases.evaluate import evaluate
from rackrun.training.phases.finish import finish
from rackrun.training.phases.prefetch import prefetch
from rackrun.training.phases.start import TrainingRun, started
from rackrun.training.phases.step import train_step, training_pictures
from rackrun.training.ranks import is_of_exchange
from rackrun.training.run.noted_rows import note_rows
from rackrun.training.run.recorder import RunRecorder
from rackrun.training.schedule import Stage, due
from rackrun.training.state import TrainingState
from rackrun.training.stop_requests import SAVE
from rackrun.training.sync.gradient_sync import GradientSync
from rackrun.training.sync.step_exchange import StepExchange
from rackrun.training.task import Task


def run(task: Task, config: Config) -> int:
    """Train as one rank of the world that torchrun describes; return the exit code."""
    with started(task, config) as opened:
        return train(opened)


def train(run: TrainingRun) -> int:
    """Train to the end (0), or until a signal asks to stop (128 + its number)."""
    state = new_state(run)
    with begin(run, state) as log, run.data.cache.filling():
        try:
            # A signal while caches fill ends the run before a step is taken.
            if run.config.prefetch and (request := prefetch(run, log)):
                return request
            return train_stages(run, state, log)
        except (RuntimeError, OSError) as error:
            if "Expected to have finished reduction" in str(error):  # DistributedDataParallel's
                unused = why_unused(unused_layers(state.model, set()), run.config)
                raise UserCodeError(unused or str(error)) from None
            # On a GPU, steps that are counted here may not have been computed.
            if run.ranks.device.type == "cpu" and is_of_exchange(error):
                # Another rank has failed: a restart goes on from here.
                log.checkpoints.keep_step(state)
            raise


def train_stages(run: TrainingRun, state: TrainingState, log: RunRecorder) -> int:
    """Train the remaining stages; return 0, or 128 + the number of a signal."""
    with (
        closing(StepTrace(run.config.profile_steps, log.folder.trace, run.ranks)) as trace,
        # Closed, so that loader workers end here, and not whenever garbage is collected.
        closing(trace.watched(run.batches(state.step, log.progress), state.step)) as batches,
    ):
        for stage in run.schedule.stages_from(state.epoch):
            # Before the monitor and DDP look at the weights: both take those that train.
            state.freeze(stage.frozen, len(run.data.classes))
            stragglers = StragglerMonitor(
                state.model,
                state.optimizer,
                run.ranks,
                times_each_step=run.config.balance == "auto",
            )
            with closing(stragglers):
                request = train_stage(run, state, log, stage, batches, stragglers)
            log.checkpoints.wait()
            if request:
                return request
        trace.close()
        log.remark(trace.remark())
        finish(run, state, log)
    return 0


def train_stage(
    run: TrainingRun,
    state: TrainingState,
    log: RunRecorder,
    stage: Stage,
    batches: Iterator[Batch],
    stragglers: StragglerMonitor,
) -> int:
    """Train the remaining epochs of a stage; return the request that ends it early, or 0."""
    config, schedule = run.config, run.schedule
    balance = begin_balance(run, state, log, stragglers) if config.balance == "auto" else None
    # A signal reaches ranks at different steps, and clocks differ. All ranks must do the same after
    # a step, so they agree on the strongest request during the steps.
    exchange = StepExchange(
        run.ranks, lambda: run.requests.pending, balance.sent if balance else list
    )
    # One for each stage: DDP waits for the gradients of all weights that trained when it was made.
    sync = GradientSync(config, run.ranks, state)
    log.remark(sync.remark(run.data.samples_in(schedule.epoch_steps - 1)))

    while state.epoch < stage.last and not state.exhausted:
        # New ones for each epoch: images may grow with the epochs.
        transforms = run.task.transforms(config, state.epoch)
        epoch_end = (state.epoch + 1) * schedule.epoch_steps
        log.train()
        # One iterator for the whole run: loader workers read ahead across the end of an epoch.
        for batch in stragglers.watched(islice(batches, epoch_end - state.step)):
            exchange.begin()  # travels while this step computes
            note_rows(log.folder.path, run.ranks, state.step, batch)
            # A function of the step, so that a run that resumes has nothing to restore.
            state.set_lr(schedule.lr(state.step))
            if log.shows_next_batch and len(batch.labels):
                log.write_first_batch(training_pictures(run, state.step, batch))
            with sync.step(run.data.samples_in(state.step), run.fewest_in_part(state.step)):
                train_step(run, state, sync, batch, transforms, exchange, log.sums)
            # From here on, state.step is the number of steps that are done.
            log.step(state.step)
            if balance and (cut := balance.next_cut(state.step, exchange.largest)):
                run.data.recut(cut)
                log.shares(cut.step, balance.counts)
            if schedule.logs(state.step, epoch_end):
                log_interval(run, state, log, stragglers, balance)
            request = exchange.request
            saves = request >= SAVE or due(state.step, config.save_steps, 0)  # and in end_epoch
            if request := save_or_stop(run, state, log, request, saves):
                return request
        if request := end_epoch(run, state, log):
            return request
    return 0


def log_interval(
    run: TrainingRun,
    state: TrainingState,
    log: RunRecorder,
    stragglers: StragglerMonitor,
    balance: Balance | None,
) -> None:
    """Record the steps since the last time, of all ranks."""
    # Exchanges: every rank comes here after the same steps, also one that writes nothing. Here the
    # rank waits for the device, which is why `logs` is true only now and then.
    counts, waiting = run.sum_over_ranks(log.sums.sums), stragglers.take()
    if waiting:
        waiting = replace(waiting, remedy=remedy(run.config, balance, waiting, state.step))
    lr = run.schedule.lr(state.step - 1) * state.improvement.lr_factor
    log.interval(state.step, counts, lr, waiting, state.loss_scale.take())


def end_epoch(run: TrainingRun, state: TrainingState, log: RunRecorder) -> int:
    """Evaluate and save if due; return the request that ends the stage early, or 0."""
    schedule = run.schedule
    for model in state.models:
        run.ranks.share_statistics(model)  # each rank's batch norms have seen other images
    # One predicate for all that is due, true at the last step: no run ends without a result.
    evaluates = run.data.has_evaluation and due(state.step, schedule.evaluate, schedule.steps)
    metrics = evaluate(run, state, log).counts if evaluates else None
    request, is_best = run.agreed_request(), False
    if request <= SAVE:  # otherwise the evaluation may be incomplete; a resumed run repeats it
        is_best = state.finish_epoch(metrics)
        log.epoch(state, metrics)
    saves = request >= SAVE or is_best or due(state.step, schedule.save, schedule.steps)
    return save_or_stop(run, state, log, request, saves or state.exhausted, is_best)


def save_or_stop(
    run: TrainingRun,
    state: TrainingState,
    log: RunRecorder,
    request: int,
    saves: bool,
    is_best: bool = False,
) -> int:
    """Save a checkpoint if due; return the request that ends the stage early, or 0."""
    if saves:
        log.checkpoints.save(state, is_best)
        run.requests.acknowledge()
        request = run.agreed_request()  # a save takes long, and a signal may have arrived during it
    return 0 if request == SAVE else request
