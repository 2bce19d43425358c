"""What ranks compute on, in which precision, and how they exchange gradients."""

from dataclasses import dataclass
from typing import Literal

from rackrun.commandline.ranges import Positive
from rackrun.training.settings import Slice, Switch

Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]


@dataclass(frozen=True)
class SyncSettings(Slice):
    """Communication between ranks."""

    grad_accum_steps: Positive = 1
    """Compute each batch in this many parts: the same step in less memory."""
    grad_compression: Literal["float32", "bfloat16"] = "float32"
    """Compression of the gradients that ranks exchange, for slow networks."""


@dataclass(frozen=True)
class DeviceSettings(Slice):
    """Device and precision."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """bf16 and fp16 are mixed precision, fp16 with a scaled loss; tf32 is float32 with TF32
    products if the GPU has them. auto: bf16 if all GPUs have it in hardware (Ampere or newer), else
    fp16 (Volta, Turing); fp32 on older ones and on the CPU."""
    channels_last: Switch = "auto"
    """Use the memory layout NHWC; auto: on, which is nearly always faster."""
    compile: bool = False
    """Compile the model with torch.compile: a slower start, faster steps."""
    numa_binding: bool = True
    """On hosts with several CPU sockets, run each rank and its loader on the cores closest to its
    GPU."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's blocks, and recompute the rest in backward: less memory,
    slower steps."""
    deterministic: bool = False
    """Use only deterministic algorithms: slower on a GPU."""

    def problems(self) -> list[str]:
        """Refuse --gradient-checkpointing together with --compile."""
        problems = super().problems()
        if self.gradient_checkpointing and self.compile:
            problems.append(
                "--gradient-checkpointing and --compile exclude each other: torch.compile decides"
                " itself what to recompute"
            )
        return problems
