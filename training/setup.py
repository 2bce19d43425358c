"""The set-up of a run: join the other ranks, set up the device, open the data, build the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import cached_property

from rackrun.contract import phases
from rackrun.reports import rank_number, send
from rackrun.training.checkpoint import Content
from rackrun.training.conditions import without_evaluation
from rackrun.training.config import Config
from rackrun.training.data.interface import Data
from rackrun.training.data.open import open_data
from rackrun.training.data.transforms import Transforms
from rackrun.training.device import Compute, set_up
from rackrun.training.dry_step import require_plain_state
from rackrun.training.log import Log
from rackrun.training.loss import class_weights
from rackrun.training.models.named import is_own
from rackrun.training.models.recomputed import with_recomputed_blocks
from rackrun.training.ranks import Ranks
from rackrun.training.run import compatibility
from rackrun.training.run.checkpoints import RunCheckpoints
from rackrun.training.run.data_version import pinned
from rackrun.training.run.resume import Earlier, earlier_run
from rackrun.training.schedule import Schedule
from rackrun.training.state import TrainingState
from rackrun.training.stop_requests import StopRequests
from rackrun.training.task import Task
from rackrun.training.world import joined


@contextmanager
def started(task: Task, config: Config) -> Iterator[TrainingRun]:
    """Join the world that torchrun describes as one of its ranks; yield the run, set up."""
    # From now on hangs are detected, even before ranks join.
    send({"rank": rank_number(), "phase": phases.START})
    with joined(config) as ranks, StopRequests(config.save_minutes) as requests:
        compute = set_up(config, ranks)
        earlier = earlier_run(config, task.name, ranks)  # of any host, sent to all
        config = earlier.resolved(config) if earlier else task.resolve(config)
        # Before the data are opened: ranks must read one version, though an append ends meanwhile.
        located, remarks = pinned(config, earlier, ranks)
        transforms = [task.transforms(config, epoch) for epoch in range(config.epochs)]
        data = open_data(located, ranks, transforms, task.name, task.synthetic_classes)
        if not data.has_evaluation:
            config = without_evaluation(config)
        yield TrainingRun(task, config, ranks, requests, compute, data, earlier, remarks)


class TrainingRun:
    """What a run is made of; only the state, the log and the checkpoints of it change."""

    def __init__(
        self,
        task: Task,
        config: Config,
        ranks: Ranks,
        requests: StopRequests,
        compute: Compute,
        data: Data,
        earlier: Earlier | None = None,
        version_remarks: Sequence[str] = (),
    ) -> None:
        """Build the model and all that is kept of it; `earlier` is the checkpoint to go on from.

        Remarks on versions say whether a resumed run stays on its version of the data.
        """
        self.task, self.config, self.ranks, self.requests = task, config, ranks, requests
        self.compute, self.data, self.earlier = compute, data, earlier
        self.version_remarks = version_remarks
        self.schedule = Schedule(config, data.steps.per_epoch, data.steps.batch / config.batch_size)
        self.class_weights = class_weights(config.loss_weights, data.classes, data.class_sizes)
        self.state = self._new_state()

    def _new_state(self) -> TrainingState:
        config, compute = self.config, self.compute
        model = self.task.built(config, len(self.data.classes))
        if config.gradient_checkpointing:
            with_recomputed_blocks(model)
        if is_own(config.model):
            require_plain_state(model, config)
        state = TrainingState(compute.placed(model), config, float16=compute.precision == "fp16")
        if compute.compile and state.average:
            state.average.model.compile()  # the copy of a compiled model is not compiled
        return state

    @cached_property
    def described(self) -> Content:
        """What is in every file of weights beside them: task, classes, settings."""
        return {
            "task": self.task.name,
            "classes": list(self.data.classes),
            "dataset": self.data.dataset,
            "preparation": asdict(self.preparation),
            "config": asdict(self.config),
            "data_versions": self.data.versions,
        }

    @cached_property
    def log(self) -> Log:
        """The log of the run."""
        return Log(self.config, self.schedule, self.ranks, self.data)

    @cached_property
    def checkpoints(self) -> RunCheckpoints:
        """The checkpoints of the run; SaveError if the one to go on from does not fit."""
        data = self.data
        identity = compatibility.identity(
            self.described, self.state.model, data.digest, data.steps.batch, data.steps.per_epoch
        )
        if self.earlier:
            earlier = self.earlier
            compatibility.check(identity, self.described, earlier.content, earlier.path)
        content = {"identity": identity, **self.described}
        return RunCheckpoints(self.ranks, self.log, content)

    @property
    def preparation(self) -> Transforms:
        """How evaluation and prediction show images to the trained model."""
        transforms = self.task.transformed(self.config, self.config.epochs - 1)
        return replace(transforms, conversion=self.data.conversion, upright=self.data.upright)

    def agreed_request(self) -> int:
        """Return the strongest request of any rank: none, to save, or to stop.

        It is an exchange: all ranks have to ask at the same point of the run.
        """
        return self.ranks.all_reduce_max(self.requests.pending)
