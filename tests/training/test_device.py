"""What the settings of a device come to, before training begins."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from catdog.recipes import CatDog
from rackrun.errors import UsageError
from training.config import Config
from training.device import set_up
from training.ranks import Ranks
from training.run.compilation import compilation_reported
from training.run.progress import ProgressReporter
from training.schedule import make_schedule

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with what to type, and not in the first step by a traceback of torch."""
    config = replace(CatDog(), synthetic=True, compile=True)
    assert set_up(config, ALONE).compile
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(UsageError, match=r"no 'no-such-compiler -O3'; type sudo apt-get install"):
        set_up(config, ALONE)


@pytest.mark.parametrize(("major", "native"), [(7, False), (8, True)])
def test_bfloat16_is_used_where_the_gpu_computes_in_it(
    major: int, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute capability 7 emulates it, which is slower than float32: that, and a line about it."""
    gpu = SimpleNamespace(major=major, minor=5, name="Tesla T4")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: gpu)
    config, ranks = CatDog(synthetic=True), replace(ALONE, device=torch.device("cuda", 0))
    compute = set_up(config, ranks)
    assert compute.autocast == native
    said = "computes in float32: Tesla T4 has no bfloat16 of its own (--autocast auto)"
    assert compute.why_float32(config.autocast) == ("" if native else said)
    assert set_up(replace(config, autocast="on"), ranks).autocast
    set_up(config, ALONE)  # sums of float32 as before


def test_a_compilation_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step and one with other shapes are reported as "compile", then as before."""
    phases: list[str] = []
    progress = ProgressReporter(ALONE, make_schedule(Config(), 8, 1), epochs=1)
    monkeypatch.setattr(progress._reporter, "send", lambda: phases.append(progress.current_phase))
    model = torch.nn.Linear(3, 2)
    model.compile(backend="eager", dynamic=False)
    progress.phase("train")
    with compilation_reported(progress, True):
        for images in (4, 4, 2):
            model(torch.rand(images, 3))
    model(torch.rand(5, 3))
    assert phases == ["train", *2 * ["compile", "train"]]
