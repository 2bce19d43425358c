"""The model of a run, what it starts from, and the files that it writes."""

import re
from ast import literal_eval
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args

from rackrun.commandline.options import Hidden, Values
from rackrun.commandline.ranges import Between, Count, Positive
from rackrun.contract.files import TrackerName
from rackrun.training.settings import Slice
from rackrun.user_code.sources import nearest

PROFILED = re.compile(r"([1-9]\d{0,8}),([1-9]\d{0,8})")


@dataclass(frozen=True)
class RunSettings(Slice):
    """Model, run folder and checkpoint to start from."""

    recipe: Annotated[str, Values("NAME")] = "default"
    """Set of defaults to start from; other options override them one by one."""
    model: Annotated[str, Values("NAME")] = "resnet50"
    """Name of the model: the task's own, any classification model of torchvision, `timm:NAME`, or
    your own as `my_models:Net`, called with num_classes."""
    model_args: Annotated[str, Values("NAME=VALUE")] = ""
    """Further arguments for the function that builds the model, comma-separated:
    dropout=0.2,stochastic_depth_prob=0.1."""
    weights: Annotated[str, Values("FILE|URL")] = ""
    """Start from these weights: `imagenet` (those published for --model), a file, a URL, or '' for
    none. A last layer of another size is reinitialized."""
    run_folder: Annotated[str, Values("FOLDER")] = ""
    """Folder of this run; runs/<time>-<task> if not given."""
    resume: Annotated[str, Values("RUN")] = ""
    """Resume from this checkpoint or run folder; `latest` is this task's newest run."""
    earlier_attempts: Annotated[str, Hidden] = ""
    """Run folder: continue from the newest checkpoint in it on any node, if there is one. The
    launcher sets this after a failure."""

    @property
    def builder_args(self) -> dict[str, Any]:
        """The arguments in --model-args: numbers, True, False and None as in Python, else text."""
        pairs = (part.partition("=") for part in self.model_args.split(",") if part)
        return {name.strip(): _value(text) for name, _, text in pairs}

    def problems(self) -> list[str]:
        """Refuse --weights together with --resume, and a --model-args that is no list."""
        problems = super().problems()
        if not all(name.isidentifier() for name in self.builder_args):
            problems.append(f"--model-args {self.model_args}: type NAME=VALUE,NAME=VALUE")
        if self.weights != type(self).weights and self.weights and self.resume:
            problems.append(
                "--weights and --resume exclude each other: a checkpoint has its own weights"
            )
        return problems


def _value(text: str) -> object:
    try:
        return literal_eval(text.strip())
    except (ValueError, SyntaxError):
        return text.strip()


@dataclass(frozen=True)
class OutputSettings(Slice):
    """Logs, checkpoints and reports."""

    log_every_steps: Positive = 20
    """Steps between lines of metrics.jsonl; the last step of each epoch has one as well, and with
    the default also the steps 1, 2, 5 and 10."""
    eval_every_epochs: Positive = 1
    """Epochs between evaluations; the last epoch always has one."""
    save_every_epochs: Positive = 1
    """Epochs between checkpoints; the last epoch always has one."""
    save_steps: Count = 0
    """Steps between checkpoints within an epoch; 0: none."""
    save_minutes: Annotated[float, Between(0)] = 15.0
    """Minutes between checkpoints within an epoch; 0: none."""
    keep_checkpoints: Positive = 3
    """Number of checkpoints to keep, besides the best."""
    final: Literal["last", "best"] = "last"
    """The weights in final.pt: those of the last step, or those with the best evaluation."""
    tensorboard: bool = True
    """Write TensorBoard events."""
    track: Annotated[str, Values("NAMES")] = ""
    """Also send metrics, settings and report to wandb, mlflow or both, comma-separated; files for
    TensorBoard are written anyway."""
    profile_steps: Annotated[str, Values("N,N")] = ""
    """Write a torch.profiler trace of rank 0 from the first to the second step: 50,60."""

    @property
    def trackers(self) -> list[str]:
        """The names in --track."""
        return [name for name in self.track.split(",") if name]

    def problems(self) -> list[str]:
        """Refuse trackers and steps that do not exist."""
        problems = [
            f"--track {name}: no such tracker; {nearest(name, get_args(TrackerName))}"
            for name in self.trackers
            if name not in get_args(TrackerName)
        ]
        if self.profile_steps and not PROFILED.fullmatch(self.profile_steps):
            problems.append(f"--profile-steps {self.profile_steps}: type FIRST,LAST, as in 50,60")
        return [*super().problems(), *problems]
