"""The launcher's own messages, outside of dashboards."""

from pathlib import Path

from rackrun.launcher.output.console import next_commands, progress_words
from rackrun.launcher.output.run_view import view
from rackrun.launcher.run.events import Report
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.result import Result
from rackrun.launcher.run.state import RunState
from rackrun.run_folder import RunFolder
from tests.unit.planned import plan_of


def test_a_plain_screen_shows_progress_before_the_first_epoch_ends():
    """What the ranks load, then where in the first epoch they are."""
    folder, run = RunFolder(Path("/x")), RunState(plan_of("gpu01"), 0.0)

    def words(now: float, **fields: object) -> str:
        run.take(Report(0, 0, fields), now)
        return ", ".join(progress_words(view(run, "x", folder, now, {})))

    assert words(16.0, phase="start") == "loading"
    words(20.0, phase="train", epoch=1, epochs=9, step=1, steps=900)
    text = "epoch 1/9, step 11/900, loss 0.5, 80 images/s, 3% waiting for data, run ends in 14:49"
    fields = {"step": 11, "loss": 0.5, "images_per_second": 80.0, "data_share": 0.03}
    assert words(30.0, **fields) == text


def test_what_uses_the_model_is_typed_as_it_stands(tmp_path, monkeypatch):
    """The path is quoted; there is no such line without a model, or for a command of the user."""
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "my runs"
    run.mkdir()
    report = {"final": str(run / "final.pt")}
    result = Result("done", 0, "done", None, None, None, 1.0, "", "", {}, {}, report, run)
    plan = plan_of("a", work=TaskWork("catdog"))
    assert not list(next_commands(result, plan))
    (run / "final.pt").touch()
    assert not list(next_commands(result, plan_of("a", work=Command(("python", "train.py")))))
    for work, says in (
        (TaskWork("./my task.py"), "final.pt' IMAGE --task './my task.py'"),
        (TaskWork("classify", ("--model", "timm:resnet18")), "final.pt' IMAGE"),
        (TaskWork("classify", ("--model", "my:Net")), "final.pt' IMAGE --model my:Net"),
        (TaskWork("classify", ("--lr", "1", "--model=my:Net")), "IMAGE --model my:Net"),
    ):
        ((_, args),) = next_commands(result, plan_of("a", work=work))
        assert args.endswith(says)
    ((_, args),) = next_commands(result, plan)
    assert args == "./run-local predict 'my runs/final.pt' IMAGE"
