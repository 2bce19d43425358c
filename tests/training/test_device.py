"""What --compile needs is asked for before training begins."""

from dataclasses import replace

import pytest
import torch

from catdog.recipes import CatDog
from rackrun.errors import UsageError
from training.device import set_up
from training.ranks import Ranks

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


def test_compiling_without_a_compiler_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one sentence with what to type, and not in the first step by a traceback of torch."""
    config = replace(CatDog(), synthetic=True, compile=True)
    assert set_up(config, ALONE).compile
    monkeypatch.setenv("CXX", "no-such-compiler -O3")
    with pytest.raises(UsageError, match=r"no 'no-such-compiler -O3'; type sudo apt-get install"):
        set_up(config, ALONE)
