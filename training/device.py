"""The device of a rank, and computation on it: precision, layout, compilation, random seeds."""

import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exc
from typing import Any

import torch
from torch import nn

from rackrun.commandline.program import location_in_user_code
from rackrun.contract import variables
from rackrun.cuda import driver_here, gpu_problem
from rackrun.errors import Problem, UsageError
from rackrun.machine import bind_near, why_no_compiler
from rackrun.terminal import one_line
from rackrun.training.config import Config
from rackrun.training.models.named import is_own
from rackrun.training.ranks import Ranks, usual_workers
from rackrun.training.settings.ranks import Precision
from rackrun.training.task import blamed_on_model
from rackrun.units import plural

PREFERRED: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
FLOAT16 = 7  # the compute capability of Volta, the first with fast products in float16
EMULATED = {"bf16": "bfloat16", "fp16": "float16"}
PRODUCTS = {"bf16": ("avx512bw", "bf16"), "fp16": ("avx512_fp16", "asimdhp")}
"""Flags of CPUs, of Intel and of ARM, whose products in these types torch has kernels for."""
CODE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
Normalize = Callable[[torch.Tensor], torch.Tensor]
"""uint8 (B, channels, size, size) -> the inputs of a model, float."""
THREADS = torch.get_num_threads()  # by OMP_NUM_THREADS or the number of cores


class DeviceError(Problem):
    """The GPUs of this host cannot be used."""

    exit_code = 78


@dataclass(frozen=True)
class Compute:
    """The settings of a device, resolved."""

    device: torch.device
    precision: Precision
    channels_last: bool
    compile: bool
    own_model: str = ""
    """The name of a model of the user's own."""

    def placed(self, model: nn.Module) -> nn.Module:
        """Return the model on the device, in its layout, compiled in place if asked for."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        model = model.to(self.device).to(memory_format=layout)
        if self.compile:
            model.compile()
        return model

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type that mixed precision computes in; None without it."""
        return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)

    def autocast(self) -> torch.autocast:
        """Return the context in which a model computes."""
        dtype = self.autocast_dtype
        return torch.autocast(self.device.type, dtype or torch.bfloat16, enabled=dtype is not None)

    def remark(self, config: Config) -> str:
        """Return a line on what `auto` uses in place of bfloat16, or on what a CPU emulates.

        Empty where neither is the case.
        """
        if (
            self.device.type == "cpu"
            and self.precision in EMULATED
            and not cpu_flags().intersection(PRODUCTS[self.precision])
        ):
            return (
                f"computes in {EMULATED[self.precision]}, which this CPU only emulates, several"
                " times slower than float32: type --precision fp32"
            )
        if self.device.type != "cuda" or self.precision == "bf16" or config.precision != "auto":
            return ""
        lacks = "not every GPU here has bfloat16 of its own"
        if self.precision == "fp16":
            return f"computes in float16 with a scaled loss: {lacks} (--precision auto)"
        return f"computes in float32: {lacks} (--precision auto)"

    def logits(
        self, model: nn.Module, normalize: Normalize, images: torch.Tensor, flip: bool = False
    ) -> torch.Tensor:
        """Return the model's logits: uint8 (B, channels, size, size) -> float (B, classes).

        With `flip`, the mean of the logits of the images and of their mirror images.
        """
        if flip:
            mirrored = self.logits(model, normalize, images.flip(3))
            return (self.logits(model, normalize, images) + mirrored) / 2
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        inputs = normalize(images).contiguous(memory_format=layout)
        try:
            with self.autocast():
                logits: object = model(inputs)
        except RuntimeError as error:
            if self.channels_last and "view size is not compatible" in str(error):
                advice = "write .reshape or .flatten for .view, or type --channels-last off"
                raise RuntimeError(f"{advice}: {one_line(str(error))}") from error
            if not self.own_model or location_in_user_code(format_exc()):
                raise  # which names the line
            with blamed_on_model(self.own_model):
                raise
        if not isinstance(logits, torch.Tensor):
            what = f"the model returns {type(logits).__name__}"
            raise UsageError(f"{what}; return a tensor of logits: (batch, classes)")
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


def rank_device(device_option: str, local_rank: int) -> torch.device:
    """Return the device of a rank of this host; DeviceError for a GPU that torch cannot use."""
    if device_option == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available() and device_option == "auto":
        # Where the launcher has planned a rank for each GPU, a rank without one is an error, unless
        # the user has hidden them.
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1")
        if hidden or not os.environ.get(variables.GPUS):
            return torch.device("cpu")
        raise DeviceError(f"{socket.gethostname()}: {_why_no_gpu()}")
    if local_rank >= torch.cuda.device_count():
        raise UsageError(
            f"{socket.gethostname()}: local rank {local_rank} needs its own GPU, found"
            f" {plural(torch.cuda.device_count(), 'GPU')}; type --device cpu, or start fewer ranks"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    capability = ".".join(map(str, torch.cuda.get_device_capability(device)))
    if why := _problem_with([capability]):
        raise DeviceError(f"{socket.gethostname()}: {why}")
    return device


def _why_no_gpu() -> str:
    why = _problem_with([])
    if not why:
        try:
            torch.zeros(1, device="cuda")
        except (RuntimeError, AssertionError) as error:
            why = f"torch cannot use the GPUs here: {one_line(str(error))}"
    return f"{why or 'torch finds no GPU'}; to train on the CPU type --device cpu"


def _problem_with(capabilities: list[str]) -> str:
    archs = " ".join(torch.cuda.get_arch_list())
    return gpu_problem(
        torch.__version__, torch.version.cuda or "", archs, driver_here(), capabilities
    )


def set_up(config: Config, ranks: Ranks) -> Compute:
    """Resolve what is left to the device, and set up torch."""
    if config.compile:
        if why := why_no_compiler():  # torch would miss it at the first step only
            raise UsageError(f"{socket.gethostname()}: {why}")
        _keep_compiled_code()
    on_gpu = ranks.device.type == "cuda"
    torch.manual_seed(config.seed)
    torch.backends.cudnn.benchmark = not config.deterministic
    precision = _precision(config, ranks)
    has_tf32 = on_gpu and precision != "fp32"
    torch.set_float32_matmul_precision("high" if has_tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = has_tf32
    if not on_gpu and not config.synthetic:
        # Threads that wait for one another while a loader has their core are 30 times slower.
        # Sums depend on the number of threads: it must not depend on the number of workers.
        torch.set_num_threads(max(THREADS - usual_workers(ranks), 1))
    if on_gpu and config.numa_binding:
        gpu: Any = torch.cuda.get_device_properties(ranks.device)
        if hasattr(gpu, "pci_bus_id"):  # older versions of torch do not know
            address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
            bind_near(address)
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if torch.are_deterministic_algorithms_enabled() != config.deterministic:
        torch.use_deterministic_algorithms(config.deterministic)  # imports a compiler: seconds
    return Compute(
        device=ranks.device,
        precision=precision,
        channels_last=config.channels_last != "off",
        compile=config.compile,
        own_model=config.model if is_own(config.model) else "",
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


def _keep_compiled_code() -> None:
    if os.environ.get(CODE_CACHE):
        return
    # In this account's own cache: torch would load what lies in a folder of a known name in /tmp,
    # whoever made that.
    try:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").resolve()
        folder = caches / "rackrun" / "inductor"
        # One by one: parents=True obeys the umask.
        for directory in (caches, folder.parent, folder):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_closed(directory):
                why = f"{directory} is not a folder that this account alone can write to"
                raise UsageError(_no_code_cache(why))
    except (OSError, RuntimeError) as error:  # RuntimeError: an account without a home
        raise UsageError(_no_code_cache(str(error))) from None
    os.environ[CODE_CACHE] = str(folder)


def _is_closed(folder: Path) -> bool:
    # No other account but root can put something into it, or replace it.
    status = folder.lstat()
    return (
        stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o022
    )


def _no_code_cache(why: str) -> str:
    remedy = f"type: export {CODE_CACHE}=FOLDER, one of this account alone, or leave --compile out"
    return f"{socket.gethostname()}: --compile has no place for compiled code: {why}; {remedy}"


def _precision(config: Config, ranks: Ranks) -> Precision:
    # Older GPUs emulate bfloat16, slowly: what counts is whether they compute in it themselves.
    native = ranks.device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if config.precision == "tf32" and not native:  # the same GPUs have both
        return "fp32"
    if config.precision != "auto":
        return config.precision
    supported: Precision = "fp32"
    if native:
        supported = "bf16"
    elif ranks.device.type == "cuda":
        major, _ = torch.cuda.get_device_capability(ranks.device)
        supported = "fp16" if major >= FLOAT16 else "fp32"
    # All ranks compute in the same one: what the oldest of their GPUs has.
    return PREFERRED[ranks.all_reduce_max(PREFERRED.index(supported))]


def cpu_flags() -> set[str]:
    """Return what this CPU can do, in the kernel's words; nothing where it does not say."""
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()
