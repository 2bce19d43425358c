"""Run by torchrun for test_apart: two ranks that train apart, a line per case that holds."""

import signal
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rackrun.run_folder import RunFolder
from tests.training.torchrun import prove
from tests.training.two_ranks import GLOBAL_BATCH, TASK, Halves
from training import checkpoint
from training.config import Config
from training.device import set_up
from training.loop import train_stages
from training.phases.begin import begin
from training.phases.start import TrainingRun
from training.ranks import Ranks
from training.run.resume import resumed
from training.run.stop_requests import StopRequests
from training.schedule import make_schedule
from training.state import TrainingState


def trained(config: Config, ranks: Ranks, data: Halves) -> tuple[int, TrainingState]:
    """Run; return the exit code, and the state of this rank at the end."""
    config = replace(config, batch_size=GLOBAL_BATCH // ranks.world)
    schedule = make_schedule(config, data.epoch_steps, ranks.world)
    earlier = resumed(config.resume, TASK.name, ranks) if config.resume else None
    with StopRequests(0) as stops:
        compute = set_up(config, ranks)
        run = TrainingRun(TASK, config, ranks, stops, compute, data, schedule, earlier)
        state = TrainingState(compute.placed(TASK.model(config, len(data.classes))), config)
        with begin(run, state) as record:
            return train_stages(run, state, record), state


def weights(state: TrainingState) -> torch.Tensor:
    return torch.cat([weight.detach().flatten() for weight in state.model.parameters()])


def alike(state: TrainingState) -> bool:
    """Return whether both ranks have the same weights, momenta and average, bit for bit."""
    packed = torch.tensor(list(checkpoint.pack(state.state_dict())), dtype=torch.uint8)
    observed = [torch.empty_like(packed) for _ in range(2)]
    dist.all_gather(observed, packed)
    return torch.equal(*observed)


def ranks_are_alike_after_an_epoch(config: Config, ranks: Ranks, folder: Path) -> None:
    """Weights, momenta and the average, for plain, adaptive and layer-wise optimisers."""
    for optimizer in ("sgd", "adamw"):
        ours = replace(
            config, local_sgd_steps=4, optimizer=optimizer, lr=0.01, grad_accum_steps=2,
            run_folder=str(folder / optimizer),
        )  # fmt: skip
        code, state = trained(ours, ranks, Halves(ranks))
        assert code == 0 and alike(state), optimizer


def meeting_after_every_step_is_exchanging_gradients(
    config: Config, ranks: Ranks, folder: Path
) -> None:
    """Momentum, decay, and the average of weights are linear: the same weights to rounding."""
    states = [
        trained(
            replace(config, local_sgd_steps=every, run_folder=str(folder / f"e{every}")), *both
        )[1]
        for every, both in ((0, (ranks, Halves(ranks))), (1, (ranks, Halves(ranks))))
    ]
    for weight, other in zip(*(state.model.parameters() for state in states), strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)
    assert states[0].average and states[1].average
    averages = (state.average.model.parameters() for state in states if state.average)
    for weight, other in zip(*averages, strict=True):
        torch.testing.assert_close(weight, other, rtol=1e-4, atol=1e-6)


def in_between_ranks_go_ways_of_their_own(config: Config, ranks: Ranks, folder: Path) -> None:
    """Rarer meetings lead to other weights, though not far from those of every step."""
    every, rare = (
        weights(
            trained(replace(config, local_sgd_steps=n, run_folder=str(folder / f"r{n}")), *both)[1]
        )
        for n, both in ((0, (ranks, Halves(ranks))), (6, (ranks, Halves(ranks))))
    )
    apart = float((every - rare).norm() / every.norm())
    assert 1e-5 < apart < 0.1, apart


def a_stop_between_two_meetings_loses_nothing(config: Config, ranks: Ranks, folder: Path) -> None:
    """Ranks meet before they save, so that the one file is the state of both.

    Steps without an exchange of gradients do not wait for the request, which is read in its step or
    two steps later.
    """
    ours = replace(config, local_sgd_steps=5, run_folder=str(folder / "stopped"))
    code, state = trained(ours, ranks, Halves(ranks, signalled=(1, 1)))
    assert code == 128 + signal.SIGTERM and state.step in (2, 4) and alike(state)
    saved = RunFolder(folder / "stopped").checkpoint(state.step)
    again = replace(ours, run_folder=str(folder / "again"), resume=str(saved))
    code, state = trained(again, ranks, Halves(ranks))
    assert code == 0 and state.step == 12 and alike(state)


if __name__ == "__main__":
    config = Config(
        epochs=2, lr=0.05, warmup_epochs=0.5, weight_decay=0.01, ema_decay=0.9,
        tensorboard=False, device="cpu",
    )  # fmt: skip
    prove(
        config,
        ranks_are_alike_after_an_epoch,
        meeting_after_every_step_is_exchanging_gradients,
        in_between_ranks_go_ways_of_their_own,
        a_stop_between_two_meetings_loses_nothing,
    )
