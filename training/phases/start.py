"""The first phase of a run: join the other ranks, set up the device, open the data."""

import pickle
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, nullcontext
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
from rackrun.training.data.transforms import TransformsOfEpoch
from rackrun.training.device import Compute, set_up
from rackrun.training.membership import RankMembership, membership_here
from rackrun.training.phases.loss import class_weights
from rackrun.training.ranks import Ranks
from rackrun.training.run.data_version import pinned
from rackrun.training.run.progress import ProgressReporter, report_start
from rackrun.training.run.resume import Earlier, earlier_run
from rackrun.training.run.stop_requests import NOTHING, REGROUP, StopRequests
from rackrun.training.schedule import Schedule, make_schedule
from rackrun.training.task import Task
from rackrun.training.world import alone, joined, planned_world


@dataclass(frozen=True)
class TrainingRun:
    """Everything that stays the same during a run; in an elastic run, while a group lasts."""

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
    membership: RankMembership | None = None
    """What the launcher orders in an elastic run."""
    version_remarks: tuple[str, ...] = ()
    """Whether a resumed run stays on its version of the data."""

    def class_weights(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the class weights in the dtype of the logits; None if they are equal."""
        return None if self.weights is None else self.weights.to(logits)

    def batches(self, step: int, progress: ProgressReporter) -> Generator[Batch]:
        """Return this rank's batches from a step on, once every rank has read its first one."""
        batches = self.data.training(step)
        first = first_batch(batches, self.ranks, self.config.first_batch_seconds)
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

    def pending(self) -> int:
        """Return the strongest request to this rank now."""
        regroups = self.membership is not None and self.membership.is_superseded
        return max(self.requests.pending, REGROUP if regroups else NOTHING)

    def agreed_request(self) -> int:
        """Return the strongest request of any rank: none, to regroup, to save, or to stop.

        It is an exchange: all ranks have to ask at the same point of the run.
        """
        return self.ranks.all_reduce_max(self.pending())

    def check_group(self) -> None:
        """Raise ConnectionAbortedError if the launcher has given up the group of this rank."""
        if self.membership:
            # What a GPU has only queued may still fail, or be wrong: so it is waited for.
            if self.ranks.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            self.membership.check_fence()
            if self.membership.is_broken:
                raise ConnectionAbortedError("the group was given up")

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
    """Join the world that torchrun describes as one of its ranks; yield the opened run.

    A rank of an elastic run opens it alone, so that others need not wait for a newcomer.
    """
    report_start()
    membership = membership_here() if config.elastic else None
    world = nullcontext(alone(config)) if config.elastic else joined(config)
    with world as ranks, StopRequests(config.save_minutes) as requests:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)
        config = earlier.resolved(config) if earlier else task.resolve(config)
        if config.elastic and not config.global_batch:  # the same for any group
            config = replace(config, global_batch=config.batch_size * planned_world())
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
                membership,
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
