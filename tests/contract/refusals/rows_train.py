"""Refusals of training: options, data, runs to resume, weights, code and tasks of one's own."""

import sys

from tests.lab import warm
from tests.lab.data import drawn
from tests.lab.refusal import Refusal
from tests.lab.sources import (
    below,
    changed,
    classes,
    cut,
    flipped,
    made_by,
    program,
    removed,
    tarred,
    with_fields,
)

KEPT = {f"{kind}/v{n}.jpg": drawn(f"{kind} v{n}") for kind in ("box", "disc") for n in range(2)}
PHOTOS = below("photos/train", classes(6, "box", "disc")) | below("photos/val", KEPT)
CONVERT = "rackrun convert folder photos data --shards 2 --workers 1"
DATA = {"data": made_by(CONVERT, name="data", **PHOTOS)}
TINY = (
    "--epochs 1 --batch-size 4 --width 4 --image-size 32 --device cpu --workers 0 --no-tensorboard"
    " --run-folder run"
)
CATDOG = "rackrun local catdog --data data"
RANK = "python -m rackrun.training catdog --data data"  # as torchrun starts it

# Values and pairs of options.
OPTIONS = [
    Refusal(f"python -m rackrun.training {task} --data data {options}", 64, names, DATA)
    for task, options, names in (
        ("catdog", "--recipe demmo", ("'demmo'", "demo")),
        ("catdog", "--recipe", "recipe"),
        ("catdog", "--epochs 0", "--epochs 0"),
        (
            "catdog",
            "--epochs 0 --batch-size 0 --workers -2",
            ("--epochs", "--batch-size", "--workers"),
        ),
        ("catdog", "--epochs many", ("--epochs", "many")),
        ("catdog", "--epocs 3", ("--epocs", "did you mean --epochs")),
        ("catdog", "--sched cosine", ("--sched", "type --lr-schedule")),
        ("catdog", "--model-ema", ("--model-ema", "type --ema-decay 0.9999")),
        ("catdog", "--lr nan", "--lr nan"),
        ("catdog", "--lr 1e400", "--lr"),
        ("catdog", "--ema-decay 1", "--ema-decay 1"),
        ("catdog", "--batch-size 10 --grad-accum-steps 4", "--grad-accum-steps 4"),
        ("catdog", "--synthetic", ("--synthetic", "--data")),
        ("catdog", "--weights x --resume y", ("--weights", "--resume")),
        ("catdog", "--gradient-checkpointing --compile", ("--gradient-checkpointing", "--compile")),
        ("catdog", "--track wanb", ("wanb", "did you mean wandb")),
        ("catdog", "--profile-steps 50", ("--profile-steps 50", "FIRST,LAST")),
        ("imagenet", "--global-batch 64", ("--global-batch", "--exact-epochs")),
        ("catdog", "--device cuda:0", ("--device cuda:0", "did you mean cuda")),
        ("catdog", "--optimizer adam", ("--optimizer adam", "did you mean adamw")),
        ("catdog", "--optimizer sgdd", ("--optimizer sgdd", "sgd")),
        ("catdog", "--lr-schedule cosin", ("--lr-schedule cosin", "cosine")),
        ("catdog", "data/x", ("data/x", "did you mean --data data/x")),
        ("imagenet", "--balance auto", ("--balance auto", "--exact-epochs")),
        ("catdog", "--steps-per-epoch 9", ("--steps-per-epoch", "--resampled")),
        ("classify", "--mean 0.5", ("--mean", "--std")),
        ("classify", "--mean 127.5 --std 0.5", ("127.5", "255")),
        ("classify", "--mean 0.5,0.5 --std 0.5", "--mean 0.5,0.5"),
        ("classify", "--mean x --std 0.5", "--mean x"),
        ("classify", "--mean nan --std 0.5", "--mean nan"),
        ("classify", "--mean 0.5 --std 0", "--std 0"),
        ("imagenet", "--trivial-augment --rand-augment 3", ("--trivial-augment", "--rand-augment")),
        ("imagenet", "--recipe torchvision-v2 --resampled", "--aug-repeats"),
        ("imagenet", "--max-train-samples 9", "--exact-epochs"),
        ("imagenet", "--model vit_b_16 --start-image-size 160", ("160", "--image-size")),
        ("imagenet", "--recipe timm-a3 --bce-threshold 0.3 --ema-steps 0x", ("--ema-steps", "0x")),
    )
] + [
    Refusal("rackrun local catdog --synthetic --balance auto", 64, ("--synthetic", "--balance")),
    Refusal("rackrun local catdog --epochs 2", 64, "--data FOLDER"),
    Refusal("rackrun local catdogg --epochs 2", 64, ("catdogg", "did you mean catdog")),
    Refusal(f"python -m rackrun.catdog {TINY}", 64, "--data FOLDER"),
]

# A password in a URL, before anything is asked for.
OPTIONS += [
    Refusal(
        f"python -m rackrun.training catdog --data {url}", 64, "export RACKRUN_CREDENTIALS=FILE"
    )
    for url in (
        "http://me:hunter2@10.0.0.1/shards/",
        "'https://me:hunter2@host/s-{0..9}.tar' --resampled --epoch-samples 9 --num-classes 2",
    )
]

# Classes and splits that the data do not have.
OPTIONS_OF_DATA = [
    Refusal(f"{RANK} {TINY} {options}", 64, names, DATA)
    for options, names in (
        ("--only-classes dodo", ("'dodo'", "box, disc")),
        ("--only-classes disc,dgo", ("'dgo'", "box, disc")),
        ("--class-weights disc", ("--class-weights", "'disc'", "NAME=WEIGHT")),
        ("--class-weights disc=2,dgo=1", "'dgo'"),
        ("--class-weights disc=0,box=0", "weights"),
        ("--loss-weights dgo=2", "'dgo'"),
        ("--loss-weights box", ("--loss-weights box", "NAME=WEIGHT")),
        ("--loss-weights box=-1", "--loss-weights box=-1"),
        ("--loss-weights box=0,disc=0", "--loss-weights box=0,disc=0"),
        ("--data nowhere", "nowhere"),
        ("--data data", "twice"),
        ("--data nowhere --resampled", ("several folders in --data", "--exact-epochs")),
        ("--eval-split test", ("'test'", "train, val")),
    )
]

# Options that change nothing.
WITHOUT_EFFECT = [
    Refusal(f"python -m rackrun.training {task} --data data {options}", 64, names, DATA)
    for task, options, names in (
        ("classify", "--epochs 2 --lr 0.1", ("--lr 0.1", "--head-epochs 2")),
        ("classify", "--epochs 1 --lr=1e-4", ("--lr", "--head-epochs 0")),
        ("classify", "--epochs 2 --patience 3", ("--patience 3", "--head-epochs 2")),
        ("classify", "--head-epochs 0 --head-lr 0.1", "--head-lr 0.1"),
        ("classify", "--recipe probe --layer-decay 0.7", "--layer-decay 0.7"),
        ("classify", "--momentum 0.5", ("--momentum 0.5", "--optimizer is adamw")),
        ("catdog", "--plateau-epochs 1", ("--plateau-epochs 1", "--lr-schedule plateau")),
        ("catdog", "--step-epochs 3", ("--step-epochs 3", "--lr-schedule step")),
        ("catdog", "--model resnet18 --width 8", ("--width 8", "--model is resnet18")),
        ("imagenet", "--momentum 0 --nesterov", ("--nesterov", "--momentum is 0")),
        ("imagenet", "--decay-all", ("--decay-all", "torchvision-v1")),
        ("imagenet", "--bce-threshold 0.2", ("--bce-threshold 0.2", "--loss bce")),
        ("imagenet", "--ema_steps 8", ("--ema-steps 8", "--ema-decay is 0")),
        ("imagenet", "--grow-from-epoch 3", ("--grow-from-epoch 3", "--image-size 224")),
        ("imagenet", "--cache-size 3", ("--cache-size 3", "--cache")),
        ("imagenet", "--exact-epochs --shuffle-buffer 9", "--shuffle-buffer 9"),
        ("imagenet", "--bad-samples-limit 9", "--bad-samples quarantine"),
    )
]
ALONE = {
    "data": made_by(
        "rackrun convert folder photos data --val-percent 0 --workers 1",
        name="data",
        **below("photos", classes(3, "box", "disc")),
    )
}
WITHOUT_EFFECT += [
    Refusal(
        f"{RANK} {TINY} {options}", 64,
        (f"{options} has no effect", "'val'"), ALONE,
    )
    for options in ("--patience 2", "--lr-schedule plateau", "--final best", "--eval-flip")
]  # fmt: skip

# Data that are none, or not whole.
ONLY_VAL = made_by(
    "rackrun convert index data",
    name="data",
    **{"data/set-val-0.tar": tarred(("a.jpg", drawn(1)), ("a.cls", b"0"))},
)
TAR = {"s-0.tar": ""}
PLAIN = "rackrun local catdog --data s-0.tar --resampled --epoch-samples 9 --num-classes 2"
PLAIN_TARS = [
    Refusal(f"rackrun local {task} {options}", 64, names, TAR)
    for task, options, names in (
        ("catdog", "--data s-{0..1}.tar", ("--resampled", "convert index")),
        ("catdog", "--data a.tar::b.tar", "--resampled"),
        ("catdog", "--data s-0.tar --resampled", ("--epoch-samples", "--classes", "--num-classes")),
        ("catdog", "--data s-0.tar --resampled --num-classes 2", "--epoch-samples"),
    )
] + [
    Refusal(f"{PLAIN} {options}", 64, names, TAR)
    for options, names in (
        ("--classes names", ("--classes", "--num-classes")),
        ("--steps-per-epoch 3", ("--steps-per-epoch", "--epoch-samples")),
        ("--eval-data v-{0..1}.tar", ("--eval-data", "v-0.tar")),
        ("--eval-data folder", ("--eval-data", "folder")),
        ("--eval-split test", ("--eval-split test", "--eval-data")),
        ("--cache kept", "--cache kept"),
        ("--only-classes 1", "--only-classes"),
        ("--loss-weights balanced", ("--loss-weights balanced", "convert index")),
        ("--patience 2", ("--patience 2", "--eval-data")),
    )
] + [
    Refusal(f"{PLAIN}".replace("s-0.tar", "s-{0..1}.tar"), 64, "s-1.tar", TAR),
    Refusal(f"{PLAIN}".replace("s-0.tar", "s-0.tar::s3://b/x.tar"), 64, "s3://", TAR),
    Refusal(f"{PLAIN}".replace("s-0.tar", "s-0.tar::s-0.tar"), 64, "named twice", TAR),
    Refusal(f"{PLAIN}".replace("--num-classes 2", "--classes no"), 64, "--classes no", TAR),
    Refusal(f"{CATDOG} --classes names", 64, "--classes names", DATA),
    Refusal(f"{CATDOG} --eval-data v.tar", 64, "--eval-data v.tar", DATA),
    Refusal(
        "rackrun local --config run.toml", 64, ("run.toml", "pipe:", "command line"),
        {"run.toml": "[catdog]\ndata = 's.tar::pipe:touch canary'\n"},
    ),
]  # fmt: skip
SHARDS = [
    Refusal(
        "rackrun local classify --data . --device cpu", 64, ("--data .", "runs", "--runs FOLDER"),
        classes(2, "box", "disc"),
    ),
    Refusal("rackrun local catdog --data nowhere", 64, "nowhere"),
    Refusal(
        "rackrun local catdog --data x.zip", 64, "rackrun convert folder x.zip OUT", {"x.zip": ""}
    ),
    Refusal("rackrun local catdog --data x.csv", 64, "convert csv x.csv OUT", {"x.csv": ""}),
    Refusal(
        "rackrun local catdog --data s-*.tar --resampled --epoch-samples 9 --num-classes 2", 64,
        ("no file s-*.tar", "s-{000..127}.tar"),
    ),
    Refusal(CATDOG, 64, ("data", "dataset.json"), {"data/": ""}),
    Refusal(CATDOG, 65, "dataset.json", DATA | {"data/dataset.json": changed(lambda data: b"{")}),
    Refusal(CATDOG, 65, "dataset.json", DATA | {"data/dataset.json": with_fields(version=2)}),
    Refusal("rackrun local catdog --data 's3://bucket/data'", 64, "s3://"),
    Refusal("rackrun local catdog --data 'pipe:touch canary'", 64, ("pipe:", "--resampled")),
    Refusal("rackrun local catdog --data data@7", 64, "version 7", DATA),
    Refusal(CATDOG, 64, ("'train'", "val"), {"data": ONLY_VAL}),
    *(
        Refusal(
            f"{RANK} {TINY} --exact-epochs", 65, file,
            DATA | {f"data/{file}": damage}, leaves="run", shows=shown,
        )
        for file, damage, shown in (
            ("photos-train-000000.tar", flipped(1600), "12 images in 2 classes"),
            ("photos-train-000001.tar", removed, "12 images in 2 classes"),
            ("photos-train.index.npy", flipped(-3), ()),
        )
    ),
]  # fmt: skip

# Ranks for which the settings are not made, and packages that the ranks do not have.
BARE = {"bare": program(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')}
RANKS = [
    Refusal(
        "rackrun local --nproc 5 catdog --data data --exact-epochs --global-batch 4", 64,
        ("5 ranks", "--global-batch 4"), DATA,
    ),
    Refusal(
        "rackrun local --nproc 40 catdog --data data --scale-lr --lr 0.1 --optimizer sgd", 64,
        ("40 ranks", "--scale-lr"), DATA,
    ),
    Refusal(
        f"{CATDOG} --compile", 64, ("--compile", "'no-such-compiler'"), DATA,
        {"CXX": "no-such-compiler"},
    ),
    *(
        Refusal(
            f"rackrun local --python ./bare catdog --data data {options}", 78, ("bare", package),
            DATA | BARE,
        )
        for package, options in (
            ("timm", "--model timm:resnet18"),
            ("mlflow", "--track mlflow"),
            ("wandb", "--track wandb"),
        )
    ),
    *(
        Refusal(f"{CATDOG} --epochs 1", 64, name, DATA | {name: ""})
        for name in ("rackrun.py", "rackrun/__init__.py")
    ),
]  # fmt: skip

# Runs that cannot be resumed.
SAME = "--width 4 --image-size 32 --batch-size 4 --device cpu"
FIRST_RUN = "runs/20260101-120000-catdog"
RUN = made_by(
    CONVERT,
    f"{RANK} {TINY.replace('folder run', 'folder ' + FIRST_RUN)}",
    name="runs",
    **PHOTOS,
)
RUNS = DATA | {"runs": RUN}
LAST = f"{FIRST_RUN}/checkpoints/step-00000003.pt"
RESUMED = [
    Refusal(f"rackrun local {words} --data data {options} --resume {FIRST_RUN}", 64, names, RUNS)
    for words, options, names in (
        ("catdog", SAME.replace("width 4", "width 8"),
         ("--width 8 here", "4 in the checkpoint")),
        ("catdog", f"{SAME} --seed 1", ("--seed 1 here", "0 in the checkpoint")),
        ("catdog", f"{SAME} --only-classes disc", "--only-classes disc here"),
        ("catdog", f"{SAME} --resampled --steps-per-epoch 2", "--steps-per-epoch 2"),
        ("catdog", f"{SAME} --layer-decay 0.5", "--layer-decay 0.5 here"),
        ("catdog", SAME.replace("size 4", "size 8 --resampled"),
         ("8 images per step here", "4 in the checkpoint")),
        ("catdog", f"{SAME} --exact-epochs --global-batch 9", "--global-batch 9 here"),
        ("--nproc 3 catdog", f"{SAME} --resampled", ("12 images per step", "as many ranks")),
    )
] + [
    Refusal(f"{CATDOG} {SAME} --resume latest --name x", 64, "x", RUNS),
    Refusal(f"{CATDOG} {SAME} --resume latest", 64, "catdog", DATA),
    Refusal(f"{CATDOG} {SAME} --resume runs/none", 64, "runs/none", RUNS),
    Refusal(
        f"{CATDOG} {SAME} --resume runs/20260102-120000-catdog", 64, "20260102-120000-catdog",
        RUNS | {"runs/20260102-120000-catdog/checkpoints/": ""},
    ),
    Refusal(f"{CATDOG} {SAME} --resume {LAST}", 64, LAST, RUNS | {LAST: cut(-5)}),
    Refusal(
        f"python -m rackrun.training catdog --synthetic --resume README {TINY}", 74, "README",
        {"README": "no checkpoint"},
    ),
]  # fmt: skip

# Files that are no weights.
FILES_OF_WEIGHTS = {
    "page.pt": (b"\n<!doctype html><html>", ("page.pt", "web page")),
    "empty.pt": (b"", ("empty.pt", "empty")),
    "text.pt": (b"hello, this is text\n", "text.pt"),
    "llm.pt": (b"GGUF\3\0\0\0" + bytes(200), ("llm.pt", "GGUF")),
    "zip.pt": (b"PK\3\4" + bytes(50), "zip.pt"),
    "cut.safetensors": (
        (80).to_bytes(8, "little") + b'{"a":{}}' + bytes(90),
        ("cut.safetensors", "safetensors"),
    ),
}
WEIGHTS = (
    [
        Refusal(f"{CATDOG} --weights {name}", 64, names, DATA | {name: data})
        for name, (data, names) in FILES_OF_WEIGHTS.items()
    ]
    + [
        Refusal(
            f"{RANK} {TINY} --weights {name}", 74, names,
            DATA | {name: data},
        )
        for name, data, names in (
            ("code.pt", b"\x80\x02cos\nsystem\n)R.", ("code.pt", "os.system")),
            ("short.pt", b"\x80\x02}q\x00.", "short.pt"),
            (
                "odd.safetensors",
                (57).to_bytes(8, "little")
                + b'{"a":{"dtype":"F4","shape":[2],"data_offsets":[0,1]}}    \0',
                ("odd.safetensors", "'F4'"),
            ),
        )
    ]
    + [
        Refusal(f"{CATDOG} --weights none.pt", 64, "--weights none.pt", DATA),
        Refusal(f"{CATDOG} --weights imagenet", 64, ("--weights imagenet", "--model catdog"), DATA),
        Refusal(
            f"{RANK} {TINY.replace('--width 4', '--width 8')}"
            f" --weights {FIRST_RUN}/final.pt",
            74, (f"{FIRST_RUN}/final.pt", "--model"), RUNS,
        ),
    ]
)  # fmt: skip

# Models, optimizers and schedules of one's own.
OWN = {
    "my.py": """
from torch import nn, optim
from my_layers import Late
class Net(nn.Linear):
    def __init__(self, classes): ...
class Bare: ...
for Made in (Net,): ...
def build(num_classes, width): ...
def lion(parameters, lr): ...
def triangle(step): ...
""",
    "cut.py": "(",
    "net.py": """
import torch
def number(num_classes): return num_classes
def one(params, lr): return lr
def bare(params): return torch.optim.SGD(params, lr=1)
def negative(step, steps): return -1
def words(step, steps): return "a half"
class Net(torch.nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(torch.nn.Flatten(), torch.nn.LazyLinear(num_classes))
""",
}
CODE = [
    Refusal(f"{CATDOG} {options}", 64, names, DATA | OWN)
    for options, names in (
        ("--model my:Nett", ("Nett", "did you mean my:Net")),
        ("--model myy:Net", "did you mean my:Net"),
        ("--model :Net", "MODULE:NAME"),
        ("--model ../my:Net", "MODULE:NAME"),
        ("--model my.py:Net", "did you mean my:Net"),
        ("--model my.Net", "did you mean my:Net"),
        ("--model cut:Net", "cut.py, line 1"),
        ("--model my:Net", ("my:Net", "num_classes")),
        ("--model my:Bare", ("my:Bare", "num_classes")),
        ("--model my:build", ("my:build", "num_classes")),
        ("--model zzzz", "--model zzzz"),
        ("--model resnet5", "did you mean resnet50"),
        ("--model cadog", "did you mean catdog"),
        ("--model \"__import__('os').getcwd()\"", "no such model"),
        ("--model vit_base_patch16_224", "did you mean timm:vit_base_patch16_224"),
        ("--model resnet50.a1_in1k", "did you mean timm:resnet50.a1_in1k"),
        ("--model timm:resnet1O", "did you mean timm:resnet"),
        ("--model timm:hf-hub:someone/theirs", "no such model"),
        ("--model vit_b_16 --image-size 100", ("--image-size 100", "--image-size 96")),
        ("--model maxvit_t --image-size 256", ("--image-size 256", "--image-size 224")),
        ("--optimizer my.Net", "did you mean my:Net"),
        ("--optimizer my:lion", ("my:lion", "params and lr")),
        ("--optimizer torch.optim:RAdamm", "did you mean torch.optim:RAdam"),
        ("--lr-schedule my:triangle", ("my:triangle", "step and steps")),
        ("--lr-schedule my:square", "square"),
        ("--optimizer net:bare", ("net:bare", "params and lr")),
        ("--lr-schedule torch.optim:SGD", ("torch.optim:SGD", "step and steps")),
        ("--model net:Net --model-args deep=2", ("net:Net", "num_classes and deep")),
    )
] + [
    Refusal(f"{CATDOG} {option}", 78, ("nomod", "MODULE:NAME"), DATA | OWN)
    for option in ("--model nomod:Net", "--optimizer nomod:lion")
] + [
    Refusal(
        f"{RANK} {TINY.replace('--width 4 ', '')} {options}",
        64, names, DATA | OWN, leaves="run", shows=shown,
    )
    for options, names, shown in (
        ("--model net:number", ("net:number", "torch.nn.Module", "int"), ()),
        ("--model net:Net --optimizer net:one", ("net:one", "float"), ()),
        (
            "--model net:Net --lr-schedule net:negative",
            ("net:negative", "-1 at step"),
            "12 images in 2 classes",
        ),
        (
            "--model net:Net --lr-schedule net:words",
            ("net:words", "'a half' at step"),
            "12 images in 2 classes",
        ),
        ("--model net:Net --freeze bdy", "--freeze bdy", "12 images in 2 classes"),
        ("--model reference", ("reference", "--gray", "--image-size 128"), ()),
        ("--model resnet18 --gray", ("resnet18", "--gray"), ()),
    )
]  # fmt: skip

CODE += [
    Refusal(
        f"{RANK} {TINY.replace('--width 4 ', '')} --model needy:Net", 70,
        ("needy.py, line 1", "'nowhere_installed'"),
        DATA | {"needy.py": "import nowhere_installed\n"},
    )
]  # fmt: skip

# A norm over one image, whose last layers have one value per channel.
CODE += [
    Refusal(
        f"{RANK} --model resnet18 {TINY.replace('--width 4 ', '')} {option}".replace(
            "--batch-size 4", "--batch-size 1"
        ),
        64, "a larger --batch-size", DATA, leaves="run", shows="12 images in 2 classes",
    )
    for option in ("", "--resampled")
]  # fmt: skip

# Tasks of one's own.
EXAMPLE = (warm.ROOT / "examples" / "own_task.py").read_text()
RIGHT = 'from rackrun.training.config import Config\nRECIPES = {"default": Config}'
TWO = "\n\nclass Two(nn.Module):\n    def forward(self, x):\n        return x, x\n"
TASKS = (
    [
        Refusal(f"rackrun local ./{name} --data data", code, (name, *names), DATA | {name: text})
        for name, code, names, text in (
            ("task_a.py", 64, ["RECIPES"], "TASK = 1"),
            ("task_b.py", 64, ["RECIPES"], "TASK = 1\nRECIPES = {}"),
            ("task_d.py", 64, ["line 3", "AttributeError"], "TASK = 1\n\nTASK.x"),
            ("task_f.py", 64, ["line 2"], "TASK = 1\n("),
            ("json.py", 64, ["json"], "TASK = 1"),
        )
    ]
    + [
        Refusal(
            f"python -m rackrun.training ./{name} --data data {TINY.replace('--width 4 ', '')}",
            code, (name, *names), DATA | {name: text},
        )
        for name, code, names, text in (
            ("task_c.py", 64, ["TASK"], f"TASK = 1\n{RIGHT}"),
            ("task_e.py", 70, ["line 1", "missing_here"], "import missing_here\nTASK = 1"),
        )
    ]
    + [
        Refusal(
            f"python -m rackrun.training ./mine.py --data data {TINY.replace('--width 4 ', '')}",
            64, names, DATA | {"mine.py": EXAMPLE.replace(right, wrong) + TWO}, leaves="run",
            shows=shown,
        )
        for right, wrong, names, shown in (
            ("lr: float = 0.05", "lr = 0.05", ("Settings.lr", "lr: float = 0.05"), ()),
            ("return nn.Seq", "nn.Seq", ("build()", "NoneType"), ()),
            ("return Tr", "Tr", ("transforms()", "NoneType"), ()),
            (", classes))", ", 7))", ("(4, 7)", "2 classes"), "12 images in 2 classes"),
            (", classes))", ", classes), Two())", ("tuple", "logits"), "12 images in 2 classes"),
        )
    ]
    + [
        Refusal(  # by a step on zeros, before there is a run
            "rackrun local ./mine.py --data data", 64, ("(2, 7)", "2 classes"),
            DATA | {"mine.py": EXAMPLE.replace(", classes))", ", 7))")},
        )
    ]
)  # fmt: skip

ROWS = [
    *OPTIONS,
    *OPTIONS_OF_DATA,
    *WITHOUT_EFFECT,
    *PLAIN_TARS,
    *SHARDS,
    *RANKS,
    *RESUMED,
    *WEIGHTS,
    *CODE,
    *TASKS,
]
