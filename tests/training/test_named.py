"""A model of one's own, or of timm, by its name in --model."""

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from rackrun.errors import Problem, UsageError
from tests import warm
from tests.convert.drawn import drawn
from training.models.named import named_model

ROOT = Path(__file__).parents[2]
MODELS = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.append(nn.Linear(4, num_classes))


def number(num_classes):
    return num_classes


def bare():
    return Net(2)
"""
NEEDY = "import a_library_that_is_missing"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models of a user."""
    (tmp_path / "own_models.py").write_text(MODELS)
    (tmp_path / "needy_models.py").write_text(NEEDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own_modles:Net", "no module own_modles in .* or installed; type MODULE:NAME"),
        ("own_models:Nett", "no class or function Nett in own_models"),
        ("own_models:number", "returns no torch.nn.Module, but int"),
        ("own_models:bare", r"type: def bare\(num_classes\)"),
        (":Net", "type MODULE:NAME"),
        ("../own_models:Net", "type MODULE:NAME"),
        ("timm:resnet1O", "no such model; did you mean timm:resnet"),
        ("timm:hf-hub:someone/theirs", "no such model; "),
    ],
)
def test_a_name_that_means_no_model_is_one_line(folder: Path, name: str, says: str) -> None:
    """What is wrong with it, and what to type."""
    with pytest.raises(UsageError, match=says):
        named_model(name, 2, 32)


def test_what_their_module_lacks_is_their_error(folder: Path) -> None:
    """With the place in the user's own code."""
    with pytest.raises(Problem, match=r"needy_models.py, line 1: .*'a_library_that_is_missing'"):
        named_model("needy_models:Net", 2, 32)


def test_timm_is_an_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the real timm has so many classes; without timm, the error names the extra."""
    model = named_model("timm:test_resnet", 5, 32)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(UsageError, match=r"pip install 'rackrun\[timm\]'"):
        named_model("timm:test_resnet", 5, 32)


def test_a_users_model_is_trained_and_predicts(folder: Path) -> None:
    """The file of weights alone does not choose what is imported: --model must say it again."""
    options = "--synthetic --epochs 1 --steps-per-epoch 1 --batch-size 2 --image-size 32"
    rest = "--device cpu --workers 0 --no-tensorboard --model own_models:Net --run-folder run"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = ("-m", "training", "classify")
    trained = warm.run(*words, *options.split(), *rest.split(), cwd=folder, env=env)
    assert trained.returncode == 0, trained.stderr
    (folder / "image.jpg").write_bytes(drawn("own"))
    ask = (*words, "predict", "run/final.pt", "image.jpg", "--json")
    refused = warm.run(*ask, cwd=folder, env=env)
    assert (refused.returncode, len(refused.stderr.splitlines())) == (74, 1), refused.stderr
    assert "type --model own_models:Net" in refused.stderr
    named = warm.run(*ask, "--model", "own_models:Net", cwd=folder, env=env)
    assert named.returncode == 0, named.stderr
    assert len(json.loads(named.stdout)[0]["classes"]) == 5
