"""A task of one's own, outside the project: a file, which trains, predicts and is evaluated."""

import json
import os
import re
import shutil
from pathlib import Path

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
    page = (ROOT / "docs" / "guides" / "own-model.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert EXAMPLE.read_text().partition("\n\n")[2] in blocks
