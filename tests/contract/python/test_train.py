"""`rackrun.train` and `rackrun.load_checkpoint`: training and its files from Python."""

import hashlib
import json
import os
import pickle
import signal
import threading
from pathlib import Path

import pytest

import rackrun
from tests.lab.run import run as typed
from tests.lab.run import write
from tests.lab.waiting import until

SMALL = {
    "epochs": 2,
    "image_size": 24,
    "width": 6,
    "batch_size": 20,
    "workers": 0,
    "device": "cpu",
    "tensorboard": False,
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def same(one, other):
    first, second = (rackrun.load_checkpoint(run.final).weights for run in (one, other))
    return first.keys() == second.keys() and all(map(equal, first.values(), second.values()))


def equal(one, other):
    return bool((one == other).all())


def test_a_run_leaves_the_files_and_fields_of_the_page(shards):
    run = rackrun.train("catdog", data=shards, ema_decay=0.9, **SMALL)
    assert run.path.parent == Path("runs").resolve()
    config = json.loads(run.config.read_text())
    assert (config["task"], config["epochs"], config["resolved"]["world_size"]) == ("catdog", 2, 1)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    evaluated = [line for line in lines if line["kind"] == "evaluate"]
    assert trained[-1]["step"] == evaluated[-1]["step"] == 8
    assert {"loss", "accuracy", "images_per_second", "rate", "epoch", "time"} <= trained[0].keys()
    assert {"split", "loss", "top1", "top5", "samples", "epoch", "time"} <= evaluated[0].keys()
    assert evaluated[-1]["samples"] == 8
    assert run.report.exists() and run.predictions.exists() and run.best.exists()
    assert rackrun.load_model(run.path).classes == ["a", "b"]


def test_a_checkpoint_is_read_with_its_step_settings_and_weights(shards):
    """And what a save that was killed has left in the folder is gone."""
    left = Path("again/checkpoints/.step-00000004.pt.0123abcd.partial")
    write(Path.cwd(), {str(left): "cut sh"})
    run = rackrun.train("catdog", data=shards, ema_decay=0.9, run_folder="again", **SMALL)
    assert not left.exists()
    final, last = (rackrun.load_checkpoint(path) for path in (run.path, run.checkpoint(8)))
    assert (final.task, final.classes, final.step) == ("catdog", ["a", "b"], None)
    assert (last.step, last.config["width"], last.config["data"]) == (8, 6, str(shards))
    assert final.average is None and last.average.keys() == last.weights.keys()
    assert final.weights.keys() == last.weights.keys()
    assert all(equal(final.weights[name], last.average[name]) for name in final.weights)
    assert not all(equal(last.weights[name], last.average[name]) for name in final.weights)


def test_it_trains_what_the_command_line_trains(shards, tmp_path):
    here = rackrun.train("catdog", data=shards, **SMALL)
    options = "--epochs 2 --image-size 24 --width 6 --batch-size 20 --workers 0 --device cpu"
    there = typed(f"rackrun local catdog --data {shards} {options} --no-tensorboard", tmp_path)
    assert there.code == 0, there
    other = rackrun.RunFolder(Path("runs/latest").resolve())
    assert same(here, other)
    result = json.loads(other.result.read_text())
    assert (result["verdict"], result["exit_code"], result["saved"]) == ("done", 0, 8)
    assert result["codes"] == {"0": 0} and result["hosts"] == {"localhost": "clean"}
    plan = json.loads(other.plan.read_text())
    assert (plan["world_size"], plan["hosts"][0]["processes"]) == (1, 1)


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"data": "nowhere"}, "nowhere"),
        ({"epochs": "many"}, "--epochs many"),
        ({"epoch": 3}, "--epoch"),
        ({"momentum": 0.5, "optimizer": "adamw"}, "--momentum 0.5"),
        ({"model": "resnet"}, "resnet"),
    ],
)
def test_a_mistake_is_a_problem_of_one_line_and_leaves_no_folder(shards, wrong, names):
    with pytest.raises(rackrun.Problem) as raised:
        rackrun.train("catdog", **{"data": shards, **wrong})
    message = str(raised.value)
    assert names in message and "\n" not in message and raised.value.exit_code == 64
    assert not Path("runs").exists()


def test_ctrl_c_saves_and_the_resumed_run_ends_in_the_same_weights(shards):
    whole = rackrun.train("catdog", data=shards, run_folder="whole", **SMALL | {"epochs": 40})
    metrics = Path("cut/metrics.jsonl")

    def interrupt():
        until(lambda: metrics.exists() and '"train"' in metrics.read_text())
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        rackrun.train("catdog", data=shards, run_folder="cut", **SMALL | {"epochs": 40})
    assert not Path("cut/final.pt").exists()
    rest = rackrun.train("catdog", data=shards, resume="cut", **SMALL | {"epochs": 40})
    assert same(rest, whole)


def test_in_a_function_that_is_launched_all_ranks_train_together(shards, tmp_path):
    write(
        tmp_path,
        {
            "mine.py": f"""
import rackrun

def go() -> str:
    return str(rackrun.train("catdog", data={str(shards)!r}, **{SMALL!r}).path)
""",
            "start.py": """
import rackrun
import mine

if __name__ == "__main__":
    result = rackrun.launch(mine.go, nproc=2)
    assert set(result.returned.values()) == {str(result.folder)}, result
""",
        },
    )
    result = typed("python start.py", tmp_path)
    assert result.code == 0, result
    run = rackrun.RunFolder(Path("runs/latest").resolve())
    assert json.loads(run.config.read_text())["resolved"]["world_size"] == 2
    assert rackrun.load_checkpoint(run.path).task == "catdog"


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def signed(data):
    return data + b"sha256:%s\n" % hashlib.sha256(data).hexdigest().encode()


@pytest.mark.security("CKPT-1", "CKPT-2")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no checkpoint",
        pickle.dumps({"model": {}}),
        signed(b"no checkpoint"),
        signed(pickle.dumps({"model": Harm(), "task": "catdog"})),
    ],
    ids=["empty", "text", "no digest", "text with a digest", "code"],
)
def test_what_is_no_checkpoint_is_refused_and_its_code_not_run(tmp_path, content):
    Path("odd.pt").write_bytes(content)
    with pytest.raises(rackrun.Problem, match=r"^odd\.pt: ") as raised:
        rackrun.load_checkpoint("odd.pt")
    assert raised.value.exit_code == 74
    assert not Path("harmed").exists()
