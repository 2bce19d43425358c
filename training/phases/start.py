"""The first phase of a run: join the other ranks, set up the device, open the data."""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from rackrun.errors import UsageError
from training.conditions import without_evaluation
from training.config import Config
from training.counts import Counts, as_counts
from training.data.open import Data, open_data
from training.data.samples import Batch
from training.data.transforms import TransformsOfEpoch
from training.data.waiting import after_first_batch, waits_reported
from training.device import Compute, set_up
from training.phases.class_weights import class_weights
from training.ranks import Ranks, joined
from training.run.progress import ProgressReporter, report_start
from training.run.resume import Earlier, earlier_run
from training.run.stop_requests import StopRequests
from training.schedule import Schedule, make_schedule
from training.task import Task


@dataclass(frozen=True)
class TrainingRun:
    """Everything that stays the same during a run."""

    task: Task
    config: Config
    ranks: Ranks
    requests: StopRequests
    compute: Compute
    data: Data
    schedule: Schedule
    earlier: Earlier | None
    weights: torch.Tensor | None = None
    """Weight of each class in the loss; None if they are equal."""

    def class_weights(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the class weights in the dtype of the logits; None if they are equal."""
        return None if self.weights is None else self.weights.to(logits)

    def batches(self, step: int, progress: ProgressReporter) -> Iterator[Batch]:
        """Return this rank's batches from a step on, once every rank has read its first one."""
        seconds = self.config.first_batch_seconds
        batches = after_first_batch(self.data.training(step), self.ranks, seconds)
        return waits_reported(batches, progress)

    def parts_in(self, step: int) -> int:
        """Return in how many parts every rank computes its batch of a step."""
        # All ranks must exchange gradients equally often, so the number of parts follows from the
        # largest batch of any rank, not from this rank's.
        largest = -(-self.data.samples_in(step) // self.ranks.world)
        return -(-largest * self.config.grad_accum_steps // self.config.batch_size)

    def agreed_request(self) -> int:
        """Return the strongest request of any rank: none, to save, or a signal to stop."""
        return self.ranks.all_reduce_max(self.requests.pending)

    def exchange_requests(self) -> Callable[[], int]:
        """Send this rank's request; return a function that waits for the strongest of all ranks.

        The exchange overlaps with the step, so that no step waits for it. A request that arrives
        meanwhile is sent before the next step.
        """
        if self.ranks.world == 1:
            return self.agreed_request
        return self.ranks.all_reduce_max_later(self.requests.pending)

    def sum_over_ranks(self, sums: torch.Tensor) -> Counts:
        """Return the counts of all ranks, summed."""
        return as_counts(self.ranks.all_reduce_sum(sums))


@contextmanager
def started(task: Task, config: Config) -> Iterator[TrainingRun]:
    """Join the world that torchrun describes as one of its ranks; yield the opened run."""
    report_start()
    with joined(config) as ranks, StopRequests(config.save_minutes) as requests:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)
        if earlier:
            config = earlier.with_batch(config)
        transforms = _for_workers(task, config)
        data = open_data(config, ranks, transforms, task.name, task.synthetic_classes)
        if not data.has_evaluation:
            config = without_evaluation(config)
        schedule = make_schedule(config, data.epoch_steps, data.batch / config.batch_size)
        weights = class_weights(config.loss_weights, data.classes, data.class_sizes)
        if weights is not None:
            weights = weights.to(ranks.device)
        yield TrainingRun(task, config, ranks, requests, compute, data, schedule, earlier, weights)


def _for_workers(task: Task, config: Config) -> TransformsOfEpoch:
    """Return the transforms of each epoch; UsageError if they cannot be sent to loader workers."""
    transforms = partial(task.transforms, config)
    try:
        if config.workers and not config.synthetic:
            pickle.dumps(transforms)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UsageError(
            f"task {task.name}: its transforms cannot be sent to loader workers: {error}; make them"
            " a `def` at the top of its file, or type --workers 0"
        ) from None
    return transforms
