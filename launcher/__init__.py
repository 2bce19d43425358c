"""Starts torchrun on hosts, watches it, and cleans up after it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if __name__ != "rackrun.launcher":  # a second copy of the package, with other classes
    raise ImportError("import rackrun.launcher, not launcher")

if TYPE_CHECKING:
    from rackrun.launcher.run.python_launch import LaunchResult
    from rackrun.launcher.run.result import Result


def launch(*args: object, **options: object) -> LaunchResult:
    """Run what `./run-local` would, from Python: `launch("catdog", "--epochs", "2", nproc=2)`.

    With `hosts="hosts.txt"` it is what `./run-ssh` does, with `address="auto"` what `./run-ray`
    does on the nodes of that Ray cluster. The arguments are those after the launcher's options: a
    task and its options, or "--" and a command. The options are the launcher's, with underscores.
    Returns how the run ended; raises Problem when nothing could be started. In the main thread,
    Ctrl-C ends the run.

    A function, or its import path as "my_module:train", is called by every rank with the further
    arguments, which travel as JSON; `returned` of the result has what it returned on each rank.
    """
    from rackrun.launcher.run.python_launch import LaunchResult, function_call, with_returned

    if call := function_call(args):
        return with_returned(_launch(("--", *call.args), options), args[0])
    return LaunchResult(**vars(_launch(tuple(map(str, args)), options)))


def _launch(args: tuple[str, ...], options: dict[str, object]) -> Result:
    """Launch here, on hosts, or on a Ray cluster, depending on the options."""
    if options.keys() & {"hosts", "host_list", "slurm"}:
        from rackrun.launcher.commands.ssh import SshLaunch

        return SshLaunch.launch(args, options)
    if "address" in options:
        from rackrun.launcher.commands.ray import RayLaunch

        return RayLaunch.launch(args, options)
    from rackrun.launcher.commands.local import LocalLaunch

    return LocalLaunch.launch(args, options)
