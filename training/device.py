"""Computation on a device: precision, memory layout, compilation, random seeds."""

import os
import shutil
import socket
from dataclasses import dataclass

import torch
from torch import nn

from rackrun.errors import UsageError
from training.config import Config, Switch
from training.data.loader import usual_workers
from training.data.transforms import Transforms
from training.ranks import Ranks

THREADS = torch.get_num_threads()  # as OMP_NUM_THREADS or the number of cores says


@dataclass(frozen=True)
class Compute:
    """The settings of a device, resolved."""

    device: torch.device
    autocast: bool
    channels_last: bool
    compile: bool

    def placed(self, model: nn.Module) -> nn.Module:
        """The model on the device, in its layout, compiled in place if so wished."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = model.to(self.device).to(memory_format=layout)
        if self.compile:
            model.compile()
        return model

    def why_float32(self, autocast: Switch) -> str:
        """Return that the GPU lacks what `auto` would have used; "" where it does not."""
        if self.device.type != "cuda" or self.autocast or autocast != "auto":
            return ""
        name = torch.cuda.get_device_name(self.device)
        return f"computes in float32: {name} has no bfloat16 of its own (--autocast auto)"

    def answers(
        self, model: nn.Module, transforms: Transforms, images: torch.Tensor
    ) -> torch.Tensor:
        """uint8 (B, channels, size, size) -> float32 (or float64) (B, classes)."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        inputs = transforms.normalised(images).contiguous(memory_format=layout)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            outputs: torch.Tensor = model(inputs)
        return outputs.to(torch.promote_types(outputs.dtype, torch.float32))


def set_up(config: Config, ranks: Ranks) -> Compute:
    """Resolve what is left to the device, and tell torch."""
    if config.compile:
        _need_compiler()
    on_gpu = ranks.device.type == "cuda"
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = not config.deterministic
    torch.set_float32_matmul_precision("high" if on_gpu else "highest")
    if not on_gpu and not config.synthetic:
        # Threads that wait for one another while a loader has their core are 30 times slower.
        # Sums depend on the number of threads: it must not depend on the number of workers.
        torch.set_num_threads(max(THREADS - usual_workers(ranks), 1))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(config.deterministic)
    return Compute(
        device=ranks.device,
        autocast=_on(config.autocast, on_gpu and _has_bfloat16()),
        channels_last=_on(config.channels_last, True),
        compile=config.compile,
    )


def seed_step(config: Config, ranks: Ranks, step: int) -> None:
    """Make what torch draws in a step (dropout and the like) a function of seed, step and rank.

    So no state of a random generator has to be saved. torch.manual_seed would do the same for
    every kind of device there could be, which costs more than a small step has to spare.
    """
    seed = ((config.seed * 1_000_003 + step) * 65_537 + ranks.rank) % 2**63
    torch.default_generator.manual_seed(seed)
    if ranks.device.type == "cuda":
        torch.cuda.default_generators[ranks.device.index].manual_seed(seed)


def _need_compiler() -> None:
    """torch.compile writes C++: that nobody translates it would show at the first step only."""
    compiler = os.environ.get("CXX", "g++")
    if not shutil.which(compiler.partition(" ")[0]):
        raise UsageError(
            f"{socket.gethostname()}: --compile needs a C++ compiler, and there is no {compiler!r};"
            " type sudo apt-get install g++ python3-dev, or leave --compile out"
        )


def _has_bfloat16() -> bool:
    """Return whether the GPU computes in bfloat16 itself: older ones emulate it, slowly."""
    return bool(torch.cuda.is_bf16_supported(including_emulation=False))


def _on(switch: Switch, default: bool) -> bool:
    return default if switch == "auto" else switch == "on"
