"""Trackers get what a run measures, by the real packages without a network, and harm no run."""

import json
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rackrun.catdog.model import TASK
from rackrun.training import train as loop
from rackrun.training.track import tracker
from rackrun.training.track.tracker import Sent, Tracker, read_sent
from tests.lab import warm
from tests.lab.waiting import until
from tests.training.conftest import settings


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's keys and servers from trackers; collect no hardware metrics."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run wait until its tracker has begun, or failed.

    A run of seconds would be over before mlflow is imported: on a busy machine that takes longer
    than the time that trackers have to begin, and for the rest of a run.
    """
    begin = Tracker.__init__
    monkeypatch.setattr(tracker, "START_SECONDS", 600.0)

    def patient(self: Tracker, *args: Any) -> None:
        begin(self, *args)
        until(lambda: self._begun or bool(self._problem))

    monkeypatch.setattr(Tracker, "__init__", patient)


@pytest.fixture
def swallowing() -> Iterator[str]:
    """Yield the address of a server that answers no SYN: its queue is full."""
    with socket.socket() as server, socket.socket() as one, socket.socket() as other:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        for client in (one, other):
            client.setblocking(False)
            client.connect_ex(server.getsockname())
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.usefixtures("begun")
def test_two_trackers_get_a_run_and_what_goes_on_from_it(shapes, tmp_path, monkeypatch, capfd):
    """One run each: settings, every line once, the result and the report; no warning."""
    monkeypatch.setenv("RACKRUN_RUN_ID", "0123abcd")
    monkeypatch.setenv("RACKRUN_COMMIT", "feed" * 10)
    first, second = tmp_path / "first", tmp_path / "second"
    both = {"track": "wandb,mlflow", "log_every_steps": 5, "tensorboard": True}
    assert loop.run(TASK, settings(shapes, first, epochs=1, **both)) == 0
    resumed = settings(shapes, second, epochs=2, resume=str(first), **both)
    assert loop.run(TASK, resumed) == 0
    assert "--track" not in capfd.readouterr().out
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if line["kind"] == "train"]
    assert steps == [5, 10, 15, 20]
    checked = warm.run("-c", MLFLOW, second, cwd=Path.cwd(), env={**os.environ})
    assert checked.returncode == 0, checked.stderr
    output = json.loads(checked.stdout)
    assert output["steps"] == steps
    assert output["params"]["epochs"] == "2"
    assert output["tags"]["mlflow.source.git.commit"] == "feed" * 10
    assert output["tags"]["rackrun.run_id"] == "0123abcd"
    assert (output["status"], output["report"]) == ("FINISHED", True)
    assert read_sent(first, "wandb").id == read_sent(second, "wandb").id
    offline = [*first.glob("wandb/offline-run-*/*.wandb"), *second.glob("wandb/offline*/*.wandb")]
    assert len({path.name for path in offline}) == 1 and len(offline) == 2
    sent = [record for path in offline for record in wandb_records(path)]
    assert [steps for steps in sent if isinstance(steps, int)] == steps
    assert "report.html" in sent
    assert curves(second) == steps


@pytest.mark.security("HOST-3")
def test_wandb_obeys_no_settings_in_the_current_folder(tmp_path):
    """A host may have written wandb/settings there: the server in it would get the user's key."""
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "settings").write_text("[default]\nbase_url = http://evil.example\n")
    script = (
        "import sys; from pathlib import Path; from rackrun.training.track.tracker import Sent\n"
        "from rackrun.training.track.wandb_run import WandbRun\n"
        "run = WandbRun(Path(sys.argv[1]), {'name': 'x', 'git_commit': ''}, Sent())\n"
        "print('server:', run._run.settings.base_url)\n"
    )
    offline = {**os.environ, "WANDB_MODE": "offline"}
    sent = warm.run("-c", script, tmp_path, cwd=tmp_path, env=offline)
    assert sent.returncode == 0, sent.stderr
    assert "server: https://api.wandb.ai\n" in sent.stdout


def curves(folder: Path) -> list[int]:
    """Return the steps of a curve as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    assert {"train/loss", "evaluate/top1", "hparam/accuracy"} <= set(events.Tags()["scalars"])
    assert "predictions" in events.Tags()["images"][0]
    return [event.step for event in events.Scalars("train/loss")]


BLOCK, HEADER = 1 << 15, 7  # of LevelDB's log format, in which wandb keeps what it sends later


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the steps of the lines in wandb's file, and the names of files in its artifacts."""
    from wandb.proto import wandb_internal_pb2 as messages

    data, folder, whole = path.read_bytes(), HEADER, b""
    while folder < len(data):
        left = BLOCK - folder % BLOCK
        if left < HEADER:
            folder += left
            continue
        size, kind = int.from_bytes(data[folder + 4 : folder + 6], "little"), data[folder + 6]
        whole += data[folder + HEADER : folder + HEADER + size]
        folder += HEADER + size
        if kind in (1, 4):  # a record, or its last part
            record = messages.Record.FromString(whole)
            whole = b""
            values = {
                (item.key or item.nested_key[0]): item.value_json for item in record.history.item
            }
            if "train/loss" in values:
                yield json.loads(values["step"])
            yield from (
                entry.path for entry in record.request.log_artifact.artifact.manifest.contents
            )
            yield from (entry.path for entry in record.artifact.manifest.contents)


MLFLOW = """
import json, os, sys
os.environ |= {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}
from pathlib import Path
from mlflow import MlflowClient
client = MlflowClient((Path(sys.argv[1]) / "mlruns").as_uri())
(run,) = client.search_runs([client.get_experiment_by_name("catdog").experiment_id])
history = client.get_metric_history(run.info.run_id, "train/loss")
print(json.dumps({
    "steps": [metric.step for metric in history],
    "params": run.data.params,
    "tags": run.data.tags,
    "status": run.info.status,
    "report": [file.path for file in client.list_artifacts(run.info.run_id)] == ["report.html"],
}))
"""


def test_a_server_that_swallows_all_holds_up_nothing(
    shapes, tmp_path, swallowing, monkeypatch, capfd
):
    """The run is over before the tracker has begun, and says where the rest is, once."""
    monkeypatch.setattr(tracker, "START_SECONDS", 0.0)
    monkeypatch.setattr(tracker, "END_SECONDS", 0.1)
    monkeypatch.setenv("WANDB_BASE_URL", swallowing)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert loop.run(TASK, settings(shapes, tmp_path / "run", epochs=1, track="wandb")) == 0
    output = capfd.readouterr().out
    rest = f"what it did not get is in {tmp_path}/run/metrics.jsonl"
    assert f"--track wandb: no answer within 0 s; {rest}\n" in output
    assert output.count("--track wandb") == 1
    assert read_sent(tmp_path / "run", "wandb") == Sent()
    assert (tmp_path / "run" / "final.pt").exists()


def test_ctrl_c_is_as_quick_beside_a_tracker_that_hangs(shapes, tmp_path, swallowing, monkeypatch):
    """The run saves and ends with 130, and waits for the tracker as long as it may."""
    monkeypatch.setattr(tracker, "STOPPED_SECONDS", 0.1)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", swallowing)
    begin = Tracker.__init__

    def interrupted(self: Tracker, *args: Any) -> None:
        begin(self, *args)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Tracker, "__init__", interrupted)
    assert loop.run(TASK, settings(shapes, tmp_path / "run", track="mlflow")) == 130
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.pt"))


@pytest.mark.usefixtures("begun")
def test_a_tracker_that_fails_is_one_line(shapes, tmp_path, monkeypatch, capfd):
    """Nothing listens at its address."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert loop.run(TASK, settings(shapes, tmp_path, epochs=1, track="mlflow")) == 0
    assert capfd.readouterr().out.count("--track mlflow: ") == 1
