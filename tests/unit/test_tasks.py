"""One function finds every task, and runs nothing of it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.cli import completion, dispatch
from rackrun.errors import UsageError
from rackrun.launcher.commands.work import work_of
from rackrun.launcher.run.job import TaskWork
from rackrun.launcher.run.settings import LocalOptions
from rackrun.launcher.settings_file import read_settings, settings_text, work_words
from rackrun.user_code import tasks
from rackrun.user_code.tasks import find_task, known_tasks

IMPORTED = "raise SystemExit('imported')\n"
TASK = f"{IMPORTED}TASK = None\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the current folder, with tasks, scripts that are none, and an installed package."""
    for name, text in {
        "here/my_task.py": TASK,
        "here/my-task.py": TASK,
        "here/train.py": IMPORTED,
        "here/broken.py": "TASK = (\n",
        "here/pack/__init__.py": IMPORTED,
        "here/pack/one.py": "from elsewhere import TASK\n",
        "here/pack/two/model.py": IMPORTED,
        "here/pack/two/recipes.py": IMPORTED,
        "here/bare/three.py": "TASK: object = 3\n",
        "site/flower_tasks.py": TASK,
        "site/flowers-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: flowers\nVersion: 1\n",
        "site/flowers-1.dist-info/entry_points.txt": "[rackrun.tasks]\nflowers = flower_tasks\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(tmp_path / "site")
    tasks._announced.cache_clear()
    yield tmp_path / "here"
    tasks._announced.cache_clear()


@pytest.mark.parametrize(
    ("text", "recipes", "model"),
    [
        ("catdog", "rackrun.catdog.recipes", "rackrun.catdog.model"),
        (
            "classify",
            "rackrun.training.tasks.classify.recipes",
            "rackrun.training.tasks.classify.model",
        ),
        ("flowers", "flower_tasks", "flower_tasks"),
        ("flower_tasks", "flower_tasks", "flower_tasks"),
        ("./my_task.py", "my_task", "my_task"),
        ("my_task", "my_task", "my_task"),
        ("pack.one", "pack.one", "pack.one"),
        ("pack.two", "pack.two.recipes", "pack.two.model"),
        ("bare.three", "bare.three", "bare.three"),
    ],
)
def test_a_task_is_found_by_name_import_path_or_file(folder, text, recipes, model):
    """In the table, announced by an installed package, or here; its code is not run."""
    result = find_task(text)
    assert result
    assert (result.name, result.recipes, result.model) == (text, recipes, model)
    assert not {"my_task", "pack", "flower_tasks"} & sys.modules.keys()


def test_own_tasks_are_completed_and_explained(folder):
    """A Tab offers announced tasks, and for a file what all tasks take, without running it."""
    assert known_tasks()[-1] == "flowers"
    assert "flowers" in completion.candidates(["local", ""])
    assert {"--epochs", "--data"} <= completion.candidates(["local", "./my_task.py", "--"])
    assert "is a task; type: rackrun local ./my_task.py" in dispatch._unknown("./my_task.py")


def test_a_settings_file_starts_ones_own_task_again(folder):
    """What a launch writes down is read back as the same task; a wrong name is refused."""
    work = work_of([str(folder / "my_task.py"), "--epochs=2"])
    assert work == TaskWork("my_task.py", ("--epochs=2",))
    assert work.name == "my_task"
    assert work.argv("python")[-3:] == ("rackrun.training", "my_task.py", "--epochs=2")
    text = settings_text("local", LocalOptions(), work)
    Path("run.toml").write_text(text)
    assert work_of(work_words(read_settings(Path("run.toml")), [])) == work
    Path("run.toml").write_text(text.replace("my_task.py", "my_taks.py"))
    with pytest.raises(UsageError, match="run.toml: my_taks.py: no such key"):
        read_settings(Path("run.toml"))
