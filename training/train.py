"""Train an image classifier: set up, loop, step, evaluate, save; read from top to bottom.

The position of a run is one number, the step: the learning rate, the samples, their augmentation
and random numbers follow from it, so that a checkpoint needs no more than `TrainingState`. A run
has one stage, or two with --head-epochs, which train different layers (training/schedule.py).

The gradient of a step is the sum over the samples of all ranks divided by the global batch, which
is constant. DDP divides the sum of the ranks' gradients by their number; the loss is scaled to
compensate for that, and is never reduced before `backward`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from itertools import islice

import torch
from torch.nn.utils import clip_grad_norm_

from rackrun.contract import phases
from rackrun.errors import Problem, UserCodeError
from rackrun.training.balance import begin_balance
from rackrun.training.begin import begin
from rackrun.training.config import Config
from rackrun.training.counts import Counts
from rackrun.training.data.loader import after_all, waits_reported
from rackrun.training.data.ring import Batch
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import seed_step
from rackrun.training.divergence import not_finite
from rackrun.training.dry_step import unused_layers, why_unused
from rackrun.training.loss import summed_loss
from rackrun.training.prefetch import prefetch
from rackrun.training.ranks import is_of_exchange, text_of_exchange
from rackrun.training.results import training_pictures, write_grid, write_results
from rackrun.training.save_while_hung import saves_while_hung
from rackrun.training.schedule import Stage, due, refuse_scale
from rackrun.training.scores import Scores, Table
from rackrun.training.setup import TrainingRun, started
from rackrun.training.step_times import COMPUTE, StepTimes, Times
from rackrun.training.stop_requests import SAVE, StepExchange
from rackrun.training.stragglers import Stragglers
from rackrun.training.task import PROBABILITIES, Task, are_probabilities, check_logits
from rackrun.training.trace import trace_remark, traced
from rackrun.training.uneven_inputs import norms_of_one_image, require_join, taken_by_all
from rackrun.units import plural


def run(task: Task, config: Config) -> int:
    """Train as one rank of the world that torchrun describes; return the exit code."""
    with started(task, config) as opened:
        return train(opened)


def train(run: TrainingRun) -> int:
    """Train to the end (0), or until a signal asks to stop (128 + its number)."""
    refuse_scale(run.config, run.data.steps.batch)
    with run.log, run.checkpoints:
        begin(run)
        try:
            with run.data.cache.filling():
                # A signal while caches fill ends the run before a step is taken.
                if run.config.prefetch and (request := prefetch(run)):
                    return request
                with saves_while_hung(run):
                    return Trainer(run).train()
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


class Trainer:
    """Trains a run, stage by stage, epoch by epoch, step by step."""

    def __init__(self, run: TrainingRun) -> None:
        self.task, self.config, self.ranks, self.data = run.task, run.config, run.ranks, run.data
        self.steps, self.schedule, self.state = run.data.steps, run.schedule, run.state
        self.compute, self.log, self.checkpoints = run.compute, run.log, run.checkpoints
        self.run = run
        self.scores: Scores | None = None  # of the last evaluation
        self.compiled: set[object] = set()  # kinds of batches
        self.part_size = run.config.batch_size // run.config.grad_accum_steps
        # Since the last line of the log: the sums of losses and of right answers, which stay on the
        # device, as to read them would wait for the step; and the numbers of samples.
        self.sums = torch.zeros(2, dtype=torch.float64, device=run.ranks.device)
        self.samples = self.skipped = 0
        self.stragglers, self.balance = Stragglers(run.ranks), begin_balance(run)
        has_none = not run.log.folder.first_batch.exists()
        self.shows_next_batch = has_none and run.ranks.first and not run.config.synthetic

    def train(self) -> int:
        """Train the remaining stages; return 0, or 128 + the number of a signal."""
        state, log = self.state, self.log
        # Closed, so that loader workers end here, and not whenever garbage is collected.
        with closing(self.batches()) as batches:
            for stage in self.schedule.stages_from(state.epoch):
                with self.prepared(stage):
                    request = self.train_stage(stage, batches)
                self.checkpoints.wait()
                if request:
                    return request
        if steps := self.config.profile_steps:
            log.say(trace_remark(steps, log.folder.trace))
        self.finish()
        return 0

    def batches(self) -> Generator[Batch]:
        """Return this rank's remaining batches, once every rank has read its first one."""
        # One iterator for the whole run: loader workers read ahead across the end of an epoch.
        start, log, steps = self.state.step, self.log, self.config.profile_steps
        batches = after_all(waits_reported(self.data.training(start), log), self.ranks)
        if steps and self.ranks.first:
            return traced(batches, steps, start, log.folder.trace)
        return batches

    @contextmanager
    def prepared(self, stage: Stage) -> Iterator[None]:
        """Make anew, for this context, what looks at the weights that train in a stage."""
        config, state, ranks = self.config, self.state, self.ranks
        # First: the clock of steps and DDP take the weights that train when they are made.
        state.freeze(stage.frozen, len(self.data.classes))
        self.times = StepTimes(state.model, state.optimizer, ranks)
        # A signal reaches ranks at different steps, and clocks differ. All ranks must do the same
        # after a step, so they agree on the strongest request during the steps.
        self.exchange = StepExchange(ranks, lambda: self.run.requests.pending)
        last_samples = self.steps.samples_in(self.schedule.epoch_steps - 1)
        require_join(state.model, last_samples, ranks.world)
        self.ddp = ranks.ddp(state.model, config.grad_compression)
        with closing(self.times):
            yield

    def train_stage(self, stage: Stage, batches: Iterator[Batch]) -> int:
        """Train the remaining epochs of a stage; return the request that ends it early, or 0."""
        config, state, log, schedule = self.config, self.state, self.log, self.schedule
        while state.epoch < stage.last and not state.exhausted:
            # New ones for each epoch: images may grow with the epochs.
            transforms = self.task.transforms(config, state.epoch)
            epoch_end = (state.epoch + 1) * schedule.epoch_steps
            log.train()
            for batch in self.times.watched(islice(batches, epoch_end - state.step)):
                self.exchange.begin()  # travels while this step computes
                log.note_rows(state.step, batch)
                # A function of the step, so that a run that resumes has nothing to restore.
                state.set_lr(schedule.lr(state.step))
                kind = (stage, batch.images.shape[2:])
                parts, fewest = self.steps.parts(state.step, self.part_size)
                with self.compiling(kind), self.taken_by_all(fewest):
                    self.step(batch, parts[self.ranks.rank], transforms)
                # From here on, state.step is the number of steps that are done.
                log.step(state.step)
                self.checkpoints.report_ended()
                if schedule.logs(state.step, epoch_end):
                    self.log_interval()
                request = self.exchange.request
                saves = request >= SAVE or due(state.step, config.save_steps, 0)  # and in end_epoch
                if request := self.save_or_stop(request, saves):
                    return request
            if request := self.end_epoch():
                return request
        return 0

    def taken_by_all(self, fewest: int) -> AbstractContextManager[None]:
        """Return the context of a step, whose parts have `fewest` samples or more on any rank."""
        if not self.ddp:
            return nullcontext()
        samples = self.steps.samples_in(self.state.step)
        return taken_by_all(self.ddp, self.state, self.ranks, samples, fewest)

    def compiling(self, kind: object) -> AbstractContextManager[None]:
        """Report the phase "compile" at the first batch of a kind, for which torch compiles.

        That may take minutes. A batch of one image compiles anew, too, and is not reported.
        """
        if not self.compute.compile or kind in self.compiled:
            return nullcontext()
        self.compiled.add(kind)
        return self.log.during(phases.COMPILE)

    def step(self, batch: Batch, parts: int, transforms: Transforms) -> None:
        """Take a step of the optimizer, and count its loss and correct predictions."""
        config, state, classes = self.config, self.state, len(self.data.classes)
        if not len(batch.labels) + batch.skipped:
            # The end of an exact epoch: the ranks that have samples compute the step, and hand over
            # their state as Join ends.
            state.is_whole = False
            self.exchange.complete()
            return
        # By the step, so that a run that resumes draws what it would have drawn.
        seed_step(config, self.ranks, state.step)
        share = self.ranks.world / self.steps.batch  # DDP divides by the world
        model, sums = self.ddp or state.model, torch.zeros_like(self.sums)
        for number, (images, labels) in enumerate(batch.split(parts), start=1):
            # Only the last part exchanges gradients; DDP prepares for that during forward.
            own = self.ddp.no_sync() if self.ddp and number < parts else nullcontext()
            is_one = len(labels) == 1
            norms = norms_of_one_image(state.model, config.compile) if is_one else nullcontext()
            with own, norms:
                mixed, targets = self.task.mix(config, images, labels, classes)
                if len(labels) and self.shows_next_batch:
                    self.show_first_batch(mixed, targets)
                logits = self.compute.logits(model, transforms.normalised, mixed)
                check_logits(logits, len(labels), classes)
                if not state.step and number == 1 and are_probabilities(logits):
                    self.log.say(PROBABILITIES)
                # A sum over samples, then a constant: means of uneven parts weigh their samples
                # unlike.
                loss = summed_loss(logits, targets, config, self.run.class_weights)
                # Elsewhere this would wait for the GPU; there, the next line of metrics looks.
                is_known = self.ranks.device.type == "cpu" or not state.step
                if is_known and not loss.detach().isfinite():
                    raise not_finite(self.compute, state, batch, transforms.normalised)
                torch.autograd.backward(state.scaler.scale(loss * share))
            # By the labels from before mixing: of a mixed image only one class counts as right.
            right = (logits.detach().argmax(1) == labels).sum()
            sums += torch.stack([loss.detach().double(), right.double()])
        # Also if it is skipped at times only: DDP would mix up what the ranks send.
        trained = (weight for group in state.optimizer.param_groups for weight in group["params"])
        if self.ranks.world > 1 and any(w.requires_grad and w.grad is None for w in trained):
            raise UserCodeError(why_unused(unused_layers(state.model, set()), config))
        # The last wait for another rank: from here on the step is taken as a whole, or not at all.
        self.exchange.complete()
        if config.clip_grad:
            # The limit is one of true gradients, not of those that a float16 loss scales up.
            state.scaler.unscale_(state.optimizer)
            clip_grad_norm_(state.model.parameters(), config.clip_grad)
        with state.changing():
            state.advance()
        self.sums += sums
        self.samples += len(batch.labels)
        self.skipped += batch.skipped

    def show_first_batch(self, mixed: torch.Tensor, targets: torch.Tensor) -> None:
        """Write training images of the first step for the report."""
        self.shows_next_batch = False
        grid = training_pictures(mixed, targets, self.data.classes)
        write_grid(self.log.folder.first_batch, grid)

    def log_interval(self) -> None:
        """Record the steps since the last time, of all ranks."""
        # Exchanges: every rank comes here after the same steps, also one that writes nothing. Here
        # the rank waits for the device, which is why `logs` is true only now and then.
        state, log, ranks = self.state, self.log, self.ranks
        waited = self.times.data_seconds() / ranks.world
        own = [*self.sums.tolist(), self.samples, self.skipped, waited]
        self.sums.zero_()
        self.samples = self.skipped = 0
        total = ranks.all_reduce_sum(torch.tensor(own, dtype=torch.float64)).tolist()
        loss, right, samples, skipped, data_seconds = total
        counts = Counts(loss, int(right), 0, int(samples), int(skipped), 0.0, data_seconds)
        lr = self.schedule.lr(state.step - 1) * state.improvement.lr_factor
        scaling = state.take_scaling()
        log.interval(state.step, counts, lr, scaling)
        if (times := self.stragglers.look(self.times)) is not None:
            self.compare_ranks(times)

    def compare_ranks(self, times: Times) -> None:
        """Record who waited for whom in the last steps; give fast ranks more images."""
        config, state, log, balance = self.config, self.state, self.log, self.balance
        if balance and balance.recut(state.step, times[:, :, COMPUTE]):
            self.checkpoints.images_by_rank = balance.counts
            log.shares(self.steps.newest_cut.step, balance.counts)
        if waiting := self.stragglers.waiting(times):
            remedy = ""
            if waiting.why == "compute" and balance:
                remedy = balance.remedy(waiting.rank)
            elif waiting.why == "compute" and config.balance == "even" and not config.synthetic:
                remedy = "--balance auto gives it fewer images"
            log.waits(state.step, replace(waiting, remedy=remedy))

    def end_epoch(self) -> int:
        """Evaluate and save if due; return the request that ends the stage early, or 0."""
        state, schedule = self.state, self.schedule
        for model in state.models:
            self.ranks.share_statistics(model)  # each rank's batch norms have seen other images
        # One predicate for all that is due, true at the last step: no run ends without a result.
        evaluates = self.data.has_evaluation and due(state.step, schedule.evaluate, schedule.steps)
        counts = self.evaluate().counts if evaluates else None
        request, is_best = self.run.agreed_request(), False
        if request <= SAVE:  # otherwise the evaluation may be incomplete; a resumed run repeats it
            is_best = state.finish_epoch(counts)
            self.log.epoch(state, counts)
        saves = request >= SAVE or is_best or due(state.step, schedule.save, schedule.steps)
        return self.save_or_stop(request, saves or state.exhausted, is_best)

    @torch.no_grad()
    def evaluate(self) -> Scores:
        """Return the scores of the validation set; incomplete if a rank is to stop."""
        config, state, log = self.config, self.state, self.log
        log.phase(phases.EVALUATE)
        normalised = self.task.transforms(config, state.epoch).normalised
        model, table = state.evaluated.eval(), Table(len(self.data.classes))
        for number, batch in enumerate(self.data.evaluation(), start=1):
            if len(batch.labels):
                with self.compiling(batch.images.shape[2:]):
                    logits = self.compute.logits(model, normalised, batch.images, config.eval_flip)
                table.add(logits, batch)
            else:
                table.skip(batch)
            log.report(epoch_step=number)
            if self.run.requests.ending:  # a stop does not wait for the rest of the validation set
                break
        state.train()
        scores = table.scores(self.ranks)
        log.say(scores.remark)
        self.scores = scores
        return scores

    def save_or_stop(self, request: int, saves: bool, is_best: bool = False) -> int:
        """Save a checkpoint if due; return the request that ends the stage early, or 0."""
        if saves:
            self.checkpoints.save(self.state, is_best)
            self.run.requests.acknowledge()
            request = self.run.agreed_request()  # a save takes long: a signal may have arrived
        return 0 if request == SAVE else request

    def finish(self) -> None:
        """Write final.pt, and the report with images and predictions."""
        state, log = self.state, self.log
        self.checkpoints.wait()
        if state.exhausted:
            log.say(
                f"ends after epoch {state.epoch}: {plural(state.improvement.stale, 'evaluation')}"
                " without a better one (--patience)"
            )
        if self.config.final == "best":
            self.checkpoints.restore_best(state)
        report = write_results(self.run, self.scores) if self.ranks.first else ""
        log.finish(state.accuracy, report)
