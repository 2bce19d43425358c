"""Draw docs/images: the dashboard, from made-up events of 64 ranks, and report.html of a run.

    python docs/site/pictures.py runs/20260101-120000-catdog

The dashboard is drawn by the launcher's own code, as in tests/launcher/output/test_dashboard.py:
only what the hosts report is made up. Both are what Chromium shows, in true colour.
"""

import io
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageChops
from rich.console import Console
from rich.terminal_theme import TerminalTheme

from rackrun.launcher.output.dashboard import Dashboard
from rackrun.launcher.output.run_view import view
from rackrun.launcher.run.events import Event, Gpu, RankStarted, Report, Usage
from rackrun.launcher.run.job import Job, TaskWork
from rackrun.launcher.run.plan import Plan, PlannedHost, make_plan
from rackrun.launcher.run.state import RunState
from rackrun.run_folder import RunFolder
from rackrun.run_report.page import write

IMAGES = Path(__file__).parents[1] / "images"
HOSTS, GPUS, SLOW = 8, 8, 4  # hosts, GPUs of each, and the host that reads its data slowly
EPOCHS, EPOCH_STEPS, EPOCH_STEP, EPOCH = 90, 78, 45, 31
STEP_SECONDS, IMAGES_PER_SECOND = 0.139, 117_870.0
COLUMNS, LINES = 100, 30
PAPER = (23, 26, 33)
THEME = TerminalTheme(
    PAPER,
    (222, 226, 235),
    [
        *((40, 44, 54), (240, 113, 120), (140, 200, 140), (226, 190, 110)),
        *((110, 160, 240), (190, 150, 230), (86, 194, 200), (222, 226, 235)),
    ],
    [
        *((96, 102, 116), (240, 113, 120), (140, 200, 140), (226, 190, 110)),
        *((110, 160, 240), (190, 150, 230), (86, 194, 200), (255, 255, 255)),
    ],
)
TERMINAL = """<!doctype html><meta charset="utf-8"><style>{stylesheet}
body {{ margin: 16px; background: {background}; color: {foreground}; }}
pre {{ margin: 0; font: 15px/1.25 "DejaVu Sans Mono", monospace; }}</style><pre>{code}</pre>"""


def main(run: Path) -> None:
    """Draw both pictures."""
    with tempfile.TemporaryDirectory() as made:
        page = Path(made, "page.html")
        page.write_text(dashboard())
        picture = screenshot(page, 980, 600, 1.5)
        paper = Image.new("RGB", picture.size, PAPER)
        _, top, right, bottom = ImageChops.difference(picture, paper).getbbox() or (0, 0, 0, 0)
        board = picture.crop((0, 0, right + top, bottom + top))
        board.save(IMAGES / "dashboard.png", optimize=True)
        report = screenshot(write(run, page), 960, 1006, 1.0)
        report.save(IMAGES / "report-html.png", optimize=True)


def dashboard() -> str:
    """Return the dashboard of a run on 64 GPUs as HTML."""
    folder = Path("runs/20260101-120000-imagenet").absolute()
    host = {"python": "python", "workdir": "/", "folder": "/", "gpus": True}
    hosts = [
        PlannedHost(f"gpu{n:02}", "a", GPUS, **host, gpu_model="H100 80GB HBM3")
        for n in range(1, HOSTS + 1)
    ]
    plan = make_plan(Job(TaskWork("imagenet"), RunFolder(folder), "3fa81c02" * 4), hosts, 1)
    board = Dashboard()
    board.console = Console(
        file=io.StringIO(), force_terminal=True, record=True, width=COLUMNS, height=LINES
    )
    run, now = RunState(plan, 0.0), 0.0
    for now, event in events(plan):
        run.take(event, now)
    board.console.print(board.board(view(run, "imagenet", RunFolder(folder), now, {})))
    return board.console.export_html(theme=THEME, code_format=TERMINAL)


def events(plan: Plan) -> Iterator[tuple[float, Event]]:
    """Yield what the hosts report, and when."""
    begun, step = 20.0, (EPOCH - 1) * EPOCH_STEPS + EPOCH_STEP
    now = begun + step * STEP_SECONDS
    counted = {"epochs": EPOCHS, "epoch_steps": EPOCH_STEPS, "steps": EPOCHS * EPOCH_STEPS}
    measured = {
        **{"epoch": EPOCH, "epoch_step": EPOCH_STEP, "step": step, "loss": 2.3178},
        **{"accuracy": 0.507, "images_per_second": IMAGES_PER_SECOND, "best": 0.6149},
        "checkpoint": step - EPOCH_STEP,
    }
    said = {
        "dataset": "imagenet, 1,281,167 images in 1,000 classes",
        **{"slow_rank": SLOW * GPUS, "slow_why": "data", "slow": "the others wait for it"},
    }
    for rank in range(plan.world_size):
        yield 0.0, RankStarted(rank // GPUS, rank, 5)
        yield begun, Report(rank // GPUS, rank, {"phase": "train", "step": 1, **counted})
        yield now, Report(rank // GPUS, rank, measured | (said if rank == 0 else {}))
    for node in range(HOSTS):
        busy = [97] * GPUS if node != SLOW else [97] * (GPUS - 1) + [12]
        gpus = tuple(Gpu(percent, 61_000, 81_559) for percent in busy)
        cpu = 0.96 if node == SLOW else 0.34 + node % 3 / 50
        memory = 210 * 10**9 + node * 10**9
        yield now, Usage(node, cpu, memory, 2_160 * 10**9, gpus, 9 * 10**9, 9 * 10**9)


def screenshot(page: Path, width: int, height: int, scale: float) -> Image.Image:
    """Return what Chromium shows of a page, in `scale` pixels per point."""
    picture = page.with_suffix(".png")
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", f"--screenshot={picture}"]
    command += [f"--force-device-scale-factor={scale}", f"--window-size={width},{height}"]
    subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=120)
    with Image.open(picture) as found:
        return found.convert("RGB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
