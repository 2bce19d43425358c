"""report.html, as a browser shows it."""

import contextlib
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rackrun.errors import DataError, UsageError
from rackrun.run_report.chart import Series, chart, ticks
from rackrun.run_report.folder import read, read_predictions
from rackrun.run_report.page import charts, write, write_comparison
from rackrun.run_report.tensorboard import write_usage

EVIL = '<img src=x onerror="alert(1)"></script><script>alert(2)</script>\x1b[31m'
HOSTS = ("gpu01", "gpu02")
RESOLVED = {
    **{"device": "cuda", "precision": "bf16", "workers": 6, "world_size": 4},
    **{"parameters": 25_557_032, "torch": "2.15.0+cu130", "torchvision": "0.30.0+cu130"},
    **{"cuda": "13.0", "driver": "580.65", "python": "3.12.4", "git_commit": "0f817e9ab"},
}
"""What every page of a run has to name; `hosts` and the like have tables of their own."""
MOMENT = 1_795_000_000.0


def run_folder(folder: Path, **settings: Any) -> Path:
    """Make a run of two epochs on two hosts in which every name is an attack on the page."""
    folder.mkdir()
    train = [
        {"kind": "train", "step": step, "epoch": step / 50, "loss": 100 / step, "rate": 0.1,
         "accuracy": step / 200, "images_per_second": 800.0, "time": MOMENT + step}
        for step in range(10, 110, 10)
    ]  # fmt: skip
    judged = [
        {"kind": "evaluate", "step": 50 * epoch, "epoch": epoch, "split": "val", "loss": 0.5,
         "top1": 0.4 * epoch, "top5": None, "samples": 15, "time": MOMENT + 50 * epoch}
        for epoch in (1, 2)
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", [*train, *judged])
    usage = [
        {"time": MOMENT + 60 * minute, "host": host, "cpu": 0.5, "memory": 10**9,
         "memory_total": 4 * 10**9, "received": 10**8, "sent": 10**7,
         "gpus": [[100, 1, 2], [0, 1, 2]]}
        for minute in range(5)
        for host in HOSTS
    ]  # fmt: skip
    write_lines(folder / "usage.jsonl", usage)
    np.savez(
        folder / "predictions.npz",
        images=np.zeros((3, 8, 8, 3), np.uint8),
        labels=np.array([0, 1, 1]),
        predicted=np.array([0, 1, 0]),
        probability=np.array([0.9, 0.8, 0.7], np.float32),
        classes=[EVIL, "dog"],
        confusion=np.array([[9, 1], [2, 3]]),
    )
    place = {"processes": 2, "command": ["python", EVIL], "environment": [["TOKEN", "s3cret"]]}
    place["gpu_model"] = "H100 80GB"
    plan = {
        "run_id": "ab" * 16,
        "world_size": 4,
        "hosts": [{"name": one, **place} for one in HOSTS],
    }
    end = {"verdict": "failed", "exit_code": 1, "cause": EVIL, "seconds": 75.0}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "result.json").write_text(json.dumps({**end, "hosts": {"gpu01": EVIL}}))
    config = {"data": EVIL, "lr": 0.1, "resolved": RESOLVED, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_no_flipped_bit_of_the_predictions_is_a_traceback(run: Path) -> None:
    """In any byte: the page's content or one line that names the file, never zlib's own error."""
    path = run / "predictions.npz"
    whole = path.read_bytes()
    for at, byte in enumerate(whole):
        path.write_bytes(whole[:at] + bytes([byte ^ 1 << at % 8]) + whole[at + 1 :])
        with contextlib.suppress(DataError):
            read_predictions(path)
    np.savez_compressed(path, **dict(np.load(io.BytesIO(whole))))
    packed = path.read_bytes()
    for at, byte in enumerate(packed):
        path.write_bytes(packed[:at] + bytes([byte ^ 1 << at % 8]) + packed[at + 1 :])
        with contextlib.suppress(DataError):
            read_predictions(path)


def test_the_results_of_a_host_are_read_within_limits(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Depth, length of a line and of the file; what a line may hold are plain values."""
    metrics = run / "metrics.jsonl"
    line = metrics.read_bytes().splitlines(keepends=True)[0]
    for bad in (b"[" * 5000 + b"\n", b'"' + b"x" * (1 << 16)):
        metrics.write_bytes(line + bad)
        with pytest.raises(DataError, match="line 2 is not a line of metrics"):
            read(run)
    metrics.write_bytes(line.replace(b"}", b', "bulk": [[], []]}'))
    assert "bulk" not in read(run).train[0]
    with metrics.open("wb") as file:
        file.write(line)
        padded = line.rstrip()[:-1] + b', "x": "' + b"y" * 65_000 + b'"}\n'
        file.writelines(padded for _ in range((1 << 26) // len(padded) + 1))
    assert len(read(run).train) == (1 << 26) // len(padded) + 1
    assert "longer than 67108864 bytes; the rest is left out" in capsys.readouterr().err


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_folder(tmp_path / "20260102-030405-catdog")


def browsed(address: str, folder: Path) -> tuple[str, list[str]]:
    """Open a page in Chromium; return its elements as text, and the lines of its console."""
    browser = shutil.which("chromium")
    assert browser, "no chromium; ./run-tests installs it"
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", profile]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    ended = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def test_a_browser_shows_the_page_and_complains_of_nothing(run: Path) -> None:
    """All of a run is on it, nothing is fetched or run, and names from elsewhere stay text."""
    elements, console = browsed(write(run).as_uri(), run)
    assert console == []
    assert "<script" not in elements
    assert "<img src=x" not in elements
    assert not re.search(r'(src|href)="(?!data:)', elements)
    assert elements.count("<polyline") == 9 + 5 * len(HOSTS)
    for text in (
        *("80%", "of 15 validation images correct", "failed", "1:15", "4 on 2 hosts", "TOKEN"),
        *("9 of 10", "3 of 5", "images: 2 correct", "50%", "is dog", "&lt;script&gt;"),
    ):
        assert text in elements
    shown = dict(re.findall(r'<th scope="row">(.*?)</th><td><code>(.*?)</code>', elements))
    assert {name: shown.get(name.replace("_", " ")) for name in RESOLVED} == {
        name: str(value) for name, value in RESOLVED.items()
    }
    assert shown["command"].startswith("python ") and shown["GPUs"] == "H100 80GB"
    assert "s3cret" not in elements
    assert "\x1b" not in elements


def test_a_script_in_the_page_would_be_refused(run: Path) -> None:
    """The page's own policy stops what escaping would have missed, and the console says so."""
    page = write(run)
    page.write_text(
        page.read_text().replace("</body>", "<script>document.title='x'</script></body>")
    )
    elements, console = browsed(page.as_uri(), run)
    assert "<title>x</title>" not in elements
    assert "Content Security Policy" in "".join(console)


def test_runs_are_compared(run: Path, tmp_path: Path) -> None:
    """Curves of both on one page, and only the settings that differ."""
    other = run_folder(tmp_path / "20260102-040506-catdog", lr=0.5)
    page = write_comparison([run, other], tmp_path / "compare.html")
    elements, console = browsed(page.as_uri(), tmp_path)
    assert console == []
    assert elements.count("<polyline") == 8
    assert re.findall(r"<code>(.*?)</code>", elements) == ["0.1", "0.5"]
    assert "The same in all: 1 setting." in elements


@pytest.mark.parametrize(
    "missing",
    [
        ("metrics.jsonl",),
        ("result.json", "usage.jsonl", "predictions.npz"),
        ("plan.json", "result.json"),
    ],
)
def test_a_page_of_what_there_is(run: Path, missing: tuple[str, ...]) -> None:
    """A run that has just begun, or measured nothing, has a page of the rest."""
    for name in missing:
        (run / name).unlink()
    assert run.name in write(run).read_text()


@pytest.mark.parametrize("synthetic", [False, True])
def test_noise_has_no_curves_of_loss_and_accuracy(tmp_path: Path, synthetic: bool) -> None:
    """The speed of --synthetic images is real, what a model says of them is not."""
    story = read(run_folder(tmp_path / "20260102-030405-noise", synthetic=synthetic))
    shown = {title for title, _ in charts([story])}
    learned = set() if synthetic else {"loss", "accuracy"}
    assert shown == {"images/s", "learning rate"} | learned


@pytest.mark.parametrize(
    ("epochs", "shown"),
    [
        ([0.2, 0.6, 1.0], ["1"]),
        ([0.6061, 1.0], ["1"]),
        ([1.0], ["1"]),
        ([0.5, 1.0, 1.5, 2.0], ["1", "2"]),
        ([0.002, 0.004], ["0.0025", "0.003", "0.0035", "0.004"]),
    ],
)
def test_one_epoch_has_a_whole_number_and_points(epochs: list[float], shown: list[str]) -> None:
    """Fractions stand on the axis within the first epoch only; one point is a dot to see."""
    values = np.array(epochs)
    drawing = str(chart([Series("loss", values, values)], lambda value: "y"))
    assert re.findall(r'text-anchor="middle">(.*?)<', drawing) == shown
    assert drawing.count("<circle") == (len(epochs) == 1)


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [(0.5, 1.5, [1]), (1, 2, [1, 2]), (1, 13, [5, 10]), (1, 6, [1, 2, 3, 4, 5, 6])],
)
def test_epochs_are_whole_numbers_on_their_axis(low: float, high: float, shown: list[int]) -> None:
    assert ticks(low, high, whole=True) == shown


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("usage.jsonl", '{"time": 1}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": "x"}\n'),
        ("plan.json", '{"hosts": [{"name": 3}]}'),
        ("result.json", '{"seconds": "long"}'),
        ("config.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(run: Path, name: str, content: str) -> None:
    """No page is made of what cannot be understood."""
    (run / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(name)):
        write(run)


def test_another_folder_is_refused(tmp_path: Path) -> None:
    """A folder without the files of a run is named."""
    with pytest.raises(UsageError, match="not the folder of a run"):
        write(tmp_path)


def test_tensorboard_has_the_use_of_hosts(run: Path) -> None:
    """A curve per host and resource, which TensorBoard's own reader finds; drawn twice, once."""
    (run / "tensorboard").mkdir()
    for _ in range(2):
        write_usage(run)
    events = EventAccumulator(str(run / "tensorboard" / "host-gpu02")).Reload()
    curve = events.Scalars("usage/gpu")
    assert [(point.step, point.value) for point in curve] == [(60 * n, 0.5) for n in range(5)]
    assert events.Scalars("usage/gpu_least")[0].value == 0
