"""A task of one's own, outside the project: a file, which trains, predicts and is evaluated."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from rackrun.errors import Problem, UsageError
from rackrun.training.config import Config
from rackrun.training.data.transforms import Transforms
from rackrun.training.phases.start import _for_workers
from rackrun.training.task import Task
from rackrun.training.tasks.definition import recipes_of, require_task, task_of
from tests.lab import warm
from tests.lab.data import drawn

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_task.py"
ALONE = ("--device", "cpu", "--workers", "0")


def test_the_example_trains_on_two_ranks_predicts_and_is_evaluated(tmp_path, make_shards):
    """A file in another folder, with loader workers; its own option; its weights are of use."""
    (tmp_path / "tasks").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "tasks")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = ("-m", "rackrun.training", "tasks/own_task.py")
    data = str(make_shards(classes=3))
    options = "--width 5 --epochs 1 --batch-size 20 --device cpu --workers 1 --no-tensorboard"
    train = (*args, "--data", data, *options.split(), "--run-folder", "run")
    for rank in warm.ranks(2, *train, env=env, cwd=tmp_path):
        assert rank.wait() == 0
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (resolved["width"], resolved["task"]) == (5, "own_task")

    (tmp_path / "image.jpg").write_bytes(drawn("own"))
    named = warm.run(*args, "predict", "run/final.pt", "image.jpg", "--json", cwd=tmp_path, env=env)
    assert len(json.loads(named.stdout)[0]["classes"]) == 3, named.stderr

    ask = ("-m", "rackrun.training", "evaluate", "run", data, *ALONE, "--json")
    refused = warm.run(*ask, cwd=tmp_path, env=env)
    assert refused.returncode == 74
    assert "weights of own_task; known: catdog" in refused.stderr
    assert "type --task ./my_task.py" in refused.stderr
    evaluations = warm.run(*ask, "--task", "tasks/own_task.py", cwd=tmp_path, env=env)
    assert json.loads(evaluations.stdout)["samples"] == 37, evaluations.stderr


def test_the_page_shows_the_example():
    """Word for word, but for its first line."""
    page = (ROOT / "docs" / "howto" / "own-task.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert EXAMPLE.read_text().partition("\n\n")[2] == block


@pytest.mark.parametrize(
    ("name", "text", "kind", "says"),
    [
        ("task_a", "TASK = 1", UsageError, "task_a.py does not define RECIPES"),
        ("task_b", "TASK = 1\nRECIPES = {}", UsageError, 'type: RECIPES = {"default": MySettings}'),
        (
            "task_c",
            "TASK = 1\nRECIPES = RIGHT",
            UsageError,
            "TASK: not a Task; type: TASK = rackrun.Task",
        ),
        (
            "task_d",
            "TASK = 1\n\nTASK.x",
            UsageError,
            "task_d.py, line 3: AttributeError: 'int' obj",
        ),
        ("task_e", "import missing_here\nTASK = 1", Problem, "task_e.py, line 1: ModuleNotFoundEr"),
        ("json", "TASK = 1", UsageError, "Python has another module json, .*; rename yours"),
    ],
)
def test_a_task_that_is_incomplete_is_one_line(tmp_path, monkeypatch, name, text, kind, says):
    """What is missing in which file; a library that may be on hosts only is no bad usage."""
    right = 'from rackrun.training.config import Config\nRECIPES = {"default": Config}'
    (tmp_path / f"{name}.py").write_text(text.replace("RECIPES = RIGHT", right))
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    source = require_task(str(tmp_path / f"{name}.py"))
    with pytest.raises(Problem, match=says) as caught:
        recipes_of(source)
        task_of(source)
    assert type(caught.value) is kind


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        ("lr: float = 0.05", "lr = 0.05", "Settings.lr: has no type, .*type: lr: float = 0.05"),
        ("return nn.Seq", "nn.Seq", r"build\(\) returns NoneType; return a torch.nn.Module"),
        ("return Tr", "Tr", r"transforms\(\) returns NoneType; return rackrun.Transforms\(size\)"),
        (", classes))", ", 7))", r"returns \(20, 7\) for 20 images of 3 classes; build it with 3"),
        (", classes))", ", classes), Two())", "returns tuple; return a tensor of logits"),
    ],
)
def test_a_mistake_in_a_task_is_one_line(tmp_path, make_shards, right, wrong, says):
    """A default that Python would ignore, a function without `return`, other outputs."""
    two = "\n\nclass Two(nn.Module):\n    def forward(self, x):\n        return x, x\n"
    text = EXAMPLE.read_text()
    assert right in text
    (tmp_path / "mine.py").write_text(text.replace(right, wrong) + two)
    line = f"--data {make_shards(classes=3)} --epochs 1 --batch-size 20 --run-folder run"
    line += f" --no-tensorboard {' '.join(ALONE)}"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = warm.run("-m", "rackrun.training", "./mine.py", *line.split(), cwd=tmp_path, env=env)
    assert done.returncode == 64
    assert re.search(f"^error: .*{says}", done.stderr, re.MULTILINE), done.stderr
    assert "Traceback" not in done.stderr


def test_a_lambda_is_refused_where_workers_would_need_it():
    """In one line that says how to write it; without workers it is as good as any function."""
    task = Task("mine", lambda config, classes: None, lambda config, epoch: Transforms(8))
    with pytest.raises(
        UsageError, match="task mine: .* `def` at the top of its file, or type --wor"
    ):
        _for_workers(task, Config(data="x"))
    assert _for_workers(task, Config(data="x", workers=0))(0) == Transforms(8)
