"""Settings: said once, checked once, quick to ask for."""

import subprocess
import sys

import pytest

from catdog.recipes import RECIPES, CatDog, DemoRecipe, Reference
from rackrun.errors import UsageError
from training.config import Config, from_command_line


def catdog(*args: str) -> CatDog:
    return from_command_line(RECIPES, "python -m catdog", args)


def test_a_recipe_is_the_same_settings_with_other_defaults() -> None:
    """--recipe chooses the defaults, wherever it stands, and every other option still counts."""
    assert catdog() == CatDog()
    assert catdog("--epochs", "7", "--recipe", "demo") == DemoRecipe(epochs=7)
    assert catdog("--recipe=reference") == Reference()


def test_the_reference_recipe_is_the_published_one() -> None:
    """Stochastic gradient descent at 1e-3 without momentum, 32 pictures a rank, 50 epochs."""
    config = Reference()
    assert (config.optimizer, config.rate, config.momentum) == ("sgd", 1e-3, 0.0)
    assert (config.schedule, config.weight_decay, config.ema) == ("constant", 0.0, 0.0)
    assert (config.crop_area, config.flip) == (1.0, False)
    assert (config.batch_size, config.epochs, config.size, config.gray) == (32, 50, 128, True)


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--recipe", "demmo"], "no recipe 'demmo'; did you mean demo?"),
        (["--recipe"], "no recipe ''"),
        (["--epochs", "0"], "--epochs 0 is not 1 or more"),
        (["--rate", "nan"], "--rate nan is not a learning rate"),
        (["--batch-size", "10", "--accumulate", "4"], "--accumulate 4 does not divide"),
        (["--synthetic", "--data", "x"], "--synthetic and --data exclude each other"),
        (["--weights", "x", "--resume", "y"], "--weights and --resume exclude each other"),
        (["--ema", "1"], "--ema 1 is not between 0 and"),
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


def test_every_impossible_option_is_named_at_once() -> None:
    """Nobody has to repair one option to hear of the next."""
    with pytest.raises(UsageError) as caught:
        Config(epochs=0, batch_size=0, workers=-2)
    assert all(name in str(caught.value) for name in ("--epochs", "--batch-size", "--workers"))


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
