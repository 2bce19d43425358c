"""A task of one's own, outside the project: a file, which trains, predicts and is evaluated."""

import json
import os
import re
import shutil

from tests.lab import warm
from tests.lab.data import drawn
from tests.lab.run import run
from tests.lab.warm import ROOT

EXAMPLE = ROOT / "examples" / "own_task.py"


def test_the_example_trains_on_two_ranks_predicts_and_is_evaluated(tmp_path, make_shards):
    """A file in another folder, with loader workers; its own option; its weights are of use."""
    (tmp_path / "tasks").mkdir()
    shutil.copy(EXAMPLE, tmp_path / "tasks")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    data = str(make_shards(classes=3))
    options = "--width 5 --epochs 1 --batch-size 20 --device cpu --workers 1 --no-tensorboard"
    train = f"-m rackrun.training tasks/own_task.py --data {data} {options} --run-folder run"
    for rank in warm.ranks(2, *train.split(), env=env, cwd=tmp_path):
        assert rank.wait() == 0
    resolved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (resolved["width"], resolved["task"]) == (5, "own_task")

    (tmp_path / "image.jpg").write_bytes(drawn("own"))
    task = "python -m rackrun.training tasks/own_task.py"
    named = run(f"{task} predict run/final.pt image.jpg --json", tmp_path)
    assert len(json.loads(named.out)[0]["classes"]) == 3, named

    ask = f"rackrun evaluate run {data} --device cpu --workers 0 --json"
    refused = run(ask, tmp_path)
    assert refused.code == 74
    assert "weights of own_task; known: catdog" in refused.err
    assert "type --task ./my_task.py" in refused.err
    evaluations = run(f"{ask} --task tasks/own_task.py", tmp_path)
    assert json.loads(evaluations.out)["samples"] == 37, evaluations


def test_the_page_shows_the_example():
    """Word for word, but for its first line."""
    page = (ROOT / "docs" / "guides" / "own-model.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    assert EXAMPLE.read_text().partition("\n\n")[2] in blocks
