"""Entry points of a task's commands; they end at once with the exit code.

Modules are imported when they are needed: errors in options are reported without torch. A rank that
exits through the interpreter's shutdown can abort there (a thread of gloo still runs), and report
that instead of its own result.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from typing import TYPE_CHECKING, NoReturn

from rackrun.commandline import program
from rackrun.training.data.worker_server import start_worker_server
from rackrun.user_code.tasks import TaskSource

if TYPE_CHECKING:
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
    """Run the command in the first argument, the task's own or `predict`; without one, train."""
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
    """Train a task with these options; after the argument `check`, only check them.

    A check prints what else must be true of the machines that are to train.
    """
    from rackrun.training.conditions import refuse_ineffective
    from rackrun.training.precheck import needs_of

    if args[:1] == ["check"]:
        config, typed = settings_of(source, prog, args[1:])
        needs = needs_of(source, config, typed)
        refuse_ineffective(config, typed)  # after the check: no model is misspelled any more
        sys.stdout.write(f"{json.dumps(asdict(needs))}\n")
        return 0
    config, typed = settings_of(source, prog, args)
    refuse_ineffective(config, typed)
    return run(source, config)


def settings_of(source: TaskSource, prog: str, args: list[str]) -> tuple["Config", set[str]]:
    """Return the settings of a task with these options, and the names of those options."""
    from rackrun.training.conditions import with_weights_or_all_layers
    from rackrun.training.config import from_command_line
    from rackrun.training.tasks.definition import recipes_of

    config, typed = from_command_line(recipes_of(source), prog, args)
    return with_weights_or_all_layers(config, typed), typed


def run(source: TaskSource, config: "Config") -> int:
    """Train a task with these settings, as one rank; return the exit code."""
    from rackrun.training.tasks.definition import task_of

    if config.workers and not config.synthetic:
        start_worker_server(source.model)
    task = task_of(source)
    from rackrun.training import train

    return train.run(task, config)
