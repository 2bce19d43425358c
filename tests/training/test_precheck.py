"""What is wrong with settings is found before a host is contacted, without torch."""

import json
import subprocess
import sys
from dataclasses import asdict

import pytest
import torchvision

from rackrun.catdog.recipes import CatDog
from rackrun.shards.open import open_source
from rackrun.training.entry import run_command
from rackrun.training.models.registered import registered


def check(*args: str) -> int:
    """Ask the task as the launcher does."""
    return run_command("catdog", "test", ["check", *args])


def test_names_in_the_sources_are_those_that_the_libraries_have():
    """No model that exists is refused."""
    assert registered("torchvision") == sorted(
        torchvision.models.list_models(module=torchvision.models)
    )
    import timm

    names = registered("timm")
    assert {name.partition(".")[0] for name in timm.list_models()} <= set(names)
    assert all(map(timm.is_model, names))
    assert registered("no_such_library") == []


@pytest.mark.parametrize(
    "model", ["densenet121", "reference", "timm:resnet50.a1_in1k", "timm:tv_resnext50_32x4d", "a:B"]
)
def test_models_that_may_exist_are_accepted(model):
    """Those of the task, of torchvision, of timm by any of its names; the user's own come later."""
    assert check("--model", model, "--data", "http://host/shards") == 0


OWN = """
from my_layers import Late
class Net(Late): ...
for Made in (Net,): ...
"""


@pytest.mark.parametrize(
    "line",
    [
        *(f"--model my:{name}" for name in ("Net", "Late", "Made", "Net.inner")),
        *(f"--model {name}:Net" for name in ("late", "starred", "only_on_hosts")),
        "--optimizer torch.optim:RAdam",
        "--model maxvit_t --image-size 448",
        "--weights imagenet --model densenet121",
        "--weights imagenet --model timm:test_vit",
        "--weights imagenet --synthetic",
    ],
)
def test_what_sources_do_not_show_waits_for_the_ranks(line, tmp_path, monkeypatch):
    """What may be made while a module is imported, or be on hosts only."""
    for file, source in (
        ("my.py", OWN),
        ("late.py", "import my\ndef __getattr__(name): return getattr(my, name)"),
        ("starred.py", "from my import *"),
    ):
        (tmp_path / file).write_text(source)
    monkeypatch.chdir(tmp_path)
    data = () if "--synthetic" in line else ("--data", "http://host/shards")
    assert check(*line.split(), *data) == 0


@pytest.mark.parametrize(
    "line", ["--lr 0.5 --batch-size 8 --crop-area 0.5", "--data /only/on/hosts"]
)
def test_a_run_is_resumed_at_another_rate(line, make_shards, tmp_path):
    """Rates may change, and data may be on hosts only; what else differs waits for the ranks
    where config.json cannot be read.
    """
    data, run = make_shards(train=(4, 2)), tmp_path / "run"
    run.mkdir()
    settings = asdict(CatDog(width=16, data=str(data)))
    digest = open_source(str(data)).manifest.digest
    (run / "config.json").write_text(json.dumps({**settings, "data_sha256": digest}))
    mine = ("--width", "16", *line.split())
    if "--data" not in mine:
        mine = ("--data", str(data), *mine)
    for resume in (run, run / "checkpoints" / "step-00000002.pt"):
        assert check("--resume", str(resume), *mine) == 0
    (run / "config.json").write_text("{")
    assert check("--resume", str(run), *mine) == 0


def test_a_check_imports_no_torch():
    """It runs while hosts are reached, and must not be what is waited for."""
    args = ["--model", "resnet51", "--data", "x"]
    ended = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rackrun.training", "catdog", "check", *args],
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 64 and "no such model" in ended.stderr
    assert not [line for line in ended.stderr.splitlines() if line.endswith((" torch", " timm"))]
