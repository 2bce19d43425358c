"""Trackers get what a run measures, by the real packages without a network, and harm no run."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from rackrun.catdog.model import TASK
from rackrun.errors import DataError, MissingPackage, UsageError
from rackrun.launcher.files.download import fetch_results
from rackrun.run_report.folder import PIECE_BYTES, MetricsReader
from rackrun.training import loop
from rackrun.training.run import metrics
from rackrun.training.track.lines import Sent, files_of, read_sent, summary, write_sent
from tests.lab import warm
from tests.lab.waiting import until
from tests.launcher.fake_host import TrackedTransport, host_plan
from tests.training.conftest import settings


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the machine's keys and servers from trackers; collect no hardware metrics."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_X_DISABLE_STATS", "true")
    monkeypatch.setenv("WANDB_X_SAVE_REQUIREMENTS", "false")


@pytest.fixture
def deaf() -> Iterator[str]:
    """Yield the address of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run wait until its tracker has begun, or ended.

    A run of seconds would be over before mlflow is imported: on a busy machine that takes longer
    than the time that trackers have for the rest of a run.
    """
    start = metrics.Tracker._started

    def started(tracked: metrics.Tracker) -> subprocess.Popen[bytes]:
        sent = tracked._log.with_suffix(".json")
        before = inode(sent)  # of the run that this one continues
        process = start(tracked)
        until(lambda: inode(sent) != before or process.poll() is not None)
        return process

    monkeypatch.setattr(metrics.Tracker, "_started", started)


def inode(path: Path) -> int:
    """Return the number of a file, which another one of its name does not have; 0 for none."""
    return path.stat().st_ino if path.exists() else 0


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
    checked = warm.run("-c", MLFLOW, first, cwd=Path.cwd(), env={**os.environ})
    assert checked.returncode == 0, checked.stderr
    output = json.loads(checked.stdout)
    assert output["steps"] == steps
    assert output["params"]["epochs"] == "1"
    assert output["tags"]["mlflow.source.git.commit"] == "feed" * 10
    assert output["tags"]["rackrun.run_id"] == "0123abcd"
    assert (output["status"], output["report"]) == ("FINISHED", True)
    assert read_sent(first, "mlflow").id == read_sent(second, "mlflow").id
    offline = [*first.glob("wandb/offline-run-*/*.wandb"), *second.glob("wandb/offline*/*.wandb")]
    assert len({path.name for path in offline}) == 1 and len(offline) == 2
    sent = [record for path in offline for record in wandb_records(path)]
    assert [steps for steps in sent if isinstance(steps, int)] == steps
    assert "report.html" in sent
    assert curves(second) == steps


def test_what_was_sent_names_no_place_of_its_own(tmp_path):
    """The file may be a host's: a server that it names would get the user's password for theirs."""
    runs = tmp_path / "my runs"
    run, files = runs / "20260102-030405-b", "mlruns"
    options = (run / files).as_uri()
    beside = (runs / "20260102-030405-a" / files).as_uri()
    assert files_of(run, Sent(), files) == options
    assert files_of(run, Sent("1", beside), files) == beside
    elsewhere = [(tmp_path / "a" / files).as_uri(), f"{runs.as_uri()}/../{files}", "file://h/x/y"]
    elsewhere += [f"{runs.as_uri()}/%2e%2e/{files}", f"{beside}?x", "file:", "file:///etc/cron.d"]
    for position in elsewhere:
        assert files_of(run, Sent("1", position), files) == options
    for position in (
        "http://evil.example/",
        "databricks://x",
        "FILE:///x",
        "sqlite:////x.db",
        "\x1b",
    ):
        with pytest.raises(UsageError, match="the run was sent to") as refused:
            files_of(run, Sent("1", position), files)
        assert str(refused.value).isprintable()


def test_a_host_cannot_choose_the_run_of_a_tracker_that_is_continued(tmp_path):
    """Its file stays with it: sent from here, a run is a new one, with all of its steps."""
    remote, local = a_run(tmp_path / "there"), tmp_path / "here"
    local.mkdir()
    for name in ("wandb", "mlflow"):
        write_sent(remote, name, Sent("another-run", steps={"train": 10**6}))
    transport = TrackedTransport()
    fetch_results(transport, host_plan(remote), "", local)
    transport.wait_for_end()
    sent = warm.run("-m", "rackrun.training", "track", "wandb", local, env={**os.environ})
    assert sent.returncode == 0, sent.stderr
    assert read_sent(local, "wandb").id not in ("", "another-run")
    (offline,) = local.glob("wandb/offline-run-*/*.wandb")
    assert [step for step in wandb_records(offline) if isinstance(step, int)] == [5, 10]
    assert not (local / "tracker-mlflow.json").exists()


@pytest.mark.parametrize("below", ["figures", "../20260102-030405-b"])
@pytest.mark.security("HOST-3")
def test_wandb_obeys_no_settings_in_the_folder_of_a_run(below, tmp_path):
    """On a disk that hosts share they can write wandb/settings: it would get the user's key."""
    runs = tmp_path / "project" / "runs"
    runs.mkdir(parents=True)
    run, other = a_run(runs / "20260102-030405-a"), a_run(runs / "20260102-030405-b")
    current = run / below
    for folder, server in {
        **dict.fromkeys((run, other, run / "figures"), "http://evil.example"),
        tmp_path / "project": "http://mine.example",
    }.items():
        (folder / "wandb").mkdir(parents=True)
        (folder / "wandb" / "settings").write_text(f"[default]\nbase_url = {server}\n")
    script = (
        "import sys; from pathlib import Path; from rackrun.training.track.lines import Sent\n"
        "from rackrun.training.track.wandb_run import WandbRun\n"
        "settings = {'name': 'x', 'git_commit': ''}\n"
        "run = WandbRun(Path(sys.argv[1]), settings, Sent())\n"
        "print('server:', run._run.settings.base_url)\n"
    )
    for folder, obeyed in ((current, False), (tmp_path / "project", True)):
        sent = warm.run("-c", script, run, cwd=folder, env={**os.environ, "WANDB_MODE": "offline"})
        assert sent.returncode == 0, sent.stderr
        assert "server: https://" in sent.stdout or obeyed
        assert ("server: http://mine.example\n" in sent.stdout) == obeyed


def test_files_for_mlflow_that_a_host_has_sent_are_not_added_to(tmp_path):
    """In there stands where their artifacts lie, which could be any place."""
    remote, local = a_run(tmp_path / "there"), tmp_path / "here"
    local.mkdir()
    client = "import sys, mlflow; mlflow.MlflowClient(sys.argv[1]).create_experiment"
    args = ("catdog", (tmp_path / "elsewhere").as_uri())
    made = warm.run("-c", f"{client}{args}", (remote / "mlruns").as_uri(), env=FILES)
    assert made.returncode == 0, made.stderr
    transport = TrackedTransport()
    fetch_results(transport, host_plan(remote), "", local)
    transport.wait_for_end()
    sent = warm.run("-m", "rackrun.training", "track", "mlflow", local, env={**os.environ})
    assert sent.returncode == UsageError.exit_code
    assert f"{local}/mlruns: came with the results of a host; look at it as it is" in sent.stderr
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("name", "begins", "size", "message"),
    [
        ("config.json", b"", 1 << 40, "not the settings of a run: longer than 33554432 bytes"),
        ("config.json", b"[]", 2, "not the settings of a run: it: not an object"),
        ("metrics.jsonl", b"", 1 << 40, "line 1 is not a line of metrics"),
        ("metrics.jsonl", b'{"kind": "train"}\n', 18, "line 1 is not a line of metrics"),
        ("tracker-wandb.json", b"", 1 << 40, "longer than 65536 bytes; remove it to begin a new"),
    ],
)
def test_what_a_host_has_made_large_or_damaged_is_one_line(name, begins, size, message, tmp_path):
    """On a shared disk ranks write these files: a terabyte of zeros is not read into memory."""
    run = a_run(tmp_path / "run")
    (run / name).write_bytes(begins)
    os.truncate(run / name, size)
    sent = warm.run("-m", "rackrun.training", "track", "wandb", run, env={**os.environ})
    assert sent.returncode == DataError.exit_code
    (line,) = sent.stderr.splitlines()
    assert line.startswith(f"error: {run / name}: {message}")


def test_a_file_of_many_pieces_is_read_line_by_line(tmp_path):
    """Each line once, also when a piece ends in the middle of one, or the run is still writing."""
    run = a_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    lines = [{**line, "step": step, "why": "x" * (step % 999)} for step in range(6000)]
    data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    path.unlink()
    reader = MetricsReader(path)
    assert reader.next_lines() == []
    path.write_bytes(data[:-9])
    result = list(chain.from_iterable(iter(reader.next_lines, [])))
    assert result == lines[:-1] and len(data) > 2 * PIECE_BYTES
    path.write_bytes(data)
    assert reader.next_lines() == lines[-1:] and reader.next_lines() == []


def test_the_summary_of_pieces_is_that_of_all_lines():
    """The last accuracy, and the best before or in the newest lines."""
    evaluations = [{"kind": "evaluate", "top1": top1} for top1 in (0.5, 0.9, 0.7, 0.8)]
    result = dict[str, float]()
    for line in (*evaluations, {"kind": "train"}):
        result = summary([line], result)
    assert result == summary(evaluations, {}) == {"accuracy": 0.8, "best": 0.9}
    assert summary([], {}) == {}


def test_another_server_gets_all_steps(tmp_path):
    """What one of them has says nothing of another."""
    run = a_run(tmp_path / "run")
    for server in (tmp_path / "run" / "mlruns", tmp_path / "mlruns"):
        options = {**os.environ, "MLFLOW_TRACKING_URI": server.as_uri()}
        sent = warm.run("-m", "rackrun.training", "track", "mlflow", run, env=options)
        assert sent.returncode == 0, sent.stderr
        output = json.loads(warm.run("-c", MLFLOW, server.parent, env=options).stdout)
        assert output["steps"] == [5, 10]


FILES = {**os.environ, "MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_DISABLE_TELEMETRY": "true"}


def a_run(folder: Path) -> Path:
    """Make the folder of a run of ten steps."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"name": "catdog"}))
    line = {"kind": "train", "epoch": 0.5, "loss": 1.0, "accuracy": 0.5, "images_per_second": 9.0}
    lines = [{**line, "step": step, "rate": 0.1, "time": 1.7e9} for step in (5, 10)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


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


def test_a_tracker_that_hangs_costs_a_moment_at_the_end(shapes, tmp_path, deaf, monkeypatch, capfd):
    """wandb would wait for its server without end: the run ends well, and names the rest."""
    monkeypatch.setattr(metrics, "END_SECONDS", 0.5)
    monkeypatch.setenv("WANDB_BASE_URL", deaf)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    assert loop.run(TASK, settings(shapes, tmp_path / "run", epochs=1, track="wandb")) == 0
    errors = capfd.readouterr().out
    rest = f"what it has not got is in {tmp_path}/run/metrics.jsonl"
    assert f"--track wandb: did not end in time; {rest}\n" in errors
    assert (tmp_path / "run" / "final.pt").exists()


def test_ctrl_c_is_as_quick_beside_a_tracker_that_hangs(shapes, tmp_path, deaf, monkeypatch):
    """The run saves and ends with 130; the tracker ends with it."""
    monkeypatch.setattr(metrics, "STOPPED_SECONDS", 0.5)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", deaf)
    folder, started = tmp_path / "run", []
    begin = metrics.Tracker._started

    def noted(tracked: metrics.Tracker) -> Any:
        started.append(begin(tracked))
        signal.raise_signal(signal.SIGINT)
        return started[-1]

    monkeypatch.setattr(metrics.Tracker, "_started", noted)
    assert loop.run(TASK, settings(shapes, folder, track="mlflow")) == 130
    assert started[0].returncode == -signal.SIGKILL
    assert list((folder / "checkpoints").glob("step-*.pt"))


@pytest.mark.long  # a tracker that hangs, above, and what is sent later by both
@pytest.mark.usefixtures("begun")
def test_a_tracker_that_fails_is_one_line(shapes, tmp_path, monkeypatch, capfd):
    """Nothing listens at its address; what was not sent goes to another one from a resumed run."""
    run = tmp_path / "run"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert loop.run(TASK, settings(shapes, run, epochs=1, track="mlflow", log_every_steps=5)) == 0
    assert capfd.readouterr().out.count("--track mlflow: mlflow: ") == 1
    monkeypatch.delenv("MLFLOW_TRACKING_URI")
    again = settings(shapes, run, epochs=1, resume=str(run), track="mlflow", log_every_steps=5)
    assert loop.run(TASK, again) == 0
    output = json.loads(warm.run("-c", MLFLOW, run, env={**os.environ}).stdout)
    assert (output["steps"], output["status"], output["report"]) == ([5, 10], "FINISHED", True)


def test_what_is_not_installed_or_no_tracker_is_one_line():
    """A name has to be known; a known one that is missing names its extra."""
    with pytest.raises(UsageError, match=r"--track wandbb: no such tracker; did you mean wandb\?"):
        settings(Path(), Path(), track="mlflow,wandbb")
    with pytest.raises(MissingPackage, match=r"comet is not installed; type: .*\[comet\]'"):
        metrics.check_trackers(["comet"])
