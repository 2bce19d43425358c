"""report.html, as a browser shows it."""

import fcntl
import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rackrun.commands import called
from rackrun.errors import DataError
from rackrun.launcher.output.log_files import write_run_page
from rackrun.run_report import __main__ as report
from rackrun.run_report.folder import read
from rackrun.run_report.page import charts, write, write_comparison
from tests.lab.needs import need
from tests.lab.waiting import until

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
    evaluations = [
        {"kind": "evaluate", "step": 50 * epoch, "epoch": epoch, "split": "val", "loss": 0.5,
         "top1": 0.4 * epoch, "top5": None, "samples": 15, "time": MOMENT + 50 * epoch}
        for epoch in (1, 2)
    ]  # fmt: skip
    write_lines(folder / "metrics.jsonl", [*train, *evaluations])
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
        keys=["a", EVIL, "c"],
        classes=[EVIL, "dog"],
        confusion=np.array([[9, 1], [2, 3]]),
    )
    position = {"processes": 2, "command": ["python", EVIL], "environment": [["TOKEN", "s3cret"]]}
    position["gpu_model"] = "H100 80GB"
    plan = {
        "run_id": "ab" * 16,
        "world_size": 4,
        "hosts": [{"name": one, **position} for one in HOSTS],
    }
    end = {"verdict": "failed", "exit_code": 1, "cause": EVIL, "seconds": 75.0}
    (folder / "plan.json").write_text(json.dumps(plan))
    (folder / "result.json").write_text(json.dumps({**end, "hosts": {"gpu01": EVIL}}))
    config = {"data": EVIL, "lr": 0.1, "resolved": RESOLVED, **settings}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.security("HOST-5")
def test_the_results_of_a_host_are_read_within_limits(run, capsys):
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
    need("chromium")
    browser = shutil.which("chromium")
    assert browser
    profile = f"--user-data-dir={folder / 'profile'}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", profile]
    command += ["--enable-logging=stderr", "--virtual-time-budget=2000", "--dump-dom"]
    ended = subprocess.run([*command, address], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.security("DATA-8")
def test_a_browser_shows_the_page_and_complains_of_nothing(run):
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


def test_a_script_in_the_page_would_be_refused(run):
    """The page's own policy stops what escaping would have missed, and the console says so."""
    page = write(run)
    page.write_text(
        page.read_text().replace("</body>", "<script>document.title='x'</script></body>")
    )
    elements, console = browsed(page.as_uri(), run)
    assert "<title>x</title>" not in elements
    assert "Content Security Policy" in "".join(console)


def test_runs_are_compared(run, tmp_path):
    """A row per run, the most accurate first and marked, with the settings that differ."""
    better = run_folder(tmp_path / "20260102-040506-catdog", lr=0.5)
    evaluations = (better / "metrics.jsonl").read_text()
    (better / "metrics.jsonl").write_text(evaluations.replace('"top1": 0.8', '"top1": 0.9'))
    noise = run_folder(tmp_path / "20260102-050607-catdog", synthetic=True)
    page = write_comparison([noise, run, better], tmp_path / "compare.html")
    elements = page.read_text()
    assert elements.count("<polyline") == 10
    rows = [
        [re.sub("<.*?>", "", cell).strip() for cell in re.findall("<t[hd].*?>(.*?)</t[hd]>", row)]
        for row in re.findall("<tr.*?>(.*?)</tr>", elements)
    ]
    assert [row[:6] for row in rows] == [
        ["run", "best accuracy", "after epoch", "last accuracy", "last loss", "epochs"],
        [f"{better.name} best", "90%", "2", "90%", "0.500", "2"],
        [run.name, "80%", "2", "80%", "0.500", "2"],
        [noise.name, "", "", "", "", "2"],
    ]
    assert [row[6:] for row in rows] == [
        ["images/s", "time", "end", "lr", "synthetic"],
        ["800", "1:15", "failed", "0.5", ""],
        ["800", "1:15", "failed", "0.1", ""],
        ["800", "1:15", "failed", "0.1", "True"],
    ]
    assert "The same in all runs: 1 setting." in elements


def test_a_resumed_run_has_numbers_of_all_parts_and_of_each(run):
    """100 steps at 50 and at 25 images/s are 33 over all; the last part has the launcher's time."""
    lines: list[dict[str, Any]] = []
    for begin, speed in ((0, 50.0), (100, 25.0)):
        at = MOMENT + 7 * begin
        lines.append({"kind": "start", "step": begin, "epoch": begin / 50, "time": at})
        lines += [
            {"kind": "train", "step": begin + step, "epoch": (begin + step) / 50, "loss": 1.0,
             "accuracy": 0.5, "images_per_second": speed, "rate": 0.1, "time": at + 3 * step}
            for step in (50, 100)
        ]  # fmt: skip
        lines.append({"kind": "start", "step": begin + 100, "epoch": 2.0, "time": at + 400})
    write_lines(run / "metrics.jsonl", lines)
    elements = page_of(run)
    headlines = re.findall(r"<div><b>(.*?)</b><span>(.*?)</span>", elements)
    assert ("33", "images/s over 2 parts") in headlines
    assert ("6:15", "over 2 parts") in headlines  # 5:00 and the 1:15 of result.json
    rows = [re.findall("<td>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", elements)]
    assert ["1", "1 to 100", "0 to 2", "50", "5:00"] in rows
    assert ["2", "101 to 200", "2 to 4", "25", "1:15"] in rows


def test_a_run_that_ended_early_has_its_cause_and_what_to_type(run, monkeypatch):
    """Nothing to type comes from a file."""
    end = {"verdict": "interrupted", "cause": "stopped by Ctrl-C", "seconds": 75.0,
           "advice": "free the disk", "traceback": "Error: <b>", "resume": "curl evil"}  # fmt: skip
    (run / "result.json").write_text(json.dumps(end))
    monkeypatch.chdir(run.parent)
    text = write(run).read_text()
    assert f"<code>{called('rerun')} {run.name} --resume {run.name}</code>" in text
    assert "free the disk" in text and "Error: &lt;b&gt;" in text
    assert "s3cret" not in text and "evil" not in text
    (run / "result.json").write_text(json.dumps({**end, "verdict": "done"}))
    assert "--resume" not in write(run).read_text()


def test_a_task_that_fails_before_its_first_step_has_a_page(run):
    """With its cause; a command of one's own that measured nothing has none."""
    for name in ("metrics.jsonl", "config.json", "predictions.npz"):
        (run / name).unlink()
    assert write_run_page(run, "") == ""
    assert not (run / "report.html").exists()
    assert write_run_page(run, "catdog") == ""
    assert '<b class="">failed</b>: &lt;img' in (run / "report.html").read_text()


def test_a_watched_page_is_drawn_until_the_run_ends(run, capsys, monkeypatch):
    """While its launcher has the events locked; a browser loads the page again until then."""
    monkeypatch.setattr(report, "WATCH_SECONDS", 1)
    end = (run / "result.json").rename(run / "kept.json")
    page, again = run / "report.html", 'http-equiv="refresh" content="1"'
    with (run / "events.jsonl").open("w") as events:
        fcntl.flock(events, fcntl.LOCK_EX)
        watching = threading.Thread(target=report.main, args=[["--watch", str(run)]])
        watching.start()
        until(lambda: page.exists() and again in page.read_text(), "a page that loads again", 30)
        assert "not ended" in page.read_text()
        end.rename(run / "result.json")
        watching.join(30)
    assert again not in page.read_text() and "failed" in page.read_text()
    assert capsys.readouterr().out == f"{page}\n"


def test_training_images_are_shown_with_their_classes(run):
    """As text, whatever a class is called; a file of another shape is named."""
    images = np.zeros((2, 8, 8, 3), np.uint8)
    path = run / "first_batch.npz"
    np.savez(path, images=images, captions=[EVIL, "cat 60%, dog 40%"])
    elements = page_of(run)
    assert "Training images as the model sees them" in elements
    assert "<figcaption>cat 60%, dog 40%</figcaption>" in elements and "<img src=x" not in elements
    for other in (images[:1], images[:, :, :, :2], np.zeros((2, 0, 8, 3), np.uint8)):
        np.savez(path, images=other, captions=["cat", "dog"])
        with pytest.raises(DataError, match=r"first_batch\.npz: not a grid of training images"):
            read(run)


def test_accuracies_on_different_images_have_no_best(run, tmp_path):
    """A run that was evaluated on the test split is not better than one on the validation split."""
    other = run_folder(tmp_path / "20260102-040506-catdog", eval_split="test")
    text = write_comparison([run, other], tmp_path / "compare.html").read_text()
    assert 'class="best"' not in text
    assert "Evaluated on different images: the accuracies cannot be compared." in text


def test_runs_on_parts_of_the_training_images_compare(run, tmp_path):
    """Two that were evaluated on the same version of --data, whatever they were trained on."""
    other = run_folder(tmp_path / "20260102-040506-catdog")
    for folder, digest in ((run, "aa"), (other, "bb")):
        config = json.loads((folder / "config.json").read_text())
        recorded = {
            "data_sha256": digest,
            "data_versions": {"data": "cc", f"more {digest}": digest},
        }
        (folder / "config.json").write_text(json.dumps({**config, **recorded}))
    text = write_comparison([run, other], tmp_path / "compare.html").read_text()
    assert text.count('class="best"') == 2  # equal ones
    assert "Evaluated on different images" not in text


def test_a_run_without_settings_or_accuracy_changes_no_comparison(run, tmp_path):
    """One of an own command that failed: no setting differs by its lack of any, the best is one."""
    bare, other = tmp_path / "20260102-060708-own", run_folder(tmp_path / "20260102-040506-catdog")
    bare.mkdir()
    (bare / "plan.json").write_text("{}")
    text = write_comparison([bare, run, other], tmp_path / "compare.html").read_text()
    assert text.count('class="best"') == 2  # equal ones
    assert "Evaluated on different images" not in text
    assert "<code>lr</code>" not in text and bare.name in text


@pytest.mark.parametrize(
    "missing",
    [
        ("metrics.jsonl",),
        ("result.json", "usage.jsonl", "predictions.npz"),
        ("plan.json", "result.json"),
    ],
)
def test_a_page_of_what_there_is(run, missing):
    """A run that has just begun, or measured nothing, has a page of the rest."""
    for name in missing:
        (run / name).unlink()
    assert run.name in write(run).read_text()


@pytest.mark.parametrize("synthetic", [False, True])
def test_noise_has_no_curves_of_loss_and_accuracy(tmp_path, synthetic):
    """The speed of --synthetic images is real, what a model says of them is not."""
    story = read(run_folder(tmp_path / "20260102-030405-noise", synthetic=synthetic))
    shown = {title for title, _ in charts([story])}
    learned = set() if synthetic else {"loss", "accuracy"}
    assert shown == {"images/s", "learning rate"} | learned


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("usage.jsonl", '{"time": 1}\n'),
        ("metrics.jsonl", '{"kind": "other"}\n'),
        ("metrics.jsonl", '{"kind": "train", "step": "x"}\n'),
        ("predictions.npz", "not an archive"),
        ("plan.json", '{"hosts": [{"name": 3}]}'),
        ("result.json", '{"seconds": "long"}'),
        ("config.json", "[]"),
    ],
)
def test_a_damaged_file_is_named(run, name, content):
    """No page is made of what cannot be understood."""
    (run / name).write_text(content)
    with pytest.raises(DataError, match=re.escape(name)):
        write(run)


@pytest.mark.parametrize(
    "other",
    [
        {"labels": np.zeros(2, np.int64)},
        {"predicted": np.full(3, 2)},
        {"classes": np.array([{}], object)},
    ],
    ids=["count", "class", "pickled"],
)
def test_a_grid_that_does_not_fit_is_refused(run, other):
    """Predictions that contradict themselves are named; nothing is unpickled."""
    with np.load(run / "predictions.npz") as grid:
        np.savez(run / "predictions.npz", **(dict(grid) | other))
    with pytest.raises(DataError, match=r"predictions\.npz: not a grid of predictions"):
        read(run)


def test_a_line_that_was_cut_short_is_left_out(run):
    """A run that was killed while writing its last line has a page of the others."""
    lines = len(read(run).train)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "st')
    assert len(read(run).train) == lines


def test_shares_by_speed_are_a_drawing_and_rows(run):
    """Each change of the images by rank is a row; even shares have no such section."""
    metrics = run / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    begun = read(run).begun
    changes = [
        {"kind": "shares", "step": step, "epoch": 0.1, "images": images, "time": begun + seconds}
        for step, seconds, images in (
            (0, 3, {"0": 10, "1": 10, "3": 9}),
            (33, 20, {"0": 4, "1": 8, "3": 17}),
        )
    ]
    write_lines(metrics, [*lines, *changes[:1]])
    assert "Images per rank" not in page_of(run)
    write_lines(metrics, [*lines, *changes])
    page = page_of(run)
    assert "<h2>Images per rank</h2>" in page
    assert page.count("<title>rank ") == 3
    assert "<td>0:03</td><td>0</td><td>10, 10, 9</td>" in page
    assert "<td>0:20</td><td>33</td><td>4, 8, 17</td>" in page


def page_of(run: Path) -> str:
    """Return the page of a run that has been written again."""
    return write(run).read_text()
