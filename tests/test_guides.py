"""Every command that the guides print, typed in a clone with small data, on four hosts.

A guide is typed from top to bottom. What makes a command quick, or leads it to the data of the
test, is in `CHANGED`; what is not typed is in `UNTYPED`, with the reason.
"""

import functools
import http.server
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.catdog.drawing import jpeg
from tests.lab.clone import ROOT, Clone
from tests.lab.data import drawn, mnist, twenty_classes, write_tar
from tests.lab.pages import SMALL, lines_of
from tests.lab.run import write

pytestmark = pytest.mark.long

GUIDES = ROOT / "docs" / "guides"
CLASSES, IMAGES = ("circle", "square"), 20
TRAINS = {
    **SMALL,
    "imagenet": "--model shufflenet_v2_x0_5 --image-size 32 --batch-size 4",
    "mnist": "",
    "./own_task.py": "--batch-size 8",
}
"""What is typed behind a task, which then trains for one epoch."""

CHANGED = [
    (r"(?<=[ '=])/(data|mnt|shared|nvme)/", "mounted/"),
    (r"--epochs \d+|--global-batch 1024|--model (densenet121|timm:\S+)(?! --c)", ""),
    (r"--weights ''", ""),
    (r"\{0000\.\.1023\}", "{0000..0001}"),
    (r"\{(000?\.\.)(127|63)\}", r"{\g<1>1}"),
    (r"--epoch-samples \d+ --num-classes 1000", "--epoch-samples 16 --num-classes 2"),
    (r"--epoch-samples \d+", "--epoch-samples 16"),
    (r"aws s3 cp s3://bucket/(\S+) -", r"cat mounted/\1"),
    (r"(before|after)\.py (\S+) 20", r"\1.py \2 1"),
    (r"10\.0\.0\.1:8080/", "127.0.0.1:8080/"),
    (r"--address 10\.0\.0\.1", "--address 127.0.0.1"),
    (r"--hosts-needed 4", "--hosts-needed 2"),
    (r"convert imagenet (\S+ \S+)", r"convert imagenet \1 --subset"),
    (r"--recipe ffcv16", "--recipe ffcv16 --workers 0"),
]
UNTYPED = {
    r"^(pip|python3 -m pip|\.venv/bin/(python -m pip|jupyter)|hf|ssh-|tensorboard|ls) ?": "others'",
    r"^(srun|sbatch|salloc) ": "typed in tests/slurm",
    r"^\./run-ray ": "typed in tests/launcher/commands/test_run_ray.py",
    r"--on head": "typed in tests/launcher/commands/test_on.py",
    r"--image rackrun:1": "typed in tests/launcher/run/test_containers.py",
    r"--include tls\.conf": "typed in tests/nginx/test_serve.py",
    r"--sync-wheels wheels": "typed in tests/launcher/files/test_sync.py",
    r"--gpus-needed": "needs GPUs",
    r"WANDB_MODE=online": "needs a server of Weights & Biases",
    r"convert hf uoft-cs/cifar10": "needs a download",
}
ENDLESS = {r" attach ": " | ", r" logs .*--follow": "epoch 1", r"report --watch": ""}
"""Commands that end by Ctrl-C, after they have printed this."""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Yield a clone whose user has everything that the guides name."""
    made = Clone(tmp_path_factory.mktemp("clone"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(clone: Clone) -> Iterator[str]:
    """Yield the address of a plain server of the folder `mounted`."""
    folder = clone.folder / "mounted"
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def images(folder: Path, *classes: str, first: int = 0) -> None:
    """Write the images of a user: a folder for each class."""
    for name in classes:
        for n in range(first, first + IMAGES):
            write(folder, {f"{name}/{n}.jpg": drawn(f"{name} {n}", (64, 48))})


def prepare(clone: Clone, page: str) -> None:
    """Give the user what a guide begins with."""
    for name in ("data", "runs", "mounted"):
        shutil.rmtree(clone.folder / name, ignore_errors=True)
    for folder in (clone.home / "images", *(clone.folder / n for n in ("photos", "data/photos"))):
        images(folder, *CLASSES)
    images(clone.folder / "more", "circle", first=IMAGES)
    for name in ("photo.jpg", "my-cat.jpg", "image.jpg"):
        write(clone.folder, {name: drawn(name, (64, 48))})
    write(clone.folder, {"names.txt": "circle\nsquare\n", "notify.py": "", "train.py": SCRIPT})
    text = (GUIDES / f"{page}.md").read_text()
    for block in re.findall(r"^```python\n(.*?)^```", text, re.M | re.S):
        for name, mark in NAMED.items():
            if mark in block:
                write(clone.folder, {name: block})
    code, printed = clone.typed("./run-local convert folder ~/images data/shards")
    assert code == 0, printed
    PREPARED.get(page, lambda clone: None)(clone)
    (clone.folder / "mounted").mkdir(exist_ok=True)
    for name in ("shards", "flowers", "photos"):
        for folder in ("mounted", "data"):
            if not (clone.folder / folder / name).exists():
                (clone.folder / folder / name).symlink_to(clone.folder / "data" / "shards")


SCRIPT = "import os; print('rank', os.environ['RANK'])\n"
NAMED = {"my_models.py": "class Net", "own_task.py": "TASK = Task(", "script.py": "report(step="}
"""Files that blocks of the guides are, and what such a block holds."""


def trained(clone: Clone) -> None:
    """Train the run that a guide names."""
    code, printed = clone.typed(typed("./run-local catdog --data data/shards", clone))
    assert code == 0, printed


def for_evaluate(clone: Clone) -> None:
    trained(clone)
    write(clone.folder, {"my_models.py": MODELS, "imagenet.txt": "\n".join(map(str, range(1000)))})
    for n in range(3):
        write(clone.folder / "photos", {f"{n}.jpg": drawn(n, (64, 48))})
    run_script(clone, WEIGHTS)


MODELS = """
from torch import nn
class Net(nn.Sequential):
    def __init__(self, num_classes):
        super().__init__(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, num_classes))
"""
WEIGHTS = """
import my_models, torch, torchvision
torch.save(my_models.Net(2).state_dict(), "net.pth")
torch.save(torchvision.models.resnet50().state_dict(), "resnet50.pth")
"""


def run_script(clone: Clone, script: str) -> None:
    """Run a Python script of the user's in the clone."""
    write(clone.folder, {"prepare.py": script})
    code, printed = clone.typed("python prepare.py")
    assert code == 0, printed


CHOSEN = "key,action,new_class\ncircle_1,drop,\nsquare_2,relabel,circle\n"
"""doctor.csv after a user has decided."""


def for_convert(clone: Clone) -> None:
    rows = [f"{name}/{n}.jpg,{name}" for name in CLASSES for n in range(IMAGES)]
    write(clone.folder, {"labels.csv": "path,label\n" + "\n".join(rows)})
    images(clone.folder, *CLASSES)
    cats_and_dogs(clone)
    twenty_classes(8, 2).archives(clone.home / "ILSVRC2012")
    write(clone.home / "mnist-raw", mnist(200, 40))
    run_script(clone, SAVED)


SAVED = """
from pathlib import Path
from datasets import ClassLabel, Dataset, Features, Image
files = sorted(Path.home().glob("images/*/*"))
rows = {
    "image": [{"bytes": file.read_bytes(), "path": None} for file in files],
    "label": [file.parent.name for file in files],
}
kinds = Features({"image": Image(), "label": ClassLabel(names=["circle", "square"])})
saved = Dataset.from_dict(rows, features=kinds)
saved.save_to_disk(Path.home() / "saved-set")
saved.to_parquet(Path.home() / "parquet-files" / "train-00000-of-00001.parquet")
"""


def cats_and_dogs(clone: Clone) -> None:
    import zipfile

    with zipfile.ZipFile(clone.folder / "train.zip", "w") as archive:
        for kind in ("cat", "dog"):
            for n in range(IMAGES):
                archive.writestr(f"train/{kind}.{n}.jpg", jpeg(kind, 0, n))


def for_imagenet(clone: Clone) -> None:
    twenty_classes(8, 2).archives(clone.folder / "mounted" / "imagenet")


def for_mnist(clone: Clone) -> None:
    for folder in ("mnist-raw", "data/MNIST/raw", "mounted/data/MNIST/raw"):
        write(clone.folder / folder, mnist())
    write(clone.folder, {"digit.png": drawn("digit", (28, 28), "PNG")})


def for_tars(clone: Clone) -> None:
    mounted = clone.folder / "mounted"
    for name, count in (("in1k-train", 2), ("in1k-validation", 2), ("train", 2)):
        for n in range(count):
            digits = {"in1k-train": 4, "in1k-validation": 2, "train": 3}[name]
            members = [
                (f"{name}{n}_{k}.{end}", data)
                for k in range(12)
                for end, data in (("jpg", drawn(f"{name}{n}{k}")), ("cls", b"%d" % (k % 2)))
            ]
            for folder in ("", "wds", *(("imagenet-wds",) if "in1k" in name else ())):
                write_tar(mounted / folder / f"{name}-{n:0{digits}}.tar", members)
            if name == "train":
                write_tar(clone.folder / "tars" / f"part-{n}.tar", members)


def for_runs(clone: Clone) -> None:
    """Write the settings file of the page, with small settings."""
    (text,) = re.findall(r"^```toml\n(.*?)^```", (GUIDES / "runs.md").read_text(), re.M | re.S)
    text = text.replace("/mnt/", "mounted/").replace("epochs = 90", QUICK)
    write(clone.folder, {"run.toml": text})


QUICK = 'epochs = 1\nmodel = "shufflenet_v2_x0_5"\nimage-size = 32\nbatch-size = 4'

PREPARED = {
    "runs": for_runs,
    "change-data": trained,
    "convert": for_convert,
    "evaluate": for_evaluate,
    "fine-tune": cats_and_dogs,
    "imagenet": for_imagenet,
    "mnist": for_mnist,
    "tars": for_tars,
}


def typed(line: str, clone: Clone, server: str = "") -> str:
    """Return a line as it is typed: quick, and with the data of the test."""
    for pattern, text in CHANGED:
        line = re.sub(pattern, text, line)
    line = line.replace("https://server", server)
    for name in re.findall(r"runs/20260101-120000-([\w-]+)", line):
        newest = max((clone.folder / "runs").glob(f"2*-{name}"))
        line = line.replace(f"runs/20260101-120000-{name}", f"runs/{newest.name}")
    words = line.split()
    task = next((task for task in TRAINS if task in words), "")
    if "rerun" in words and "--seed" in words:
        return f"{line} --epochs 1"
    if not task or {"--help", "--check", "--", "convert", "predict", "evaluate"} & set(words):
        return line
    quick = TRAINS[task]
    for option in re.findall(r"--[\w-]+", line):
        quick = re.sub(rf"{option} \S+ ?", "", quick)
    epochs = 999 if "--detach" in words else 1
    steps = " --steps-per-epoch 2" if "--synthetic" in words and "--steps" not in line else ""
    return f"{line} {quick} --epochs {epochs}{steps}"


@pytest.mark.parametrize("page", sorted(path.stem for path in GUIDES.glob("*.md")))
def test_the_commands_of_a_guide(clone, server, page):
    """Each ends well in the order in which they are printed."""
    prepare(clone, page)
    servers, failed, run_id = [], [], ""
    for line in lines_of(GUIDES / f"{page}.md"):
        if any(re.search(pattern, line) for pattern in UNTYPED):
            continue
        made = re.search(
            r"convert (?:(?:folder|csv|hf|catdog|imagenet|mnist) \S+|.* --out) (\S+)", line
        )
        if made and (clone.folder / made[1]).is_dir() and not (clone.folder / made[1]).is_symlink():
            shutil.rmtree(clone.folder / made[1])
        if "doctor.csv" in line:
            write(clone.folder, {"doctor.csv": CHOSEN})
        line = typed(line, clone, server).replace("3fa81c02", run_id)
        if " serve " in line:
            servers.append(started(clone, line))
            continue
        until = next((text for pattern, text in ENDLESS.items() if re.search(pattern, line)), "")
        code, printed = clone.typed(line, until)
        if "--detach" in line and code == 0:
            run_id = run_id or printed.split()[-1]
        if code not in ({0, 130} if until else {0}):
            failed.append(f"$ {line}\n{printed}")
    for server in servers:
        server.send_signal(signal.SIGINT)
        server.communicate()
    assert not failed, "\n".join(failed)


def started(clone: Clone, line: str) -> subprocess.Popen[str]:
    """Type a line in another terminal, and wait for its first line."""
    server = subprocess.Popen(
        ["bash", "-c", f"exec {line}"],
        cwd=clone.folder,
        env=clone.environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout and server.stdout.readline()
    return server
