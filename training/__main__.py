"""python -m rackrun.training TASK: train, `TASK predict`, `TASK check`;
evaluate MODEL DATA; predict MODEL IMAGE...; export MODEL FILE;
deep-check: measure hosts and GPUs.
"""

from importlib import import_module

from rackrun.commandline.program import typed_command
from rackrun.errors import UsageError
from rackrun.training.entry import enter, run_command
from rackrun.user_code.tasks import OWN_TASK, find_task, known_tasks, why_no_task

COMMANDS = {
    "evaluate": "rackrun.training.judge.command",
    "predict": "rackrun.training.predict",
    "export": "rackrun.training.export.command",
    "deep-check": "rackrun.training.deep_check",
}
"""Commands that belong to no task -> the module with their `main`."""


def main(args: list[str]) -> int | None:
    """Run the task, or the command, that the first argument names."""
    name = args[0] if args else ""
    if name in ("-h", "--help"):
        print(f"usage: {__doc__}\nTasks: {', '.join(known_tasks())}, or your own: {OWN_TASK}.")
        return None
    if name in COMMANDS:
        code: int | None = import_module(COMMANDS[name]).main(args[1:])
        return code
    if find_task(name) is None:
        what = (
            why_no_task(name) if name else f"no task given; there are: {', '.join(known_tasks())}"
        )
        raise UsageError(f"{what}; commands: {', '.join(COMMANDS)}")
    return run_command(name, f"{typed_command('python -m rackrun.training')} {name}", args[1:])


if __name__ == "__main__":
    enter(main)
