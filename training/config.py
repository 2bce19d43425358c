"""The settings of a run: each exists once, here, with its default and its unit.

The command line is made from these fields. They come in slices, and a function takes the slice
that it reads; `Config` is all of them, so that options, recipes and config.json stay flat. A recipe
is a subclass with other defaults; a task adds fields of its own the same way. Nothing here imports
torch, so that `--help` answers at once.
"""

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import cleandoc
from typing import Annotated, ClassVar, Literal, NoReturn, TypeVar, get_args

from rackrun.commandline.conditions import Condition
from rackrun.commandline.help_page import Head, show_options
from rackrun.commandline.options import HELP, Hidden, Values
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.contract.trackers import TrackerName
from rackrun.errors import UsageError
from rackrun.user_code.imports import is_import_path
from rackrun.user_code.sources import did_you_mean

Switch = Literal["auto", "on", "off"]
Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
OTHER_SPELLINGS = {
    "--learning-rate": "--lr",
    "--num-epochs": "--epochs",
    "--max-epochs": "--epochs",
    "--num-workers": "--workers",
    "--wd": "--weight-decay",
    "--opt": "--optimizer",
    "--arch": "--model",
    "--splitshards": "--exact-epochs",
    "--no-splitshards": "--no-exact-epochs",
}
"""Options as other training programs call them."""

OPTIMIZERS = ("sgd", "adamw", "lamb")
SHAPES = ("cosine", "linear", "polynomial", "step", "constant", "plateau")
Optimizer = Annotated[str, Values(f"{{{','.join(OPTIMIZERS)},MODULE:NAME}}")]
Shape = Annotated[str, Values(f"{{{','.join(SHAPES)},MODULE:NAME}}")]
Settings = TypeVar("Settings", bound="Config")
Range = tuple[str, float, float, str]
"""A number's name, least and greatest value, and these in words."""


@dataclass(frozen=True)
class RunSettings:
    """Model, run folder and checkpoint to start from."""

    recipe: str = "default"
    """Set of defaults to start from; other options override single ones."""
    model: str = "resnet50"
    """Name of the model: the task's own, any classification model of torchvision, `timm:NAME`, or
    your own as `my_models:Net`, called with num_classes."""
    weights: str = ""
    """Start from these weights: `imagenet` (torchvision's for --model), a file, a URL, or '' for
    none. A last layer of another size is reinitialized."""
    run_folder: str = ""
    """Folder of this run; runs/<time>-<task> if not given."""
    resume: str = ""
    """Resume from this checkpoint or run folder; `latest` is this task's newest run."""
    newer_data: bool = False
    """With --resume: go on with the version that --data names, which is the newest where it names
    none, instead of the run's own."""
    earlier_attempts: Annotated[str, Hidden] = ""
    """Run folders, newest first, comma-separated: continue from the newest checkpoint in them on
    any node, if there is one. The launcher sets this after a failure."""


@dataclass(frozen=True)
class DataSettings:
    """Data and batches."""

    data: str = ""
    """Folder or URL of the shards (`rackrun convert` makes them)."""
    cache: str = ""
    """Folder on the node, on a disk or in /dev/shm, that caches what is read from --data."""
    cache_size: float = 50.0
    """Size limit of --cache in GB on each host; the oldest entries are removed first."""
    cache_peers: bool = True
    """With --cache: hosts keep a part of the data each, and read the rest from each other."""
    prefetch: bool = False
    """Fill the caches of all hosts before the first step."""
    synthetic: bool = False
    """Train on fixed random images instead of data, to measure speed."""
    image_size: int = 224
    """Side of the square that the model sees, in pixels."""
    batch_size: int = 64
    """Images per step on each rank."""
    epochs: int = 10
    """Passes over the training set."""
    steps_per_epoch: int = 0
    """Steps per epoch; 0: as many as the training set fills."""
    exact_epochs: bool = False
    """Use every sample exactly once per epoch, on any number of ranks."""
    global_batch: int = 0
    """Exact epochs: images per step over all ranks; 0: --batch-size on each rank. A resumed run
    keeps its own, on any number of ranks; fewer ranks compute a step in several parts."""
    elastic: Annotated[bool, Hidden] = False
    """Train on in another group when ranks are lost or join. The launcher sets this; it decides who
    is in the group."""
    ledger: bool = False
    """Exact epochs: record which samples each rank trained on (`rackrun ledger`)."""
    only_classes: str = ""
    """Train only on these classes, by name or number: cat,dog."""
    class_weights: str = ""
    """How often each sample of a class is used per epoch: cat=2,dog=0.5; `balanced`: all classes
    equally often."""
    max_train_samples: int = 0
    """Number of training samples to use, the first ones; 0: all."""
    extra_data: str = ""
    """More shard folders with the same classes, and how often their samples are used per epoch:
    FOLDER=1,FOLDER=0.5."""
    aug_repeats: int = 1
    """Augmented copies of each drawn image (repeated augmentation); not with --exact-epochs or
    chosen samples."""
    shuffle_buffer: int = 1000
    """Images in the shuffle buffer of each worker."""
    workers: int = -1
    """Processes per rank that read and decode; -1: depends on the number of cores; 0: none."""
    gpu_decode: Switch = "off"
    """Decode the JPEGs of training on the GPU, where training crops at random and changes nothing
    else but the mirror; auto: if a short measurement at the start finds it faster than the
    workers."""
    first_batch_seconds: float = 300.0
    """Time limit for a rank to read its first batch; no rank takes a step before all have one."""
    seed: int = 0
    """Seed of all random numbers."""
    eval_split: str = "val"
    """Split of the data set to evaluate: val or test."""
    eval_flip: bool = False
    """Evaluate the mean of the outputs for an image and its mirror image."""
    bad_samples: Literal["fail", "quarantine"] = "fail"
    """Fail on an image that cannot be decoded, or skip it and count it."""
    bad_samples_limit: int = 100
    """Images per rank that quarantine skips before the run fails."""

    @property
    def judged_by(self) -> str:
        """Return the split that is evaluated, in words."""
        return "validation" if self.eval_split == "val" else self.eval_split

    @property
    def has_planned_order(self) -> bool:
        """Return whether a plan assigns samples to steps, whichever ranks compute them."""
        return self.exact_epochs or self.chooses or self.elastic

    @property
    def chooses(self) -> bool:
        """Return whether only some samples are trained on, or some more often than others."""
        choices = (self.only_classes, self.class_weights, self.max_train_samples, self.extra_data)
        return any(choices)


@dataclass(frozen=True)
class AugmentSettings:
    """Augmentation of training images, after the crop."""

    flip: bool = True
    """Mirror half of the training images; --no-flip for digits, letters and signs."""
    vertical_flip: bool = False
    """Turn half of the training images upside down: for aerial images or cells."""
    color_jitter: float = 0.0
    """Change brightness, contrast and saturation of training images by up to this share."""
    trivial_augment: bool = False
    """Apply one operation of random strength to each training image (TrivialAugment)."""
    rand_augment: int = 0
    """Apply two operations of this strength, 1 to 30, to each training image (RandAugment); 0:
    none."""
    augmix: int = 0
    """Blend each training image with changed copies of this severity, 1 to 10 (AugMix); 0: none."""
    random_erasing: float = 0.0
    """Share of training images in which a rectangle is covered with the mean color."""


@dataclass(frozen=True)
class TuningSettings:
    """Fine-tuning, learning rate schedule and early stopping."""

    freeze: str = ""
    """Layers that keep their weights, by name, comma-separated: features.conv0,features.norm0;
    `body` is all but the last layer."""
    head_epochs: int = 0
    """Epochs in which only the last layer trains, before all layers do."""
    head_lr: float = 1e-3
    """Peak learning rate during --head-epochs."""
    dropout: float = 0.0
    """Dropout before the last layer, as a share of its inputs; 0: as the model has it."""
    stochastic_depth: float = 0.0
    """Share of images for which training skips the last residual block, and earlier blocks for
    linearly fewer; 0: as the model has it."""
    lr_schedule: Shape = "cosine"
    """How the learning rate falls after the warm-up; `plateau`: when evaluations stop improving;
    your own as `my_schedules:triangle`, called with step and steps."""
    plateau_epochs: int = 2
    """Schedule `plateau`: evaluations without improvement before the learning rate falls."""
    plateau_factor: float = 0.1
    """Schedule `plateau`: factor by which the learning rate falls."""
    patience: int = 0
    """End the run after this many evaluations in a row without improvement (early stopping); 0:
    never."""


@dataclass(frozen=True)
class OptimSettings:
    """Optimizer, learning rate and loss."""

    optimizer: Optimizer = "sgd"
    """Update rule, or your own as `my_optimizers:lion`, called with params and lr."""
    lr: float = 0.1
    """Peak learning rate."""
    scale_lr: bool = False
    """Multiply --lr by the number of ranks."""
    lr_power: float = 2.0
    """Schedule `polynomial`: power of the share of remaining steps."""
    warmup_epochs: float = 0.0
    """Epochs of linear warm-up of the learning rate; at most half of the run."""
    step_epochs: int = 30
    """Schedule `step`: epochs after which the learning rate is divided by ten, each time."""
    momentum: float = 0.9
    """Momentum of sgd; 0: none."""
    nesterov: bool = True
    """Nesterov momentum; --no-nesterov: plain momentum."""
    weight_decay: float = 5e-5
    """Weight decay; norms, biases, embeddings, class tokens, bias tables and scales have none."""
    decay_all: bool = False
    """Apply weight decay to norms, biases and the like, too."""
    layer_decay: float = 1.0
    """Learning rate of each layer, as a share of the next layer's; 1: the same for all."""
    loss: Literal["ce", "bce"] = "ce"
    """ce: cross-entropy over the classes; bce: mean binary cross-entropy of the classes."""
    bce_threshold: float = 0.0
    """Loss `bce`: mixed targets above this count as 1, the others as 0; 0: as they are."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over all classes."""
    loss_weights: str = ""
    """Weight of each class in the loss: cat=2,dog=0.5, or `balanced`, by the inverse of its
    training samples."""
    clip_grad: float = 0.0
    """Maximum norm of the gradient, which is clipped to it; 0: no clipping."""
    ema_decay: float = 0.0
    """Decay of the moving average of the weights (EMA), which is evaluated and saved; 0: none."""
    ema_steps: int = 1
    """Steps between updates of the EMA."""


@dataclass(frozen=True)
class SyncSettings:
    """Communication between ranks."""

    grad_accum_steps: int = 1
    """Number of parts in which each batch is computed: the same step in less memory."""
    grad_compression: Literal["float32", "bfloat16", "powersgd"] = "float32"
    """Compression of the gradients that ranks exchange, for slow networks."""
    local_sgd_steps: int = 0
    """Local SGD: after a tenth of the run, ranks train separately and average their weights every
    so many steps, for networks that are too slow to exchange gradients; 0: off."""


@dataclass(frozen=True)
class DeviceSettings:
    """Device and precision."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """bf16 and fp16 are mixed precision, fp16 with a scaled loss; tf32 is float32 with TF32
    products where the GPU has them. auto: bf16 where all GPUs have it in hardware (Ampere or
    newer), else fp16 (Volta, Turing); fp32 on older ones and on the CPU."""
    channels_last: Switch = "auto"
    """Use the memory layout NHWC; auto: on, which is nearly always faster."""
    compile: bool = False
    """Compile the model with torch.compile: a slower start, faster steps."""
    numa_binding: bool = True
    """On hosts with several sockets, run each rank and its loader on the CPU cores closest to its
    GPU."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the model's blocks, and recompute the rest in backward: less memory,
    slower steps."""
    deterministic: bool = False
    """Use only deterministic algorithms: slower on a GPU."""
    collective_timeout_seconds: int = 1200
    """Time that a rank waits for the others before it fails. Matters only without a launcher, which
    detects hangs earlier."""


@dataclass(frozen=True)
class OutputSettings:
    """Logs, checkpoints and reports."""

    log_every_steps: int = 20
    """Steps between lines of metrics.jsonl; the last step of each epoch has one, too, and with the
    default the steps 1, 2, 5 and 10."""
    straggler_steps: int = 200
    """Steps between checks for stragglers, ranks that others wait for; 0: none."""
    eval_every_epochs: int = 1
    """Epochs between evaluations; the last epoch always has one."""
    save_every_epochs: int = 1
    """Epochs between checkpoints; the last epoch always has one."""
    save_steps: int = 0
    """Steps between checkpoints within an epoch; 0: none."""
    save_minutes: float = 15.0
    """Minutes between checkpoints within an epoch; 0: none."""
    keep_checkpoints: int = 3
    """Number of checkpoints to keep, besides the best."""
    final: Literal["last", "best"] = "last"
    """The weights in final.pt: those at the end, or those with the best evaluation."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    track: str = ""
    """Also send metrics, settings and report to wandb, mlflow or both, comma-separated."""

    @property
    def trackers(self) -> list[str]:
        """Return the names in --track."""
        return [name for name in self.track.split(",") if name]

    profile_steps: str = ""
    """Write a torch.profiler trace of rank 0, from one step to another: 50,60."""


@dataclass(frozen=True)
class Config(  # dataclasses collect the fields of the last base first, as --help shows them
    OutputSettings,
    DeviceSettings,
    SyncSettings,
    OptimSettings,
    TuningSettings,
    AugmentSettings,
    DataSettings,
    RunSettings,
):
    """Train an image classifier on a folder of shards."""

    own_ranges: ClassVar[tuple[Range, ...]] = ()
    """Ranges of the numbers that a task adds."""
    own_conditions: ClassVar[tuple[Condition, ...]] = ()
    """When the options that a task adds have an effect."""

    def __post_init__(self) -> None:
        """Refuse what cannot be right, all of it in one sentence (UsageError)."""
        problems = [
            *self._unknown(),
            *self._out_of_range(),
            *self._contradictions(),
            *self._unclear(),
        ]
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def unscalable(self) -> str:
        """Return the option whose exchange a scaled loss does not survive, or nothing."""
        if self.grad_compression == "powersgd":
            return "--grad-compression powersgd"
        return f"--local-sgd-steps {self.local_sgd_steps}" if self.local_sgd_steps else ""

    def _unknown(self) -> list[str]:
        chosen = (("optimizer", OPTIMIZERS), ("lr_schedule", SHAPES))
        return [
            f"--{name.replace('_', '-')} {value}: not one of {', '.join(standard_names)}, or"
            f" your own as MODULE:NAME{did_you_mean(value, standard_names)}"
            for name, standard_names in chosen
            if (value := getattr(self, name)) not in standard_names and not is_import_path(value)
        ]

    def _out_of_range(self) -> list[str]:
        return [
            f"--{name.replace('_', '-')} {_number(value)} is not"
            f" {'2^53 at most' if value > high == MOST else wording}"
            for name, low, high, wording in (*RANGES, *self.own_ranges)
            if not low <= (value := getattr(self, name)) <= high
        ]

    def _contradictions(self) -> list[str]:
        problems = []
        if self.batch_size % max(self.grad_accum_steps, 1):
            problems.append(
                f"--grad-accum-steps {self.grad_accum_steps} does not divide --batch-size"
                f" {self.batch_size}"
            )
        if self.synthetic and self.data:
            problems.append("--synthetic and --data exclude each other: leave one of them out")
        if self.weights != type(self).weights and self.weights and self.resume:
            problems.append("--weights and --resume exclude each other: a checkpoint has weights")
        if self.exact_epochs and self.steps_per_epoch:
            problems.append(
                "--exact-epochs says how many steps an epoch has: not --steps-per-epoch"
            )
        if self.aug_repeats > 1 and (self.exact_epochs or self.chooses):
            problems.append(
                f"--aug-repeats {self.aug_repeats} draws images several times, which --exact-epochs"
                " and chosen samples plan otherwise: type --aug-repeats 1"
            )
        if self.local_sgd_steps and self.exact_epochs:
            problems.append(
                "--local-sgd-steps and --exact-epochs exclude each other: with local SGD every"
                " rank takes each step, and an epoch's last one may have fewer samples than ranks"
            )
        if self.local_sgd_steps and self.grad_compression != "float32":
            problems.append(
                f"--local-sgd-steps and --grad-compression {self.grad_compression} exclude each"
                " other: gradients hardly travel"
            )
        problems += [
            f"--track {name}: no such tracker; {nearest(name, get_args(TrackerName))}"
            for name in self.trackers
            if name not in get_args(TrackerName)
        ]
        if self.precision == "fp16" and (obstacle := self.unscalable):
            problems.append(
                f"--precision fp16 and {obstacle} exclude each other: ranks would skip different"
                " steps; type --precision bf16 or fp32"
            )
        if not self.exact_epochs:
            problems += [
                f"--{name.replace('_', '-')} needs --exact-epochs"
                for name in EXACT_ONLY
                if getattr(self, name) and not (self.elastic and name == "global_batch")
            ]
        return problems + self._inelastic()

    def _inelastic(self) -> list[str]:
        """Return what cannot go on in another group."""
        obstacles = (
            (self.local_sgd_steps, "--local-sgd-steps", "ranks have weights of their own"),
            (self.aug_repeats > 1, "--aug-repeats", "copies of an image are on certain ranks"),
            (
                self.grad_compression == "powersgd",
                "--grad-compression powersgd",
                "what a step leaves out is on one rank only",
            ),
        )
        return [
            f"--elastic and {option} exclude each other: {why}; leave one of them out"
            for obstacle, option, why in obstacles
            if self.elastic and obstacle
        ]

    def _unclear(self) -> list[str]:
        """Return what asks for two things at once, or for nothing that there is."""
        problems = []
        policies = [name for name in POLICIES if getattr(self, name)]
        if len(policies) > 1:
            options = [f"--{name.replace('_', '-')}" for name in policies]
            problems.append(f"{' and '.join(options)} exclude each other: leave out all but one")
        if self.gpu_decode != "off" and self.bad_samples != "fail":
            problems.append(
                f"--gpu-decode {self.gpu_decode} and --bad-samples {self.bad_samples} exclude each"
                " other: only loader workers leave images out; type --gpu-decode off"
            )
        if self.gradient_checkpointing and self.compile:
            problems.append(
                "--gradient-checkpointing and --compile exclude each other: torch.compile chooses"
                " itself what to compute again"
            )
        if self.profile_steps and not PROFILED.fullmatch(self.profile_steps):
            problems.append(f"--profile-steps {self.profile_steps}: type FIRST,LAST, as in 50,60")
        return problems


def _number(value: float) -> str:
    """Return a number as a message shows it, however long it is."""
    return f"{value:g}" if abs(value) <= MOST else str(value)[:40]


POLICIES = ("trivial_augment", "rand_augment", "augmix")
PROFILED = re.compile(r"([1-9]\d{0,8}),([1-9]\d{0,8})")
BODY = "body"  # to --freeze: all layers but the last
MOST = 2**53  # of anything that is counted: a float holds it exactly
OF_ONE_DATA_SET = ("catdog", "imagenet", "mnist")
"""Tasks whose raw data `python -m convert` knows by the same name."""
EXACT_ONLY = ("global_batch", "ledger")

CROP_AREA: Range = ("crop_area", 0.001, 1, "between 0.001 and 1")
"""Of tasks that crop images by chance."""

RANGES: tuple[Range, ...] = (
    ("epochs", 1, MOST, "1 or more"),
    ("steps_per_epoch", 0, MOST, "0 or more"),
    ("batch_size", 1, MOST, "1 or more"),
    ("global_batch", 0, MOST, "0 or more"),
    ("max_train_samples", 0, MOST, "0 or more"),
    ("grad_accum_steps", 1, MOST, "1 or more"),
    ("aug_repeats", 1, MOST, "1 or more"),
    ("image_size", 8, 4096, "between 8 and 4096 pixels"),
    ("lr", 0, 1e6, "a learning rate"),
    ("warmup_epochs", 0, MOST, "0 or more"),
    ("step_epochs", 1, MOST, "1 or more"),
    ("lr_power", 0.01, 100, "between 0.01 and 100"),
    ("momentum", 0, 0.9999, "between 0 and 0.9999"),
    ("weight_decay", 0, 1e6, "0 or more"),
    ("head_epochs", 0, MOST, "0 or more"),
    ("head_lr", 0, 1e6, "a learning rate"),
    ("dropout", 0, 0.99, "between 0 and 0.99"),
    ("stochastic_depth", 0, 0.99, "between 0 and 0.99"),
    ("plateau_epochs", 1, MOST, "1 or more"),
    ("plateau_factor", 0.001, 0.999, "between 0.001 and 0.999"),
    ("patience", 0, MOST, "0 or more"),
    ("layer_decay", 0.01, 1, "between 0.01 and 1"),
    ("label_smoothing", 0, 0.99, "between 0 and 0.99"),
    ("bce_threshold", 0, 0.99, "between 0 and 0.99"),
    ("color_jitter", 0, 1, "between 0 and 1"),
    ("rand_augment", 0, 30, "between 0 and 30"),
    ("augmix", 0, 10, "between 0 and 10"),
    ("random_erasing", 0, 1, "between 0 and 1"),
    ("clip_grad", 0, MOST, "0 or more"),
    ("ema_decay", 0, 0.999999, "between 0 and 0.999999"),
    ("ema_steps", 1, MOST, "1 or more"),
    ("workers", -1, 256, "between -1 and 256"),
    ("shuffle_buffer", 1, MOST, "1 or more"),
    ("seed", 0, 2**63 - 1, "between 0 and 2^63 - 1"),
    ("collective_timeout_seconds", 1, 1e6, "between 1 and 1,000,000"),
    ("first_batch_seconds", 0.001, 1e6, "more than 0, and at most 1,000,000"),
    ("cache_size", 0.001, MOST, "more than 0"),
    ("bad_samples_limit", 1, MOST, "1 or more"),
    ("local_sgd_steps", 0, MOST, "0 or more"),
    ("log_every_steps", 1, MOST, "1 or more"),
    ("straggler_steps", 0, MOST, "0 or more"),
    ("eval_every_epochs", 1, MOST, "1 or more"),
    ("save_every_epochs", 1, MOST, "1 or more"),
    ("save_steps", 0, MOST, "0 or more"),
    ("save_minutes", 0, MOST, "0 or more"),
    ("keep_checkpoints", 1, MOST, "1 or more"),
)


HEAD = Head(
    "{prog} [options]",
    "{about}",
    (
        ("{prog} --data data/shards", "train on a folder of shards"),
        ("{prog} --data data/shards --epochs 5", "with other settings"),
        ("{prog} --data data/shards --resume latest", "resume the newest run"),
        ("{prog} --synthetic --epochs 1", "measure speed"),
        ("{prog} predict runs/latest photos/", "classify images"),
    ),
)
"""The head of a task's help."""


def from_command_line(
    recipes: Mapping[str, type[Settings]], prog: str, args: Sequence[str]
) -> Settings:
    """Return the settings of the recipe that `--recipe` names, changed by the other options."""
    name = "default"
    for index, arg in enumerate(args):
        if match := re.fullmatch(r"--recipe(?:=(.*))?", arg):
            name = match[1] or "".join(args[index + 1 : index + 2])
    if name not in recipes:
        raise UsageError(f"no recipe {name!r}; {nearest(name, recipes)}")
    if HELP & set(args):
        show_help(recipes[name], prog)
    return parse(recipes[name], prog, args, renamed=OTHER_SPELLINGS)


def show_help(recipe: type["Config"], prog: str) -> NoReturn:
    """Print the options of a task with the defaults of a recipe, and end the command."""
    head = HEAD.of(prog=prog, about=cleandoc(recipe.__doc__ or ""))
    show_options(head, recipe, Config, "Options of this task")


def require_data(config: DataSettings, task: str) -> None:
    """Raise UsageError for settings that name no data; `task` is for the message."""
    if not config.synthetic and not config.data:
        raw = task if task in OF_ONE_DATA_SET else "folder"  # any images in folders of classes
        raise UsageError(
            f"no data: type --data FOLDER|URL (make it with `{called('convert')} {raw}"
            " IMAGES FOLDER`), or --synthetic to measure speed"
        )


def nearest(name: str, names: Mapping[str, object] | Sequence[str]) -> str:
    """Return what to type instead of an unknown name: likely ones, or all when there are few."""
    close = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
    if close:
        return f"did you mean {', '.join(close)}?"
    if len(names) == 1:
        return f"there is only {', '.join(names)}"
    return f"there are {', '.join(names)}" if len(names) < 20 else f"there are {len(names)}"


def as_plain(config: Config) -> dict[str, object]:
    """Return the settings as plain data, for config.json and for checkpoints."""
    return dataclasses.asdict(config)
