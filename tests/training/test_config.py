"""Settings: said once, checked once, quick to ask for."""

import subprocess
import sys
from dataclasses import fields
from typing import get_type_hints

import pytest

from catdog.recipes import RECIPES, CatDog, DemoRecipe, Reference
from imagenet.recipes import ImageNet
from rackrun.errors import UsageError
from rackrun.shapes import shaped
from training.config import RANGES, Config, from_command_line
from training.recorded import NEW_NAMES, with_new_names, with_new_options
from training.tasks.classify.recipes import Classify


def catdog(*args: str) -> CatDog:
    return from_command_line(RECIPES, "python -m catdog", args)


def test_a_recipe_is_the_same_settings_with_other_defaults() -> None:
    """--recipe chooses the defaults, wherever it stands, and every other option still counts."""
    assert catdog() == CatDog()
    assert catdog("--epochs", "7", "--recipe", "demo") == DemoRecipe(epochs=7)
    assert catdog("--recipe=reference") == Reference()


def test_the_reference_recipe_is_the_published_one() -> None:
    """Stochastic gradient descent at 1e-3 without momentum, 32 images a rank, 50 epochs."""
    config = Reference()
    assert (config.optimizer, config.lr, config.momentum) == ("sgd", 1e-3, 0.0)
    assert (config.lr_schedule, config.weight_decay, config.ema_decay) == ("constant", 0.0, 0.0)
    assert (config.crop_area, config.flip) == (1.0, False)
    assert (config.batch_size, config.epochs, config.image_size, config.gray) == (32, 50, 128, True)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--recipe", "demmo"], "no recipe 'demmo'; did you mean demo?"),
        (["--recipe"], "no recipe ''"),
        (["--epochs", "0"], "--epochs 0 is not 1 or more"),
        (["--lr", "nan"], "--lr nan is not a learning rate"),
        (["--batch-size", "10", "--grad-accum-steps", "4"], "--grad-accum-steps 4 does not divide"),
        (["--synthetic", "--data", "x"], "--synthetic and --data exclude each other"),
        (["--weights", "x", "--resume", "y"], "--weights and --resume exclude each other"),
        (["--lr-milestones", "30,a"], "--lr-milestones 30,a: type epochs, as in 30,60,80"),
        (["--ema-decay", "1"], "--ema-decay 1 is not between 0 and"),
        (["--epochs", "many"], "--epochs"),
        (["--epocs", "3"], "did you mean --epochs?"),
    ],
)
def test_an_impossible_option_is_refused_in_a_sentence(args: list[str], sentence: str) -> None:
    """What cannot be right ends as one line that names the option and what to type."""
    with pytest.raises(UsageError) as caught:
        catdog(*args)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("settings", [CatDog, ImageNet, Classify])
def test_every_number_has_a_range(settings: type[Config]) -> None:
    """No option takes what ends in a traceback later: nan, infinity, or 400 digits."""
    kinds = get_type_hints(settings)
    numbers = {field.name for field in fields(settings) if kinds[field.name] in (int, float)}
    ranges = {name for name, *_ in (*RANGES, *settings.own_ranges)}
    assert numbers == ranges
    for name in numbers:
        for value in (float("nan"), float("inf"), float("-inf"), 10**400, -(10**400)):
            option = f"--{name.replace('_', '-')} "
            with pytest.raises(UsageError, match=f"{option}.* is not ") as caught:
                settings(synthetic=True, **{name: value})
            assert len(str(caught.value)) < 1000


def test_every_impossible_option_is_named_at_once() -> None:
    """All wrong options are in one message."""
    with pytest.raises(UsageError) as caught:
        Config(epochs=0, batch_size=0, workers=-2)
    assert all(name in str(caught.value) for name in ("--epochs", "--batch-size", "--workers"))


@pytest.mark.parametrize("old", NEW_NAMES)
def test_an_old_spelling_means_the_same_option(old: str) -> None:
    """For one release both names are read, with a space or `=`, dashes or underscores."""
    new = NEW_NAMES[old]
    for dashed in (old, old.replace("_", "-")):
        assert with_new_options([f"--{dashed}", "3"]) == [f"--{new.replace('_', '-')}", "3"]
        assert with_new_options([f"--{dashed}=3"]) == [f"--{new.replace('_', '-')}=3"]
    assert with_new_options([f"--no-{old}"]) == [f"--no-{new.replace('_', '-')}"]
    assert with_new_options([f"--{old}ish", old, "-x"]) == [f"--{old}ish", old, "-x"]
    assert with_new_names({old: 3, "seed": 1}) == {new: 3, "seed": 1}


def test_old_options_reach_the_settings() -> None:
    """A command line of the last release gives the same settings as one of this release."""
    old = catdog("--rate", "0.5", "--size=64", "--keep", "2", "--mix", "a=1", "--scale_rate")
    assert old == catdog(
        "--lr",
        "0.5",
        "--image-size=64",
        "--keep-checkpoints",
        "2",
        "--extra-data",
        "a=1",
        "--scale-lr",
    )


def test_the_settings_of_an_older_run_are_read() -> None:
    """config.json and checkpoints have flat fields, by whatever names they had then."""
    recorded = {
        "recipe": "demo", "data": "shards", "model": "catdog", "width": 16, "size": 96,
        "epochs": 10, "batch_size": 32, "first_samples": 0, "mix": "", "repeats": 1,
        "accumulate": 2, "rate": 3e-3, "scale_rate": False, "schedule": "step", "clip": 0.5,
        "ema": 0.98, "shuffle": 500, "gradients": "bfloat16", "average_steps": 0, "log_steps": 10,
        "waits_steps": 100, "evaluate_epochs": 2, "save_epochs": 3, "keep": 5, "optimizer": "lars",
    }  # fmt: skip
    config = shaped(with_new_names(recorded), DemoRecipe)
    assert (config.image_size, config.lr, config.lr_schedule) == (96, 3e-3, "step")
    assert (config.clip_grad, config.ema_decay, config.grad_accum_steps) == (0.5, 0.98, 2)
    assert (config.eval_every_epochs, config.save_every_epochs) == (2, 3)
    assert config.keep_checkpoints == 5
    assert config.optimizer == DemoRecipe().optimizer  # LARS is gone; its weights are still of use


def test_help_does_not_import_torch() -> None:
    """--help answers without the seconds that torch, numpy or PIL take to load."""
    program = (
        "import runpy, sys\n"
        "sys.argv = ['catdog', '--help']\n"
        "try:\n"
        "    runpy.run_module('catdog.__main__', run_name='catdog_main')['main'](['--help'])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print(sorted({'torch', 'numpy', 'PIL', 'webdataset'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.endswith("[]\n")
    assert "--recipe" in done.stdout
