"""The dashboard in a browser: who may look, what is seen, while a real run goes on."""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from launcher.commands.board import WebDisplay, of_folder
from launcher.output.journal import LiveState
from launcher.run.events import Event, Gpu, RankStarted, Regrouped, Report, Usage
from launcher.run.job import Job, TaskWork
from launcher.run.state import RunState
from launcher.web.server import served
from rackrun.run_folder import RunFolder, new_run_folder
from rackrun.run_history import Generation
from tests.launcher.detached_lab import DetachedLab
from tests.launcher.drive import ROOT
from tests.launcher.output.test_dashboard import plan_of
from tests.rackrun.test_run_report import browsed
from tests.waiting import until

EVIL = "<script>alert(1)</script>"


def state() -> dict:
    """Return the state of a run of two hosts in which a name is an attack."""
    plan, job = plan_of(2, 1), Job(TaskWork(EVIL), RunFolder(Path("/runs/x")))
    run, live = RunState(plan, 0.0), LiveState(job, plan)
    events: list[Event] = [
        RankStarted(0, 0, 5),
        RankStarted(1, 1, 5),
        Usage(1, 0.5, 10**9, 4 * 10**9, (Gpu(97, 1, 2),) * 7 + (Gpu(0, 1, 2),), 10**8, 10**7),
    ]
    for step in (1, 2, 3):
        fields = {"phase": "train", "step": step, "steps": 9, "loss": 1 / step, "epoch": 1}
        events.append(Report(0, 0, fields | {"epoch_steps": 9, "epochs": 1, "accuracy": 0.5}))
    for event in events:
        run.take(event, 1.0)
        live.take(event)
    return live.at(run, 2.0)


@pytest.fixture
def address() -> Iterator[str]:
    with served(state) as address:
        yield address


def asked(address: str, method: str = "GET", host: str = "") -> http.client.HTTPResponse:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    connection.request(method, url.path, headers={"Host": host or url.netloc})
    reply = connection.getresponse()
    connection.close()
    return reply


def test_a_browser_shows_a_run(address: str, tmp_path: Path) -> None:
    """Names are text, one idle GPU of eight is seen, curves are drawn, the console is empty."""
    elements, console = browsed(address, tmp_path)
    assert console == []
    body = elements.partition("<body>")[2].partition("<script")[0]
    assert "accuracy: 50.0%" in body
    for text in ("&lt;script&gt;alert(1)", "2 ranks on 2 hosts", "7x 97% 1x 0%", "↓100 ↑10 MB/s"):
        assert text in body
    assert body.count("<polyline") == 2
    assert "<th>images/s</th>" not in body  # no host reports it
    assert "● training" in body


@pytest.mark.parametrize(
    ("path", "method", "host", "code"),
    [
        ("", "GET", "", 200),
        ("live.json", "GET", "", 200),
        ("live.json", "POST", "", 501),
        ("live.json", "HEAD", "", 501),
        ("other", "GET", "", 404),
        ("../", "GET", "", 404),
        ("", "GET", "attacker.example", 404),
    ],
)
def test_who_may_look(address: str, path: str, method: str, host: str, code: int) -> None:
    """GET of two things, under the address that was printed; nothing under another name."""
    assert asked(address + path, method, host).status == code


def test_the_curves_of_an_elastic_run_go_on_without_its_first_rank() -> None:
    """Of a detached run, too: from a new group on, its first rank's loss is drawn."""
    plan = plan_of(2, 1)
    display = WebDisplay(Job(TaskWork("catdog"), RunFolder(Path("/runs/x"))), plan)
    run = RunState(plan, 0.0)
    group = Generation(2, 1, 1, 5.0, lost=("gpu001",))
    for event in (
        Report(0, 0, {"step": 1, "loss": 0.5}),
        Report(1, 1, {"step": 1, "loss": 0.6}),
        Regrouped(1, 1, group),
        Report(1, 1, {"step": 2, "loss": 0.4}),
    ):
        run.take(event, 1.0)
        display.show(event)
    display.draw(run, 2.0)
    assert [point[:2] for point in display.state["curves"]] == [[1, 0.5], [2, 0.4]]


def test_without_the_token_nothing_is_there(address: str) -> None:
    """Neither the page nor its data, and it listens on loopback only."""
    url = urlsplit(address)
    for path in ("/", "/live.json", f"{url.path[:-2]}/", f"{url.path}x/live.json"):
        assert asked(f"http://{url.netloc}{path}").status == 404
    assert url.hostname == "127.0.0.1"
    assert len(url.path) > 20
    policy = asked(address).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy


def test_the_board_of_a_run_that_goes_on(tmp_path: Path) -> None:
    """It is read while it runs, ends with Ctrl-C, and the run does not notice."""
    launcher = [sys.executable, "-m", "launcher", "local", "--plain", "--", "sleep", "600"]
    with subprocess.Popen(launcher, cwd=tmp_path, env=env(), stderr=subprocess.PIPE) as run:
        until(lambda: list(tmp_path.glob("runs/*/live.json")), "live.json", 60)
        (folder,) = tmp_path.glob("runs/2*")
        latest = str(tmp_path / "runs" / "latest")
        command = [sys.executable, "-m", "rackrun", "board", latest]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as board:
            assert board.stderr
            assert board.stderr.readline().endswith(f"(sleep), {folder}\n")
            address = re.findall(r"http://\S+", board.stderr.readline())[0]
            new_run_folder(tmp_path / "runs", "newer")  # the page stays that of its run
            observed = fetched(f"{address}live.json")
            assert (observed["name"], observed["hosts"][0]["name"]) == ("sleep", "localhost")
            board.send_signal(signal.SIGINT)
            assert board.wait(30) == 0
        assert run.poll() is None
        run.send_signal(signal.SIGINT)
        run.communicate(timeout=60)
    assert of_folder(folder) == {"ended": "interrupted"}
    assert not (folder / "live.json").exists()


REPORTING = """
import time
from rackrun import report
for step in (1, 2, 3):
    report(step=step, steps=9, loss=1 / step)
    time.sleep(0.3)
print("here", flush=True)
time.sleep(999)
"""


def test_the_board_of_a_detached_run(detached_on_one: DetachedLab) -> None:
    """It shows what attach would, live and to the end; Ctrl-C ends the board alone."""
    shared = ("--env", f"PYTHONPATH={ROOT}")
    detached_on_one.detach(*shared, detached_on_one.hosts, "--", sys.executable, "-c", REPORTING)
    with detached_on_one.start("board") as board:
        assert board.stderr
        address = re.findall(r"http://\S+", board.stderr.readline())[0]
        live = f"{address}live.json"
        until(lambda: bool(fetched(live).get("loss")), "a loss on the board", 60)
        observed = fetched(live)
        assert (observed["run_id"][:8], observed["steps"]) == (detached_on_one.run, 9)
        assert observed["machines"] == "1 rank on 1 host"
        assert detached_on_one.result_of("stop", "--force")[0] == 0
        until(lambda: "ended" in fetched(live), "the end on the board", 60)
        board.send_signal(signal.SIGINT)
        assert board.wait(30) == 0, board.stderr.read()


def env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def fetched(address: str) -> dict:
    url = urlsplit(address)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=10)
    connection.request("GET", url.path)
    content: dict = json.loads(connection.getresponse().read())
    connection.close()
    return content
