"""When things happen, and the rate at each step."""

from dataclasses import replace
from typing import Any

import pytest

from rackrun.errors import UsageError
from training.config import Config
from training.schedule import check_scaled_lr, due, make_schedule


def test_due_is_true_at_every_multiple_and_at_the_last_step() -> None:
    """One predicate serves log, evaluate and save, and never forgets the end."""
    assert [step for step in range(1, 11) if due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 4) if due(step, 0, 3)] == [3]
    assert [step for step in range(1, 4) if due(step, 1, 3)] == [1, 2, 3]


def test_epochs_become_steps_once() -> None:
    """Everything that is given in epochs is known in steps before the first one."""
    config = Config(
        epochs=6, eval_every_epochs=2, save_every_epochs=3, warmup_epochs=0.5, step_epochs=2
    )
    schedule = make_schedule(config, epoch_steps=10, world=1)
    assert schedule.steps == 60
    assert (schedule.evaluate, schedule.save, schedule.warmup, schedule.decay) == (20, 30, 5, 20)


def test_cosine_rises_in_the_warm_up_and_falls_to_nearly_nothing() -> None:
    """The rate climbs evenly to its peak and then follows half a cosine down."""
    schedule = make_schedule(Config(epochs=10, lr=1.0, warmup_epochs=1), epoch_steps=10, world=1)
    rates = [schedule.lr(step) for step in range(schedule.steps)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[55] == pytest.approx(0.5)
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0 < rates[-1] < 0.001


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({"lr_schedule": "linear"}, [1, 0.75, 0.5, 0.1]),
        ({"lr_schedule": "polynomial"}, [1, 0.5625, 0.25, 0.01]),
        ({"lr_schedule": "polynomial", "lr_power": 0.5}, [1, 0.75**0.5, 0.5**0.5, 0.1**0.5]),
    ],
    ids=str,
)
def test_a_polynomial_follows_the_share_of_steps_to_go(
    options: dict[str, Any], shares: list[float]
) -> None:
    """After the warm-up the rate is that share, or a power of it."""
    schedule = make_schedule(Config(epochs=3, lr=2.0, warmup_epochs=1, **options), 10, 1)
    assert schedule.lr(4) == pytest.approx(1.0)
    rates = [schedule.lr(10 + step) for step in (0, 5, 10, 18)]
    assert rates == pytest.approx([2 * share for share in shares])


def test_step_divides_by_ten_and_constant_does_not_move() -> None:
    """The two plain schedules do what their names say."""
    stepped = make_schedule(Config(epochs=6, lr=1.0, lr_schedule="step", step_epochs=2), 5, 1)
    assert [stepped.lr(step) for step in (0, 9, 10, 20)] == pytest.approx([1, 1, 0.1, 0.01])
    constant = make_schedule(Config(epochs=6, lr=0.3, lr_schedule="constant"), 5, 1)
    assert {constant.lr(step) for step in range(30)} == {0.3}


def test_the_rate_grows_with_the_ranks_only_when_asked() -> None:
    """Linear scaling is a choice."""
    assert make_schedule(Config(lr=0.1), 5, world=8).peak == 0.1
    assert make_schedule(Config(lr=0.1, scale_lr=True), 5, world=8).peak == pytest.approx(0.8)


def test_a_warm_up_longer_than_the_run_leaves_half_of_it() -> None:
    """A short trial of a long recipe still reaches its peak."""
    assert make_schedule(Config(epochs=1, warmup_epochs=5), 10, 1).warmup == 5


def test_a_scaled_rate_has_a_limit() -> None:
    """SGD's rate is multiplied up to 3.2, for 8,192 images per step: what to type is said."""
    scaled = Config(batch_size=256, scale_lr=True)
    check_scaled_lr(scaled, 3.2, 8192)
    with pytest.raises(UsageError, match="lr 6.4 for 16,384 images per step.* --no-scale-lr"):
        check_scaled_lr(scaled, 6.4, 16384)
    with pytest.raises(UsageError, match="lr 16 for 8,192 .* up to 3.2 for 8,192; .* --lr 3.2"):
        check_scaled_lr(scaled, 16, 8192)
    for other in ({"scale_lr": False}, {"optimizer": "adamw"}, {"synthetic": True}):
        check_scaled_lr(replace(scaled, **other), 6.4, 16384)
