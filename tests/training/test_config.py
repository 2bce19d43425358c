"""Settings: said once, checked once, quick to ask for."""

import re
from dataclasses import fields
from typing import get_type_hints

import pytest

from rackrun.catdog.recipes import RECIPES, CatDog, DemoRecipe, Reference
from rackrun.commandline.ranges import ranges
from rackrun.errors import UsageError
from rackrun.imagenet.recipes import ImageNet
from rackrun.training.conditions import CONDITIONS, refuse_ineffective
from rackrun.training.config import from_command_line
from rackrun.training.entry import run_command
from rackrun.training.tasks.classify.recipes import Classify
from rackrun.training.tasks.definition import recipes_of, require_task


def catdog(*args: str) -> CatDog:
    return from_command_line(RECIPES, "python -m rackrun.catdog", args)[0]


def test_a_recipe_is_the_same_settings_with_other_defaults():
    """--recipe chooses the defaults, wherever it stands, and every other option still counts."""
    assert catdog() == CatDog()
    assert catdog("--epochs", "7", "--recipe", "demo") == DemoRecipe(epochs=7)
    assert catdog("--recipe=reference") == Reference()


def test_the_reference_recipe_is_the_published_one():
    """Stochastic gradient descent at 1e-3 without momentum, 32 images a rank, 50 epochs."""
    config = Reference()
    assert (config.optimizer, config.lr, config.momentum) == ("sgd", 1e-3, 0.0)
    assert (config.lr_schedule, config.weight_decay, config.ema_decay) == ("constant", 0.0, 0.0)
    assert (config.crop_area, config.flip) == (1.0, False)
    assert (config.batch_size, config.epochs, config.image_size, config.gray) == (32, 50, 128, True)


@pytest.mark.parametrize("settings", [CatDog, ImageNet, Classify])
def test_every_number_has_a_range(settings):
    """No option takes what ends in a traceback later: nan, infinity, or 400 digits."""
    kinds = get_type_hints(settings)
    numbers = {field.name for field in fields(settings) if kinds[field.name] in (int, float)}
    assert numbers == ranges(settings).keys()
    for name in numbers:
        for value in (float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)):
            option = f"--{name.replace('_', '-')} "
            with pytest.raises(UsageError, match=f"{option}.* is not ") as caught:
                settings(synthetic=True, **{name: value})
            assert len(str(caught.value)) < 1000


def check(task: str, *args: str) -> None:
    """Ask a task as the launcher does."""
    assert run_command(task, "test", ["check", "--data", "http://host/shards", *args]) == 0


@pytest.mark.parametrize("task", ["catdog", "classify", "imagenet", "mnist"])
def test_conditions_name_settings_and_hold_for_every_recipe(task):
    """The table has no name that is no option, and no remedy with one; what a recipe chooses beyond
    its task's defaults has an effect there."""
    recipes = recipes_of(require_task(task))
    for name, recipe in recipes.items():
        config = recipe()
        settings = {field.name for field in fields(config)}
        conditions = (*CONDITIONS, *recipe.own_conditions)
        assert {each for condition in conditions for each in condition.options} <= settings
        for condition in conditions:
            named = re.findall(r"--([a-z-]+)", f"{condition.otherwise} {condition.remedy}")
            assert {each.replace("-", "_") for each in named} <= settings, condition
            condition.otherwise.format(config=config)
        base = recipes["default"]()
        chosen = {each for each in settings if getattr(config, each) != getattr(base, each)}
        refuse_ineffective(config, chosen)
        check(task, "--recipe", name)
