"""Every command that README and getting started print works, typed as it is printed.

A page is typed from top to bottom in a clone with small data, on hosts behind real sshd. The
commands of the other pages are held against `--help` in tests/contract/docs/test_pages.py.
"""

import ast
import json
import re
import shlex
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.catdog.demo import Demo
from rackrun.catdog.drawing import jpeg
from tests.lab.clone import ROOT, Clone
from tests.lab.pages import SMALL, lines_of

STARTED = ROOT / "docs" / "getting-started"
PAGES = [ROOT / "README.md", *(STARTED / f"{n}.md" for n in ("install", "first-run", "many-hosts"))]
LONG = pytest.mark.long
IMAGES = 20

SHOWN = ("done {0: 0, 1: 0} {'gpu01': 'clean', 'gpu02': 'clean'}", "image/png")
"""What the outputs of ssh-demo.ipynb hold when it has done its work."""

FOREIGN = ("pip", ".venv/bin/python -m pip")
"""What lines of other programs begin with which are not typed."""

TYPED_ELSEWHERE = ("./run-ssh --sync hosts.txt",)  # the demo on hosts, in a test of its own


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clone]:
    """Yield a clone whose user has images, a script, and the archive of the demo."""
    made = Clone(tmp_path_factory.mktemp("clone"))
    images = {
        f"{kind}.{n}.jpg": jpeg(kind, 0, n) for kind in ("cat", "dog") for n in range(IMAGES // 2)
    }
    for name, data in images.items():
        folder = made.home / "images" / name[:3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (made.folder / "my-cat.jpg").write_bytes(images["cat.0.jpg"])
    demo = Demo(made.folder / "data" / "demo")
    demo.out.mkdir(parents=True)
    for path, comment in ((made.folder / "train.zip", ""), (demo.archive, demo.stamp)):
        with zipfile.ZipFile(path, "w") as archive:
            archive.comment = comment.encode()
            for name, data in images.items():
                archive.writestr(f"train/{name}", data)
    (made.folder / "train.py").write_text("import os; print('rank', os.environ['RANK'])\n")
    code, printed = made.typed("./run-local convert folder ~/images data/shards")
    assert code == 0, printed
    yield made
    made.close()


def shortened(line: str) -> str:
    """Return a line that trains with settings for a test instead of those on the page."""
    words = line.split()
    task = next((task for task in SMALL if task in words), "")
    if not task or {"--check", "--help", "convert"} & set(words):
        return line
    line = re.sub(r" --epochs \d+", "", line)
    return f"{line} {SMALL[task]} --epochs {999 if '--detach' in words else 1}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_of_a_page(clone, page):
    """Each ends well in the order in which they are printed."""
    lines = [line for line in lines_of(page) if not line.startswith(FOREIGN)]
    assert lines
    for line in lines:
        if line in TYPED_ELSEWHERE:
            continue
        made = re.search(r"convert folder \S+ (\S+)", line)
        if made:
            shutil.rmtree(clone.folder / made[1], ignore_errors=True)
        code, printed = clone.typed(shortened(line))
        assert code == 0, f"$ {line}\n{printed}"


def test_the_demo_trains_on_hosts(clone):
    """The line that names no task: both hosts train on what was drawn here."""
    (line,) = TYPED_ELSEWHERE
    assert line in lines_of(STARTED / "many-hosts.md")
    code, printed = clone.typed(line)
    assert code == 0, printed
    assert "gpu01:0 | 2 ranks on 2 hosts" in printed
    assert "rackrun: accuracy: " in printed
    run = max(path for path in (clone.folder / "runs").glob("2*") if not path.is_symlink())
    assert json.loads((run / "config.json").read_text())["recipe"] == "demo"
    assert (run / "final.pt").exists()


def test_the_hosts_file_of_a_lab(clone):
    """Every line of the example is read: a rank on each host, two where it says so."""
    code, printed = clone.typed("./run-ssh examples/hosts.txt -- python train.py")
    assert code == 0, printed
    assert set(re.findall(r"(gpu\d+):\d+ \| rank (\d)", printed)) == {
        ("gpu01", "0"), ("gpu02", "1"), ("gpu03", "2"), ("gpu03", "3"), ("gpu04", "4"),
    }  # fmt: skip


@LONG
def test_a_notebook(clone, monkeypatch):
    """Each cell runs, on the data and the hosts of the clone; committed outputs are none."""
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks" / "ssh-demo.ipynb", 4)
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
    text = (STARTED / "first-run.md").read_text()
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


ENDLESSLY = "catdog --data data/shards --image-size 32 --width 4 --batch-size 8 --epochs 999"


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
def test_the_command_after_ctrl_c_continues_the_run(clone):
    """Typed as it is printed, it continues this very run."""
    code, printed = clone.typed("./run-local", "epoch 1")
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
