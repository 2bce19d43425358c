"""Entry points of a task's commands; they end at once with the exit code.

Modules are imported when they are needed: errors in options are reported without torch. A rank that
exits through the interpreter's shutdown can abort there (a thread of gloo still runs), and report
that instead of its own result.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

from rackrun.commandline import program
from rackrun.training.data.worker_server import start_worker_server
from rackrun.user_code.tasks import TaskSource

if TYPE_CHECKING:
    from rackrun.contract.task_needs import TaskNeeds
    from rackrun.training.config import Config

# Threads of torch that wait for one another must not spin: on a machine with other work they take
# the cores from those they wait for, and a step takes tens of times as long. Read with torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def enter(main: Callable[[list[str]], int | None]) -> NoReturn:
    """Run a command as `run` does, then end its loader workers, flush, and leave."""
    code: object = 1
    try:
        program.run(main)
    except SystemExit as end:
        code = end.code
    finally:
        program.leave(code if isinstance(code, int) else 0 if code is None else 1)


def run_command(task: str, prog: str, args: list[str]) -> int:
    """Run the command in the first word, the task's own or `predict`; without one, train."""
    from rackrun.training.tasks.definition import require_task

    source = require_task(task)
    name = args[0] if args else ""
    if name in source.commands:
        code: int = import_module(f"{source.model.rpartition('.')[0]}.{name}").main(args[1:])
        return code
    if name == "predict":
        from rackrun.training import predict

        return predict.main(args[1:], source.name, f"{prog} predict")
    return train(source, prog, args)


def train(source: TaskSource, prog: str, args: list[str]) -> int:
    """Train a task with these options; after the word `check`, only check them.

    A check prints what else must be true of the machines that are to train.
    """
    from rackrun.training.conditions import refuse_ineffective

    only_check = args[:1] == ["check"]
    config, typed = settings_of(source, prog, args[only_check:])
    needs = checked(source, config, typed) if only_check else None
    refuse_ineffective(config, typed)  # after the check: no model is misspelled any more
    if needs:
        sys.stdout.write(f"{json.dumps(asdict(needs))}\n")
        return 0
    return run(source, config)


def settings_of(source: TaskSource, prog: str, args: list[str]) -> tuple["Config", set[str]]:
    """Return the settings of a task with these options, and the names of those options."""
    from rackrun.training.conditions import with_weights_or_all_layers
    from rackrun.training.config import from_command_line
    from rackrun.training.tasks.definition import recipes_of

    config, typed = from_command_line(recipes_of(source), prog, args)
    return with_weights_or_all_layers(config, typed), typed


def checked(
    source: TaskSource, config: "Config", typed: set[str], is_here: bool = False
) -> "TaskNeeds":
    """Return what the settings need of the machines that train; UsageError for mistakes in them.

    `is_here`: this machine trains.
    """
    from rackrun.training.precheck import precheck

    config.require_data(source.name)
    return _tried(source, config, precheck(source, config, typed, is_here))


def run(source: TaskSource, config: "Config") -> int:
    """Train a task with these settings, as one rank; return the exit code."""
    from rackrun.training.tasks.definition import task_of

    if config.workers and not config.synthetic:
        start_worker_server(source.model)
    task = task_of(source)
    from rackrun.training import train

    return train.run(task, config)


def _tried(source: TaskSource, config: "Config", needs: "TaskNeeds") -> "TaskNeeds":
    # With what the user's parts say, and a step on zeros of a model, where they and torch are here.
    from rackrun.training.models.registered import TIMM
    from rackrun.user_code.imports import imported, is_import_path

    for option, name, example, *arguments in (
        ("--optimizer", config.optimizer, "Lion", "params", "lr"),
        ("--lr-schedule", config.lr_schedule, "triangle", "step", "steps"),
    ):
        if is_import_path(name) and find_spec(name.partition(":")[0].partition(".")[0]):
            imported(option, name, example, *arguments)
    if ":" not in config.model or config.model.startswith(TIMM) or needs.modules:
        return needs
    if find_spec("torch") is None or find_spec("torchvision") is None:
        return needs
    from rackrun.training.dry_step import dry_step
    from rackrun.training.precheck import class_count
    from rackrun.training.tasks.definition import task_of

    why_not_more = dry_step(task_of(source), config, class_count(config))
    return replace(needs, most_ranks=1, why_not_more=why_not_more) if why_not_more else needs
