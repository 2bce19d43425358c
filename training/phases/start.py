"""The first phase of a run: join the other ranks, set up the device, open the data."""

import pickle
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import numpy as np
import torch

from rackrun.errors import UsageError
from rackrun.training.conditions import without_evaluation
from rackrun.training.config import Config
from rackrun.training.counts import Counts, as_counts
from rackrun.training.data.loader import first_batch, waits_reported
from rackrun.training.data.open import Data, open_data
from rackrun.training.data.order.cut import Cut
from rackrun.training.data.samples import Batch
from rackrun.training.data.transforms import Transforms, TransformsOfEpoch
from rackrun.training.device import Compute, set_up
from rackrun.training.phases.loss import class_weights
from rackrun.training.ranks import Ranks
from rackrun.training.run.data_version import pinned
from rackrun.training.run.progress import ProgressReporter, report_start
from rackrun.training.run.resume import Earlier, earlier_run
from rackrun.training.schedule import Schedule, make_schedule
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.world import joined


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
    version_remarks: tuple[str, ...] = ()
    """Whether a resumed run stays on its version of the data."""

    @property
    def transforms(self) -> Transforms:
        """How evaluation and prediction show images to the trained model."""
        transforms = self.task.transformed(self.config, self.config.epochs - 1)
        return replace(transforms, conversion=self.data.conversion, upright=self.data.upright)

    def class_weights(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the class weights in the dtype of the logits; None if they are equal."""
        return None if self.weights is None else self.weights.to(logits)

    def batches(self, step: int, progress: ProgressReporter) -> Generator[Batch]:
        """Return this rank's batches from a step on, once every rank has read its first one."""
        batches = self.data.training(step)
        first = first_batch(batches, self.ranks)
        return waits_reported(first, batches, progress)

    def parts_in(self, step: int) -> int:
        """Return in how many parts this rank computes its batch."""
        # Under an even cut equally many on all ranks, as SyncBatchNorm needs: it exchanges in each.
        return self._parts_and_fewest(step)[0][self.ranks.rank]

    def fewest_in_part(self, step: int) -> int:
        """Return the samples of a step that each part of each rank has at least."""
        return self._parts_and_fewest(step)[1]

    def _parts_and_fewest(self, step: int) -> tuple[tuple[int, ...], int]:
        per_part = self.config.batch_size // self.config.grad_accum_steps
        return _parts_and_fewest(self.data.cut(step), self.data.samples_in(step), per_part)

    def agreed_request(self) -> int:
        """Return the strongest request of any rank: none, to save, or to stop.

        It is an exchange: all ranks have to ask at the same point of the run.
        """
        return self.ranks.all_reduce_max(self.requests.pending)

    def sum_over_ranks(self, sums: torch.Tensor) -> Counts:
        """Return the counts of all ranks, summed."""
        return as_counts(self.ranks.all_reduce_sum(sums))


@lru_cache(8)  # asked twice a step, and all steps but an epoch's last have the same answer
def _parts_and_fewest(cut: Cut, samples: int, per_part: int) -> tuple[tuple[int, ...], int]:
    # By rank, in how many parts it computes its samples; and the fewest samples of any part.
    parts = np.maximum(1, -(-cut.most(samples) // per_part))
    return tuple(parts.tolist()), int((cut.fewest(samples) // parts).min())


@contextmanager
def started(task: Task, config: Config) -> Iterator[TrainingRun]:
    """Join the world that torchrun describes as one of its ranks; yield the opened run."""
    report_start()
    with joined(config) as ranks, StopRequests(config.save_minutes) as requests:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)
        config = earlier.resolved(config) if earlier else task.resolve(config)
        # Before the data are opened: ranks must read one version, though an append ends meanwhile.
        version = pinned(config, earlier, ranks)
        transforms = _for_workers(task, config)
        with closing(
            open_data(version.config, ranks, transforms, task.name, task.synthetic_classes)
        ) as data:
            if not data.has_evaluation:
                config = without_evaluation(config)
            schedule = make_schedule(config, data.epoch_steps, data.batch / config.batch_size)
            weights = class_weights(config.loss_weights, data.classes, data.class_sizes)
            if weights is not None:
                weights = weights.to(ranks.device)
            yield TrainingRun(
                task,
                config,
                ranks,
                requests,
                compute,
                data,
                schedule,
                earlier,
                weights,
                version.remarks,
            )


def _for_workers(task: Task, config: Config) -> TransformsOfEpoch:
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
