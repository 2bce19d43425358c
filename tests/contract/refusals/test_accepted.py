"""What may be right is not refused before a rank has seen it: settings, models, weights, runs."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.contract.refusals.rows_train import DATA, FIRST_RUN, LAST, RUNS, SAME
from tests.lab.run import run, write
from tests.lab.sources import changed, link

OWN = {
    "my.py": """
from torch import nn
from my_layers import Late
class Net(Late): ...
for Made in (Net,): ...
class Fits(nn.Linear):
    def __init__(self, num_classes, width=3, *, depth=2): ...
class Any(nn.Linear):
    def __init__(self, **options): ...
def passing(function): return lambda *parts, **options: function(parts)
@passing
def made(x): ...
""",
    "late.py": "import my\ndef __getattr__(name): return getattr(my, name)",
    "starred.py": "from my import *",
    "only_on_hosts.py": "from what_is_not_here import *",
}


def whole(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path)


def old(path: Path) -> None:
    torch.save({"weight": torch.zeros(3)}, path, _use_new_zipfile_serialization=False)


def safe(path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, path, metadata={"format": "pt"})


WEIGHTS = {"whole.pt": whole, "old.pt": old, "some.safetensors": safe}
SETTINGS = [
    "catdog --eval-split val",
    "catdog --grad-compression bfloat16",
    "catdog --gradient-checkpointing",
    "catdog --compile",
    "catdog --track wandb,mlflow --profile-steps 50,60",
    "catdog --balance auto --global-batch 64",
    "classify --epochs 3 --lr 0.1 --head-lr 0.1 --momentum 0 --no-nesterov",
    "classify --weights= --epochs 1 --lr 0.1 --patience 3 --plateau-epochs 3",
    "classify --recipe probe --epochs 1 --lr 0.1",
    "imagenet --recipe torchvision-v2 --ema-steps 8 --mixup 0 --cutmix 0",
    "mnist --momentum 0.5 --nesterov --eval-split val",
    "--nproc 32 catdog --scale-lr --lr 0.1 --optimizer sgd --batch-size 8",
    "--nproc 4 catdog --exact-epochs --global-batch 4",
]
MODELS = [
    *(
        f"catdog --model {name}"
        for name in ("densenet121", "timm:resnet50.a1_in1k", "timm:tv_resnext50_32x4d")
    ),
    *(f"catdog --model my:{name}" for name in ("Net", "Late", "Made", "Net.inner", "Fits", "Any")),
    *(f"catdog --model {name}:Net" for name in ("late", "starred", "only_on_hosts")),
    "catdog --optimizer torch.optim:RAdam",
    "catdog --optimizer my:made",
    "catdog --model maxvit_t --image-size 448",
    "catdog --weights imagenet --model densenet121",
    *(f"catdog --weights {name}" for name in WEIGHTS),
]
RESUMED = [
    f"catdog {SAME} --lr 0.3 --crop-area 0.5 --resume {FIRST_RUN}",
    f"catdog {SAME} --resume {LAST}",
    f"catdog {SAME} --resume latest",
    f"catdog {SAME} --resume runs/latest",
    f"--nproc 2 catdog {SAME.replace('size 4', 'size 2')} --resume {FIRST_RUN}",
    f"catdog {SAME} --weights {LAST}",
]
LATEST = RUNS | {"runs/latest": link(FIRST_RUN.removeprefix("runs/"))}
UNREADABLE = RUNS | {f"{FIRST_RUN}/config.json": changed(lambda data: b"{")}


@pytest.mark.parametrize(
    ("line", "files"),
    [
        *((line, DATA) for line in SETTINGS),
        *((line, DATA | OWN | WEIGHTS) for line in MODELS),
        *((line, LATEST) for line in RESUMED),
        (RESUMED[0], UNREADABLE),
    ],
)
def test_what_may_be_right_is_not_refused(line, files, tmp_path):
    write(tmp_path, files)
    result = run(f"rackrun local --dry-run {line} --data data", tmp_path)
    assert (result.code, result.err) == (0, ""), result
    # A run's own folder is the latest before its ranks read the option.
    assert "runs/latest" not in line or f"--resume {FIRST_RUN}" in result.out, result
