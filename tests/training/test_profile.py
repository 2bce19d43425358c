"""Where the time of a step goes, and the table that says so."""

import json
import os
import subprocess
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from imagenet.model import TASK
from imagenet.recipes import ImageNet
from launcher.supervision.reports import valid_fields
from tests import warm
from training.data.open import open_data
from training.device import set_up
from training.phases.measure import (
    MemoryTraffic,
    Peak,
    StepProfile,
    Window,
    forward_flops,
    measure,
    peak_of,
)
from training.ranks import Ranks
from training.state import TrainingState
from training.sync.gradient_sync import GradientSync

ROOT = Path(__file__).parents[2]
ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))
SMALL = ImageNet(
    synthetic=True, model="shufflenet_v2_x0_5", image_size=32, batch_size=4, device="cpu"
)


def test_the_table_adds_up() -> None:
    """Rates follow from the times; what the exchange adds is what efficiency lacks."""
    middle = Window(
        data=0.01, forward=0.02, local=0.07, together=0.08, update=0.01, sending=0.12
    )  # fmt: skip
    speed = StepProfile(
        windows=(replace(middle, data=0.03), middle, replace(middle, data=0.002)),
        images=32, ranks=4, image_flops=12e9, image_bytes=400e6, peak=Peak(100e12, 1e12),
        sent_bytes=100_000_000,
    )  # fmt: skip
    assert speed.typical.step == pytest.approx(0.1)
    assert speed.rank_rate == pytest.approx(320)
    assert speed.efficiency == pytest.approx(0.9)
    table = speed.table()
    assert "320.0 per rank, 1,280.0 in all; efficiency against one process 90.0%" in table
    assert "3.840 TFLOP/s per rank, 3.8% of the GPU's peak" in table
    assert "backward                    50.00        50.0%" in table
    assert "100.0 MB of gradients take 120.00 ms alone, 10.00 Gbit/s each way" in table
    assert "memory: 400 MB per image, 0.128 TB/s per rank, 12.8% of the GPU's bandwidth" in table
    assert "on each of 4 ranks, 92.00 to 120.00 ms in 3 windows:" in table
    report = speed.report()
    assert report["steps"] == pytest.approx([0.12, 0.1, 0.092])
    assert report["together"] == [0.08] * 3 and report["rank_rate"] == pytest.approx(320)
    fields = valid_fields(json.dumps({"speed": report}).encode())
    received = fields and fields["speed"]
    assert isinstance(received, dict) and received["sending"] == [0.12] * 3


def test_the_arithmetic_of_resnet50_is_the_published_one() -> None:
    """4.1 billion multiplications with an addition each, at 224 x 224."""
    config = ImageNet(synthetic=True, batch_size=1, device="cpu")
    compute, data = (
        set_up(config, ALONE),
        open_data(
            config, ALONE, partial(TASK.transforms, config), TASK.name, TASK.synthetic_classes
        ),
    )
    model = TASK.model(config, 1000)
    flops = forward_flops(model, TASK.transforms(config, 0), compute, next(data.training(0)))
    assert flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert model.training


def test_one_process_is_measured_without_an_exchange() -> None:
    """Every part takes time but the exchange that does not happen."""
    compute, data = (
        set_up(SMALL, ALONE),
        open_data(SMALL, ALONE, partial(TASK.transforms, SMALL), TASK.name, TASK.synthetic_classes),
    )
    state = TrainingState(TASK.model(SMALL, 1000), SMALL)
    batches = data.training(0)
    speed = measure(
        state,
        GradientSync(SMALL, ALONE, state, 5),
        TASK.transforms(SMALL, 0),
        compute,
        ALONE,
        batches,
    )
    assert len(speed.windows) == 3
    for window in speed.windows:
        assert min(window.forward, window.local, window.update) > 0 == window.exchange
    assert speed.efficiency == 1
    assert speed.peak == Peak()
    assert "memory: " in speed.table() and "bandwidth of this device not known" in speed.table()


def test_a_rare_exchange_costs_its_share_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that average after every fourth step pay a quarter of that in each."""
    compute, data = (
        set_up(SMALL, ALONE),
        open_data(SMALL, ALONE, partial(TASK.transforms, SMALL), TASK.name, TASK.synthetic_classes),
    )
    state = TrainingState(TASK.model(SMALL, 1000), SMALL)
    monkeypatch.setattr(GradientSync, "average_now", lambda sync: time.sleep(0.02))
    args = (
        state,
        GradientSync(SMALL, ALONE, state, 5),
        TASK.transforms(SMALL, 0),
        compute,
        ALONE,
        data.training(0),
        4,
    )
    assert 0.005 <= measure(*args).typical.exchange < 0.5


def test_memory_traffic_is_what_operations_read_and_write() -> None:
    """A sum of two tensors moves three of them, a view none."""
    tensor = torch.zeros(250)
    with MemoryTraffic() as traffic:
        (tensor + tensor).view(5, 50)
    assert traffic.moved == 3 * tensor.nbytes


def test_a_gpu_is_known_by_the_words_of_its_name() -> None:
    """Dashes and further words do not matter; what is not known has no peak."""
    assert peak_of("NVIDIA A100-SXM4-80GB") == Peak(312e12, 2.04e12)
    assert peak_of("NVIDIA A100-PCIE-40GB").memory_bytes == 1.56e12
    assert peak_of("NVIDIA H100 80GB HBM3").memory_bytes == 3.35e12
    assert peak_of("NVIDIA A1000 Laptop GPU") == peak_of("") == Peak()


def test_two_ranks_say_where_their_time_goes(tmp_path: Path) -> None:
    """--synthetic ends with the table, from real ranks."""
    options = (
        "--synthetic --model shufflenet_v2_x0_5 --image-size 32 --batch-size 4 --epochs 1 "
        f"--steps-per-epoch 3 --device cpu --no-tensorboard --run-folder {tmp_path / 'run'}"
    )
    job = warm.ranks(
        2,
        *("-m", "imagenet", *options.split()),
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    printed = [rank.communicate()[0] for rank in job][0]
    assert [rank.returncode for rank in job] == [0, 0]
    assert "a step of 4 images on each of 2 ranks, " in printed
    assert "efficiency against one process" in printed
    assert "network: 5.5 MB of gradients take" in printed
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["synthetic"]
