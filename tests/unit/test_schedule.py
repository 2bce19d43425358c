"""When things happen, and the rate at each step."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.training.config import Config
from rackrun.training.schedule import Schedule, Stage, due, most_ranks, refuse_scale
from rackrun.training.settings.optim import BODY


def test_due_is_true_at_every_multiple_and_at_the_last_step():
    """One predicate serves log, evaluate and save, and never forgets the end."""
    assert [step for step in range(1, 11) if due(step, 4, 10)] == [4, 8, 10]
    assert [step for step in range(1, 4) if due(step, 0, 3)] == [3]
    assert [step for step in range(1, 4) if due(step, 1, 3)] == [1, 2, 3]


def test_epochs_become_steps_once():
    """Everything that is given in epochs is known in steps before the first one."""
    config = Config(
        epochs=6, eval_every_epochs=2, save_every_epochs=3, warmup_epochs=0.5, step_epochs=2
    )
    schedule = Schedule(config, epoch_steps=10, world=1)
    assert schedule.steps == 60
    assert (schedule.evaluate, schedule.save, schedule.warmup, schedule.decay) == (20, 30, 5, 20)


def test_cosine_rises_in_the_warm_up_and_falls_to_nearly_nothing():
    """The rate climbs evenly to its peak and then follows half a cosine down."""
    schedule = Schedule(Config(epochs=10, lr=1.0, warmup_epochs=1), epoch_steps=10, world=1)
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
    ],
    ids=str,
)
def test_a_polynomial_follows_the_share_of_steps_to_go(options, shares):
    """After the warm-up the rate is that share, or its square."""
    schedule = Schedule(Config(epochs=3, lr=2.0, warmup_epochs=1, **options), 10, 1)
    assert schedule.lr(4) == pytest.approx(1.0)
    rates = [schedule.lr(10 + step) for step in (0, 5, 10, 18)]
    assert rates == pytest.approx([2 * share for share in shares])


def test_step_divides_by_ten_and_constant_does_not_move():
    """The two plain schedules do what their names say."""
    stepped = Schedule(Config(epochs=6, lr=1.0, lr_schedule="step", step_epochs=2), 5, 1)
    assert [stepped.lr(step) for step in (0, 9, 10, 20)] == pytest.approx([1, 1, 0.1, 0.01])
    constant = Schedule(Config(epochs=6, lr=0.3, lr_schedule="constant"), 5, 1)
    assert {constant.lr(step) for step in range(30)} == {0.3}


def test_the_rate_grows_with_the_ranks_only_when_asked():
    """Linear scaling is a choice."""
    assert Schedule(Config(lr=0.1), 5, world=8).peak == 0.1
    assert Schedule(Config(lr=0.1, scale_lr=True), 5, world=8).peak == pytest.approx(0.8)


def test_a_warm_up_longer_than_the_run_leaves_half_of_it():
    """A short trial of a long recipe still reaches its peak."""
    assert Schedule(Config(epochs=1, warmup_epochs=5), 10, 1).warmup == 5


def test_each_stage_has_a_course_of_its_own():
    """The last layer first, then all but those that stay frozen: each warms up and falls."""
    config = Config(
        epochs=6, head_epochs=2, head_lr=1.0, lr=0.1, warmup_epochs=1, freeze="stem,", scale_lr=True
    )
    schedule = Schedule(config, 10, world=2)
    head = Stage(0, 2, 2.0, (BODY, "stem"))
    body = Stage(2, 6, 0.2, ("stem",))
    assert schedule.stages == (head, body) and schedule.peak == 0.2
    assert schedule.stages_from(1) == (head, body)
    assert schedule.stages_from(2) == schedule.stages_from(6) == (body,)
    assert [schedule.lr(step) for step in (0, 9, 10, 15)] == pytest.approx([0.2, 2.0, 2.0, 1.0])
    assert [schedule.lr(20 + step) for step in (0, 9, 10, 25)] == pytest.approx(
        [0.02, 0.2, 0.2, 0.1]
    )
    assert 0 < schedule.lr(59) < 0.001


def test_a_stage_shorter_than_the_warm_up_rises_for_half_of_it():
    """Also where the run is long enough; a stage without epochs is none."""
    config = Config(epochs=8, head_epochs=1, head_lr=1.0, warmup_epochs=3, lr_schedule="step")
    schedule = Schedule(replace(config, step_epochs=1, lr=2.0), 10, 1)
    assert schedule.warmup == 30
    assert [schedule.lr(step) for step in (0, 4, 5, 9)] == pytest.approx([0.2, 1, 1, 1])
    assert [schedule.lr(10 + step) for step in (29, 30, 40)] == pytest.approx([2, 2e-3, 2e-4])
    for epochs in (1, 8):
        only = Schedule(replace(config, epochs=epochs, head_epochs=epochs), 10, 1).stages
        assert [(stage.first, stage.last, stage.frozen) for stage in only] == [(0, epochs, (BODY,))]
    (only,) = Schedule(replace(config, head_epochs=0, freeze="a,b"), 10, 1).stages
    assert only == Stage(0, 8, config.lr, ("a", "b"))


def test_a_schedule_of_the_user_gives_the_share_after_the_warm_up(tmp_path, monkeypatch):
    """It is called with a stage's steps, and what is no share is refused with the step."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    Path("own_rates.py").write_text(
        "def falls(step, steps): return 1.5 - step / steps\n"
        "def ends(step, steps): return {0: 1, 1: 0, 2: -0.1, 3: float('inf')}.get(step)\n"
    )
    config = Config(epochs=4, lr=2.0, warmup_epochs=1, lr_schedule="own_rates:falls")
    schedule = Schedule(config, 10, 1)
    assert [schedule.lr(step) for step in (4, 10, 25, 40)] == pytest.approx([1, 3, 2, 1])
    other = Schedule(replace(config, lr_schedule="own_rates:ends"), 10, 1)
    assert (other.lr(10), other.lr(11)) == (2, 0)
    for step, share in ((2, "-0.1"), (3, "inf"), (4, "None")):
        refusal = f"^--lr-schedule own_rates:ends: {share} at step {step} of 30: return the share"
        with pytest.raises(UsageError, match=refusal):
            other.lr(10 + step)
    with pytest.raises(UsageError, match=r"^--lr-schedule own_rates:rises: no .* rises in own_ra"):
        Schedule(replace(config, lr_schedule="own_rates:rises"), 10, 1)


def test_the_first_steps_are_logged_unless_an_interval_was_chosen():
    """A small data set shows a loss before its epoch ends."""
    assert [step for step in range(1, 45) if Schedule(Config(), 50, 1).logs(step, 44)] == [
        *(1, 2, 5, 10, 20, 40, 44)
    ]
    chosen = Schedule(Config(log_every_steps=30), 50, 1)
    assert [step for step in range(1, 51) if chosen.logs(step, 50)] == [30, 50]
    assert chosen.epoch(25) == 0.5


def test_a_scaled_rate_has_a_limit_on_ranks_that_no_launcher_started():
    """SGD's rate is multiplied up to 3.2, for 8,192 images per step: what to type is said."""
    scaled = Config(batch_size=256, scale_lr=True)
    refuse_scale(scaled, 8192)
    with pytest.raises(UsageError, match="^8,193 images per step: --scale-lr .* --no-scale-lr"):
        refuse_scale(scaled, 8193)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, 0),
        ({"scale_lr": True, "lr": 0.1, "batch_size": 256}, 32),
        ({"scale_lr": True, "lr": 0.1, "batch_size": 1024}, 8),
        ({"scale_lr": True, "lr": 0.1, "batch_size": 8}, 32),
        ({"scale_lr": True, "lr": 0.0, "batch_size": 256}, 32),
        ({"scale_lr": True, "lr": 5.0, "batch_size": 256}, 1),
        ({"scale_lr": True, "lr": 0.1, "batch_size": 256, "optimizer": "adamw"}, 0),
        ({"scale_lr": True, "lr": 0.1, "batch_size": 256, "synthetic": True}, 0),
        ({"scale_lr": False, "global_batch": 48, "exact_epochs": True}, 48),
    ],
)
def test_the_most_ranks_follow_from_rate_and_batch(options, most):
    """As many as a step has samples, and as keep --scale-lr where it is known to hold."""
    limit, why = most_ranks(Config(**options))
    assert limit == most
    assert why == (
        "--global-batch 48 has fewer samples than that"
        if most == 48
        else "--scale-lr is known to hold up to lr 3.2 and 8,192 images per step; type a smaller"
        " --batch-size and --lr, or --no-scale-lr --lr 3.2, or what you have tried"
        if most
        else ""
    )
