"""Every command that README and the how-to pages print works, typed as it is printed.

A page is typed from top to bottom in a clone with small data, on hosts behind real sshd. What needs
more than that (GPUs, an hour, a cluster, a package index) is read by the parser that would take it.
"""

import ast
import csv
import json
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from PIL import Image

from bench.messy import write_messy
from rackrun.catdog.demo import Demo
from rackrun.catdog.drawing import jpeg
from rackrun.commands import LAUNCHES, is_command
from tests.lab.clone import ROOT, Clone
from tests.lab.data import digits, mnist
from tests.lab.options import OPTION, known_options
from tests.lab.run import write

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "howto").glob("*.md"))]
TAKE_MINUTES = (
    *(
        "doctor.md",
        "detached-runs.md",
        "exact-epochs.md",
        "gpus.md",
        "mnist.md",
        "own-model.md",
        "own-task.md",
        "run-on-hosts.md",
        "sweeps.md",
        "versions.md",
    ),
)
"""Pages that are typed in `--long`: other tests hold what they show. Elsewhere they are read."""

LONG = pytest.mark.long
IMAGES = 20
ADDRESS = "127.0.90.1"
DETACHED_RUN = "3fa81c02"

OURS = re.compile(r"(?:\./run-(?:local|ssh|ray)|(?<!install )rackrun)(?!\S).*")
TESTED_ELSEWHERE = (
    *("examples/mnist", r"hosts\.txt mnist", "--exclude", r"\.onnx", r"\.pt2", "--track"),
    *(
        "index 'https",
        "index tars/",
        "append tars",
        r"append \S*/data/more",
        "--task-",
        "convert imagenet",
        "convert hf",
    ),
    *("-imagenet/final.pt image", r"-sync hosts\.txt$", r"run-ssh hosts\.txt$", "--nproc 2 catdog"),
    r"(?<!--detach hosts\.txt )imagenet --(?:data|synthetic|epochs)",
)
NEEDS_MORE = (
    *(r"--weights (resnet50|net)\.pth", r"--include tls\.conf"),  # files of the reader's
    rf"--data http://{re.escape(ADDRESS)}:8080/",  # a server in another terminal
    *("srun", "salloc", "sbatch", "mpirun", "NNODES", "local node", "run-ray", "--slurm"),
    *("--image ", ":0,1", "gpu01:8000", "--certificate", "timm:", "--hosts-needed", "--config"),
    *(r"rerun (?!runs)", "lr-tenth", r"ssh .*\./own_task", "--gpus-needed"),
    *(r"classify --data (?!.*--weights '')", r"hosts\.txt classify"),  # published weights
)
ONLY_READ = re.compile("|".join((*TESTED_ELSEWHERE, *NEEDS_MORE)))
"""Lines that would take minutes, or need a scheduler, a container, GPUs or a server elsewhere."""

FOREIGN = (
    *(
        "[",
        ".venv/bin/",
        "git",
        "docker",
        "hf",
        "iptables",
        "mmdebstrap",
        "pip",
        "ssh-copy-id",
        "ssh-keygen",
        "tensorboard",
    ),
)
"""What lines of other programs begin with which are not typed."""

ENDLESS = {
    r"serve data/shards --address [\d.]+$": "Ctrl-C",
    r"report --watch": "report.html",
    r"attach |--follow": "epoch",
}
"""Lines that last until Ctrl-C, and what they print when they are ready."""

SMALL = {
    "catdog": "--image-size 32 --width 4 --batch-size 8 --epochs 1",
    "imagenet": "--model shufflenet_v2_x0_5 --image-size 32 --batch-size 4 --epochs 2",
    "mnist": "--epochs 1",
    "./own_task.py": "--epochs 1",
    "classify": "--image-size 32 --batch-size 8 --epochs 1 --head-epochs 0 --device cpu",
}
"""What is typed behind a command that trains, so that it takes seconds."""

FIRST_RUN = "./run-local catdog --data data/shards"
"""Typed before any page, and not again."""


def lines_of(page: Path) -> list[str]:
    """Return the commands of a page: lines after a prompt, all lines of a script."""
    text = re.sub(r"\\\n *", "", page.read_text())
    result = []
    for kind, block in re.findall(r"^```(console|bash)\n(.*?)^```", text, re.M | re.S):
        prompt = "$ " if kind == "console" else ""
        lines = [line for line in block.splitlines() if line.startswith(prompt)]
        result += [line.removeprefix(prompt) for line in lines if line[:1] != "#"]
    return result


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Yield a clone whose user has images, archives, and a trained model."""
    made = Clone(tmp_path_factory.mktemp("clone"))
    draw(made)
    write_files(made)
    for line in (
        "./run-local convert folder ~/images data/shards",
        f"{FIRST_RUN} {SMALL['catdog']}",
        "cp -r data/shards data/flowers; cp -r data/shards data/photos",
        f"mkdir -p {made.elsewhere}/{{shared,mnt}}",
        f"for name in shared/flowers mnt/shards; do cp -r data/shards {made.elsewhere}/$name; done",
    ):
        code, printed = made.typed(line)
        assert code == 0, printed
    yield made
    made.close()


def draw(clone: Clone) -> None:
    """Draw few images, and put them where the pages have theirs."""
    images = {
        f"{kind}.{n}.jpg": jpeg(kind, 0, n) for kind in ("cat", "dog") for n in range(IMAGES // 2)
    }
    for name, data in images.items():
        for root in (clone.home / "images", clone.folder / "photos"):
            (root / name[:3]).mkdir(parents=True, exist_ok=True)
            (root / name[:3] / name).write_bytes(data)
    for name in ("my-cat.jpg", "photo.jpg", "image.jpg", "photos/1.jpg"):
        (clone.folder / name).write_bytes(images["cat.0.jpg"])
    demo = Demo(clone.folder / "data" / "demo")
    demo.out.mkdir(parents=True)
    for path, comment in ((clone.folder / "train.zip", ""), (demo.archive, demo.stamp)):
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = comment.encode()
            for name, data in images.items():
                archive.writestr(f"train/{name}", data)
    with (clone.folder / "labels.csv").open("w", newline="") as table:
        rows = ((f"photos/{name[:3]}/{name}", name[:3]) for name in images)
        csv.writer(table).writerows([("path", "label"), *rows])


def write_files(clone: Clone) -> None:
    """Write the other files that pages name, those that they print as they are printed."""
    Image.fromarray(digits()[0][0]).save(clone.folder / "digit.png")
    for folder in (clone.folder, clone.home):
        write(folder / "mnist-raw", mnist(60, 20, packed=True))
    write(clone.folder / "data" / "MNIST" / "raw", mnist(60, 20))
    for part in ("train", "val"):
        write_tar(clone, part)
    write_printed(clone.folder)
    subprocess.run([sys.executable, "draw_shapes.py"], cwd=clone.folder, check=True)
    write_messy(clone.folder / "messy")
    (clone.folder / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    (clone.folder / "notify.py").write_text("import json, sys; json.load(sys.stdin)['verdict']\n")
    shutil.copy(clone.folder / "hosts.txt", clone.folder / "rack2.txt")


def write_printed(folder: Path) -> None:
    """Write the files that pages print."""
    printed = {
        "script.py": ("own-script.md", "python"),
        "my_models.py": ("own-model.md", "python"),
        "own_task.py": ("own-task.md", "python"),
        "draw_shapes.py": ("versions.md", "python"),
        "run.toml": ("settings-files.md", "toml"),
    }
    for name, (page, kind) in printed.items():
        text = (ROOT / "docs" / "howto" / page).read_text()
        block, *_ = re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)
        (folder / name).write_text(block)


def write_tar(clone: Clone, split: str) -> None:
    """Write a tar as webdataset does: an image and its class, a number."""
    path = clone.elsewhere / "data" / "imagenet-wds" / f"imagenet-{split}-000000.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        images = sorted((clone.folder / "photos").glob("*/*.jpg"))
        for image in images[split == "val" :: 2]:  # no image is in both splits
            label = path.with_name("label")
            label.write_text(str(int(image.parent.name == "dog")))
            tar.add(image, f"{split}-{image.stem.replace('.', '-')}.jpg")
            tar.add(label, f"{split}-{image.stem.replace('.', '-')}.cls")
    label.unlink()


NOTEBOOKS = ROOT / "notebooks"
SHOWN = ("done {0: 0, 1: 0} {'gpu01': 'clean', 'gpu02': 'clean'}", "image/png")
"""What the outputs of ssh-demo.ipynb hold when it has done its work."""


def read(line: str, known: set[str]) -> None:
    """Check that a line which is not typed calls a command, and gives it options that there are."""
    ours = OURS.search(line)
    assert ours or "examples/slurm.sbatch" in line, line
    words = shlex.split(ours[0] if ours else line.partition("slurm.sbatch")[2], comments=True)
    if words[:1] == ["rackrun"]:
        assert is_command(words[1:2]) or words[1] in LAUNCHES, line
    typed = takewhile(lambda word: word != "--", words)
    options = {name for word in typed for name in OPTION.findall(word.partition("=")[0])}
    assert options <= known, f"{line}: {options - known}"


class Typist:
    """Types the lines of the pages, and those that train alike only once."""

    def __init__(self, clone: Clone) -> None:
        self.clone = clone
        self.known = known_options(clone.folder)
        self.seen = {FIRST_RUN}
        self.run = ""

    def type(self, line: str) -> None:
        """Type a line, and see that it ends well; only read what needs more than is here."""
        line = self.meant(line)
        ours = OURS.search(line)
        of_no_run = DETACHED_RUN in line  # no page before has detached one
        if ONLY_READ.search(line) or of_no_run or (ours and self.is_known(line)):
            return read(line, self.known)
        if not ours and line.startswith(FOREIGN):
            return None
        if made := re.search(
            r"convert (?:folder|imagefolder|csv|catdog|mnist) \S+ (data/\S+)", line
        ):
            shutil.rmtree(self.clone.folder / made[1], ignore_errors=True)
        until = next((message for like, message in ENDLESS.items() if re.search(like, line)), "")
        code, printed = self.clone.typed(self.shortened(line), until)
        assert code in ((0, 130) if until else (0,)), f"$ {line}\n{printed}"
        if line.startswith("./run-ssh") and "--detach" in line:
            self.run = printed.split()[-1]
        return None

    def meant(self, line: str) -> str:
        """Return a line with the places and names of this clone, without its comment."""
        line = re.sub(r" +# .*", "", line)
        line = re.sub(
            r"(?<=[ =])/(data|mnt|shared|nvme|results)/", rf"{self.clone.elsewhere}/\1/", line
        )
        for name, task in re.findall(r"runs/(\d{8}-\d{6}-(\w+))", line):
            self.name_a_run(name, task)
        if "runs/latest" in line:
            self.name_a_run("latest", "catdog", newest=False)
        line = line.replace("$SLURM_ARRAY_TASK_ID", "0").replace("$SLURM_JOB_ID", "1")
        return line.replace("10.0.0.1", ADDRESS).replace(DETACHED_RUN, self.run or DETACHED_RUN)

    def name_a_run(self, name: str, task: str, newest: bool = True) -> None:
        """Give the newest run of a task, or the newest at all, the name that is printed."""
        runs = self.clone.folder / "runs"
        (runs / name).unlink(missing_ok=True)
        folders = [path for path in sorted(runs.glob("2*")) if not path.is_symlink()]
        trained = [path for path in folders if (path / "metrics.jsonl").exists()]
        of_task = [path for path in trained if path.name.endswith(f"-{task}")]
        (runs / name).symlink_to((of_task or trained or folders)[-1 if newest else 0].name)

    def is_known(self, line: str) -> bool:
        """Return whether a line trains, and another one that does the same has been typed."""
        same = re.sub(r"^rackrun (?=local|ssh)", "./run-", line)
        same = re.sub(r" --(?:sync|epochs \d+)", "", same)
        expected = same.startswith("./run-") and same in self.seen
        self.seen.add(same)
        return expected

    def shortened(self, line: str) -> str:
        """Return a line that trains with settings for a test instead of those on the page."""
        args = line.split()
        task = next((task for task in SMALL if task in args), "")
        trains = line.startswith(("./run-", "rackrun local", "rackrun ssh"))
        asks = {"--check", "--help", "--", "convert"} & set(args)
        if not task or not trains or asks:
            return line
        for option in SMALL[task].split()[::2]:
            line = re.sub(rf" {option}[ =]\S+", "", line)
        return f"{line} {SMALL[task]}"


@pytest.fixture(scope="module")
def typist(clone: Clone) -> Typist:
    return Typist(clone)


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.long] * (page.name in TAKE_MINUTES)) for page in PAGES],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_the_commands_of_a_page(typist, page, monkeypatch):
    """Each ends well in the order in which they are printed, or is at least understood."""
    monkeypatch.chdir(typist.clone.folder)
    shutil.rmtree("data/shards", ignore_errors=True)  # the page before may have made others
    shutil.copytree("data/flowers", "data/shards")
    for line in lines_of(page):
        typist.type(line)


def test_the_demo_trains_on_hosts(clone):
    """The line of the quick start that names no task: both hosts train on what was drawn here."""
    quick_start = lines_of(ROOT / "docs" / "howto" / "quick-start.md")
    (line,) = (line for line in quick_start if re.search(r"run-ssh .*hosts\.txt +# the demo", line))
    code, printed = clone.typed(line)
    assert code == 0, printed
    assert "gpu01:0 | 2 ranks on 2 hosts" in printed
    assert "rackrun: accuracy: " in printed
    run = max(path for path in (clone.folder / "runs").glob("2*") if not path.is_symlink())
    assert json.loads((run / "config.json").read_text())["recipe"] == "demo"
    assert (run / "final.pt").exists()


def test_the_launches_of_long_pages_have_options_that_there_are(tmp_path):
    """Those of pages that are typed in `--long` only."""
    known = known_options(tmp_path)
    for name in TAKE_MINUTES:
        for line in lines_of(ROOT / "docs" / "howto" / name):
            if line.startswith(("./run-", "rackrun local", "rackrun ssh")):
                read(re.sub(r" +# .*", "", line), known)


@pytest.mark.long  # README's lines do the same
def test_a_notebook(clone, monkeypatch):
    """Each cell runs, on the data and the hosts of the clone; committed outputs are none."""
    import nbclient
    import nbformat

    notebook = nbformat.read(NOTEBOOKS / "ssh-demo.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    shutil.rmtree(clone.folder / "data" / "shards")
    for variable, value in clone.environment.items():
        monkeypatch.setenv(variable, value)
    resources = {"metadata": {"path": str(clone.folder)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    written = json.dumps(notebook)
    assert all(text in written for text in SHOWN)


def test_the_python_of_the_first_page(clone):
    """The function that it shows trains on two ranks, and its caller prints what they returned."""
    text = (ROOT / "docs" / "howto" / "first-run.md").read_text()
    function, caller = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    (clone.folder / "my_training.py").write_text(function)
    (clone.folder / "start.py").write_text(caller)
    code, printed = clone.typed("python start.py")
    assert code == 0, printed
    losses = ast.literal_eval(printed.splitlines()[-1])
    assert losses.keys() == {0, 1}
    assert max(losses.values()) < 0.01


def resumed(printed: str) -> str:
    """Return the name of the folder whose checkpoint a run reports as resumed."""
    (matches,) = re.findall(r"resumed after step [1-9]\d* of .*?([^/]+)/checkpoints/", printed)
    return str(matches)


ENDLESSLY = "catdog --data data/flowers --image-size 32 --width 4 --batch-size 8 --epochs 999"


@pytest.fixture
def longer_demo(clone: Clone) -> Iterator[None]:
    """Let the demo take long enough to be interrupted: each of its images is there ten times."""
    demo, images = clone.folder / "data" / "demo", IMAGES * 10
    shutil.move(demo, kept := demo.with_name("short-demo"))
    demo.mkdir()
    with (
        zipfile.ZipFile(kept / "train.zip") as short,
        zipfile.ZipFile(demo / "train.zip", "w") as archive,
    ):
        archive.comment = short.comment
        for n in range(images):
            name = short.namelist()[n % IMAGES]
            archive.writestr(f"{name[:9]}.{n}.jpg", short.read(name))
    yield
    shutil.rmtree(demo)
    shutil.move(kept, demo)


@pytest.mark.usefixtures("longer_demo")
@pytest.mark.parametrize(
    "line",
    [
        "./run-local",
        pytest.param(f"./run-local --nproc 2 {ENDLESSLY}", marks=LONG),
        pytest.param(f"rackrun local --runs 'my runs' --name 'a b' {ENDLESSLY}", marks=LONG),
        pytest.param(f"./run-ssh --name lr-tenth hosts.txt {ENDLESSLY} --lr 0.001", marks=LONG),
    ],
)
def test_the_command_after_ctrl_c_continues_the_run(clone, line):
    """Typed as it is printed, it continues this very run: the demo, one of two ranks, one with a
    name and a folder of its own."""
    code, printed = clone.typed(line, "epoch 1")
    assert code == 130, printed
    (command,) = re.findall(r"to continue, type: (.+)", printed)
    code, printed = clone.typed(command, "resumed after step")
    assert code == 130, printed
    assert resumed(printed) == Path(shlex.split(command)[-1]).name


@LONG
def test_the_command_of_a_stopped_detached_run_continues_it(clone):
    """Stopped from elsewhere; the command that `attach` prints then detaches again and resumes."""
    code, printed = clone.typed(f"./run-ssh --detach hosts.txt {ENDLESSLY}")
    assert code == 0, printed
    *_, run = printed.split()
    assert clone.typed(f"./run-ssh stop {run}")[0] == 0
    code, printed = clone.typed(f"./run-ssh attach {run}")
    assert code == 130, printed
    (command,) = re.findall(r"to continue, type: (.+)", printed)
    code, printed = clone.typed(command)
    assert code == 0, printed
    *_, again = printed.split()
    assert again != run
    assert clone.typed(f"./run-ssh stop {again}")[0] == 0
    _, printed = clone.typed(f"./run-ssh attach {again}")
    assert resumed(printed) == Path(shlex.split(command)[-1]).name
