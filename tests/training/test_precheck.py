"""What is wrong with settings is found before a host is contacted, without torch."""

import json
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import torchvision

from rackrun.catdog.recipes import CatDog
from rackrun.errors import UsageError
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
    ("line", "says"),
    [
        ("--model my:Nett", "no class or function Nett in my; did you mean my:Net?"),
        ("--model myy:Net", "did you mean my:Net?"),
        ("--model :Net", "type MODULE:NAME"),
        ("--model cut:Net", "cut.py, line 1: '(' was never closed"),
        ("--optimizer torch.optim:RAdamm", "RAdamm in torch.optim; did you mean torch.optim:RAdam"),
        ("--model my.py:Net", "did you mean my:Net?"),
        ("--model zzzz", "no such model; type catdog, reference, a classification model of torchv"),
        ("--model my.Net", "no such model; did you mean my:Net?"),
        ("--model vit_base_patch16_224", "did you mean timm:vit_base_patch16_224?"),
        ("--model resnet50.a1_in1k", "did you mean timm:resnet50.a1_in1k?"),
        ("--model resnet5", "did you mean resnet50"),
        (
            "--optimizer adam",
            "not one of sgd, adamw, lamb, or your own as MODULE:NAME; did you mean adamw?",
        ),
        ("--optimizer my.Net", "did you mean my:Net?"),
        ("--device cuda:0", "not one of auto, cpu, cuda; did you mean cuda?"),
        ("data/x", "data/x: not expected here; did you mean --data data/x?"),
        ("--lr-schedule my:triangle", "no class or function triangle in my; type MODULE:NAME"),
        *((f"--model my:{name}", "") for name in ("Net", "Late", "Made", "Net.inner")),
        *((f"--model {name}:Net", "") for name in ("late", "starred", "only_on_hosts", "package")),
        ("--optimizer torch.optim:RAdam", ""),
        ("--model vit_b_16 --image-size 100", "sides of a multiple of 16; type --image-size 96"),
        ("--model maxvit_t --image-size 256", "sides of a multiple of 224; type --image-size 224"),
        ("--model maxvit_t --image-size 448", ""),
        ("--weights imagenet", "torchvision has none for --model catdog; type --weights ''"),
        ("--weights imagenet --model my:Net", "torchvision has none for --model my:Net"),
        ("--weights imagenet --model densenet121", ""),
        ("--weights imagenet --model timm:test_vit", ""),
        ("--weights imagenet --synthetic", ""),
    ],
)
def test_what_sources_show_to_be_absent_is_refused(line, says, tmp_path, monkeypatch):
    """What may be made while a module is imported, or be on hosts only, waits for the ranks."""
    (tmp_path / "package").mkdir()
    for file, source in (
        *(("my.py", OWN), ("cut.py", "("), ("package/Net.py", ""), ("package/__init__.py", "")),
        *(("late.py", "def __getattr__(name): ..."), ("starred.py", "from my import *")),
    ):
        (tmp_path / file).write_text(source)
    monkeypatch.chdir(tmp_path)
    typed = (*line.split(), *(() if "--synthetic" in line else ("--data", "http://host/shards")))
    if not says:
        assert check(*typed) == 0
        return
    with pytest.raises(UsageError, match=re.escape(says)):
        check(*typed)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--only-classes", "disc,dgo"), "no class 'dgo': there are "),
        (("--class-weights", "disc=2,dgo=1"), "no class 'dgo'"),
        (("--loss-weights", "dgo=2"), "no class 'dgo'"),
        (("--extra-data", "{other}=1"), "has other classes than"),
    ],
)
def test_classes_are_held_against_the_data(args, says, make_shards):
    """A folder on this machine is checked for its classes; other data wait for the ranks."""
    data = make_shards(train=(4, 2), val=(2, 2))
    other = make_shards(train=(4, 2), val=(2, 2), classes=3)
    option, value = args
    typed = (option, value.format(other=other))
    with pytest.raises(UsageError, match=says):
        check(*typed, "--data", str(data))
    assert check(*typed, "--data", "/only/on/hosts") == 0
    assert check("--only-classes", "disc", "--loss-weights", "balanced", "--data", str(data)) == 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--width 32", "not a run to resume: --width 32 here, 16 in the checkpoint"),
        ("--model densenet121 --seed 1", "--seed 1 here, 0 in the checkpoint; --model densenet121"),
        ("--only-classes disc", "--only-classes disc here, no --only-classes in the checkpoint"),
        ("--data {other}", "--data {other} here, {data} in the checkpoint"),
        ("--lr 0.5 --batch-size 8 --crop-area 0.5", ""),
        ("--data /only/on/hosts", ""),
    ],
)
def test_a_run_is_resumed_with_what_it_was(line, says, make_shards, tmp_path):
    """Another width or data set are found in its config.json; rates may change."""
    data, other = make_shards(train=(4, 2)), make_shards(train=(4, 2), classes=3)
    run = tmp_path / "run"
    run.mkdir()
    settings = asdict(CatDog(width=16, data=str(data)))
    digest = open_source(str(data)).manifest.digest
    (run / "config.json").write_text(json.dumps({**settings, "data_sha256": digest}))
    as_typed = line.format(other=other).split()
    width = () if "--model" in as_typed else ("--width", "16")  # of the task's own model
    mine = ("--data", str(data), *width, *as_typed)
    for resume in (run, run / "checkpoints" / "step-00000002.pt"):
        if not says:
            assert check("--resume", str(resume), *mine) == 0
            continue
        with pytest.raises(UsageError, match=re.escape(says.format(other=other, data=data))):
            check("--resume", str(resume), *mine)
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
