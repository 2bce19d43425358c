"""What a run is made of: one object, which the functions of set-up and loop take as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace

import torch
from torch.nn.parallel import DistributedDataParallel

from rackrun.training.balance import Balance
from rackrun.training.checkpoint import Content
from rackrun.training.config import Config
from rackrun.training.data.interface import Data
from rackrun.training.device import Compute
from rackrun.training.dry_step import require_plain_state
from rackrun.training.log import Log
from rackrun.training.loss import class_weights
from rackrun.training.models.named import is_own
from rackrun.training.models.recomputed import with_recomputed_blocks
from rackrun.training.ranks import Ranks
from rackrun.training.run import compatibility
from rackrun.training.run.checkpoints import RunCheckpoints
from rackrun.training.run.resume import Earlier
from rackrun.training.schedule import Schedule, Stage, refuse_scale
from rackrun.training.scores import Scores
from rackrun.training.state import TrainingState
from rackrun.training.step_times import StepTimes
from rackrun.training.stop_requests import StepExchange, StopRequests
from rackrun.training.task import Task


class TrainingRun:
    """What a run is made of, and what its loop counts; functions of the loop take it as a whole."""

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
        """Build the model and all that is kept of it; SaveError if `earlier` does not fit.

        That is the checkpoint to go on from. Remarks on versions say whether a resumed run stays on
        its version of the data.
        """
        self.task, self.config, self.ranks, self.requests = task, config, ranks, requests
        self.compute, self.data, self.steps, self.earlier = compute, data, data.steps, earlier
        self.version_remarks = version_remarks
        refuse_scale(config, data.steps.batch)
        self.schedule = Schedule(config, data.steps.per_epoch, data.steps.batch / config.batch_size)
        self.class_weights = class_weights(config.loss_weights, data.classes, data.class_sizes)
        model = task.built(config, len(data.classes))
        if config.gradient_checkpointing:
            with_recomputed_blocks(model)
        if is_own(config.model):
            require_plain_state(model, config)
        state = TrainingState(compute.placed(model), config, float16=compute.precision == "fp16")
        if compute.compile and state.average:
            state.average.model.compile()  # the copy of a compiled model is not compiled
        self.state = state
        # How evaluation and prediction show images to the trained model.
        self.preparation = replace(
            task.transformed(config, config.epochs - 1),
            conversion=data.conversion,
            upright=data.upright,
        )
        # What is in every file of weights beside them.
        self.described: Content = {
            "task": task.name,
            "classes": list(data.classes),
            "dataset": data.dataset,
            "preparation": asdict(self.preparation),
            "config": asdict(config),
            "data_versions": data.versions,
        }
        identity = compatibility.identity(
            self.described, model, data.digest, data.steps.batch, data.steps.per_epoch
        )
        if earlier:
            compatibility.check(identity, self.described, earlier.content, earlier.path)
        self.log = Log(config, self.schedule, ranks, data)
        self.checkpoints = RunCheckpoints(ranks, self.log, {"identity": identity, **self.described})
        self.exchange, self.times = StepExchange(ranks, requests), StepTimes(ranks)
        self.balance: Balance | None = None
        self.stage: Stage | None = None  # whose layers train
        self.ddp: DistributedDataParallel | None = None  # the model with them
        self.scores: Scores | None = None  # of the last evaluation
        self.compiled: set[object] = set()  # kinds of batches
        self.is_unseen = True  # the first batch
        # Since the last line of the log: the sums of losses and of right answers, which stay on the
        # device, as to read them would wait for the step; and the numbers of samples.
        self.sums = torch.zeros(2, dtype=torch.float64, device=ranks.device)
        self.samples = self.skipped = 0
