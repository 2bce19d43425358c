"""The samples of a run stay those that it could see, whatever becomes of its data afterwards."""

import csv

from tests.lab.data import drawn
from tests.lab.run import run, write

SMALL = "--image-size 16 --width 4 --epochs 1 --workers 0 --device cpu --no-tensorboard"


def typed(line, folder):
    result = run(line, folder)
    assert result.code == 0, result
    return result.out


def listed(run_name, folder):
    """Return the split, key and class of each listed sample."""
    typed(f"rackrun samples runs/{run_name} --csv samples.csv", folder)
    with (folder / "samples.csv").open(newline="") as file:
        return sorted((row["split"], row["key"], row["class"]) for row in csv.DictReader(file))


def test_a_run_is_listed_by_its_version_and_its_choice(tmp_path):
    images = {
        f"images/{split}/{name}/{name}{number}.jpg": drawn(f"{split}{name}{number}", (24, 24))
        for split, count in (("train", 6), ("val", 2))
        for name in "ab"
        for number in range(count)
    }
    write(tmp_path, images)
    typed("rackrun convert folder images shards", tmp_path)
    train = f"python -m rackrun.training catdog --data shards {SMALL}"
    typed(f"{train} --run-folder runs/one", tmp_path)
    typed(f"{train} --run-folder runs/two --only-classes b --max-train-samples 4", tmp_path)
    before = listed("one", tmp_path)
    assert len(before) == 16
    key = next(key for split, key, _ in before if split == "train")
    typed(f"rackrun convert drop shards {key}", tmp_path)
    assert listed("one", tmp_path) == before
    two = listed("two", tmp_path)
    assert {each[2] for each in two if each[0] == "train"} == {"b"}
    assert [each[0] for each in two].count("train") == 4
    assert [each for each in two if each[0] == "val"] == [x for x in before if x[0] == "val"]
    printed = typed("rackrun samples runs/one", tmp_path).split()
    assert printed[-6:] == ["shards@1", "train", "12", "shards@1", "val", "4"]


def test_runs_without_an_index_have_no_list(tmp_path):
    noise = "--synthetic --steps-per-epoch 2 --batch-size 2"
    typed(f"python -m rackrun.training catdog {noise} {SMALL} --run-folder runs/noise", tmp_path)
    for name, says in (("noise", "without an index"), ("none", "no run runs/none")):
        refused = run(f"rackrun samples runs/{name}", tmp_path)
        assert refused.code == 64 and says in refused.err, refused
