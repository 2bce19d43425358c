"""The code of a run: the files in this folder, which --sync uploads to the hosts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.files.sync import Destination, upload_code
from rackrun.launcher.files.working_tree import (
    WorkingTree,
    unchecked_notice,
    why_no_code,
    with_installed,
    with_untracked,
    with_wheels,
)
from rackrun.launcher.lifecycle.launch_spec import LaunchSpec
from rackrun.launcher.lifecycle.planning import code_here
from rackrun.launcher.output.console import say
from rackrun.launcher.preflight.checks import ENVIRONMENT
from rackrun.launcher.run.hosts import Host
from rackrun.launcher.run.job import FunctionCall, TaskWork, Work, is_own_command
from rackrun.user_code.sources import source_of
from rackrun.user_code.tasks import find_task


def bring_code(spec: LaunchSpec, options: SshOptions) -> LaunchSpec:
    """Upload the code with --sync; return the launch with the code that hosts must have."""
    code, synced = _code(spec, options)
    if synced is not None:
        _sync(synced, spec, options)
    elif code is not None and (remark := unchecked_notice(code)):
        say(f"warning: {remark}")
    return replace(spec, code=code)


def plan_code(spec: LaunchSpec, options: SshOptions) -> LaunchSpec:
    """Return the launch with the code that hosts must have once --sync has copied it.

    --sync leaves the environment of a host alone if `python=` names an interpreter.
    """
    code, synced = _code(spec, options)
    if synced is None:
        return replace(spec, code=code)
    installed = (*ENVIRONMENT, *(["packages"] if isinstance(spec.work, FunctionCall) else []))
    environment = () if options.python or options.image else installed
    fixed = dict.fromkeys(("code", "workdir", *environment), "--sync copies it there")
    return replace(spec, code=code, pending={**spec.pending, **fixed})


def _code(spec: LaunchSpec, options: SshOptions) -> tuple[WorkingTree | None, WorkingTree | None]:
    """Return the code that hosts must have, and with --sync the files to copy.

    Raises UsageError if these do not include the task's own file.
    """
    code = code_here(options.runs, excluded=[options.hosts])
    if not options.sync:
        return code, None
    synced = _files_to_copy(code, spec.hosts, options)
    own_python = all(host.python or options.python for host in spec.hosts)
    # a file outside this folder is one that hosts with python= may have installed
    if (task := _left_behind(spec.work, synced)) and not (own_python and _is_elsewhere(task)):
        raise UsageError(f"--sync: {_why_left_behind(task, code)}")
    return code, synced


def _files_to_copy(
    code: WorkingTree | None, hosts: Sequence[Host], options: SshOptions
) -> WorkingTree:
    if code:
        copied = with_untracked(code, options.sync_untracked, say)
    else:
        copied = WorkingTree(Path.cwd(), {})
    if not all(host.python or options.python for host in hosts):
        copied = with_installed(copied)
        if options.sync_wheels:
            copied = with_wheels(copied, Path(options.sync_wheels))
    if not copied.files:
        raise UsageError(f"--sync: {why_no_code()}")
    if not code:
        say(f"only rackrun itself is copied: {why_no_code()}")
    return copied


def _left_behind(work: Work, copied: WorkingTree) -> str:
    # The path of a task's or function's file if hosts would not get it, otherwise "".
    task = find_task(work.task) if isinstance(work, TaskWork) else None
    file = task.file if task else None
    if isinstance(work, FunctionCall):
        file = source_of(work.target.partition(":")[0])
    path = os.path.relpath(file) if file else ""
    return "" if path in copied.files else path


def _is_elsewhere(path: str) -> bool:
    return path.startswith("..")


def _why_left_behind(path: str, code: WorkingTree | None) -> str:
    if _is_elsewhere(path):
        where = f"{Path(path).resolve()} is not in {Path.cwd()}, which is what hosts get"
        return f"{where}; move it there, or install it on the hosts and name their python="
    if code is None:
        return f"{path} would not be copied: {why_no_code()}"
    return f"{path} would not be copied, as git ignores it; type: git add -f {shlex.quote(path)}"


def _sync(code: WorkingTree, spec: LaunchSpec, options: SshOptions) -> None:
    workdir = options.workdir or str(code.root)
    destinations = [
        Destination(
            transport,
            host.workdir or workdir,
            host.python or options.python,
            bool(options.image),
            is_own_command(spec.work),
        )
        for host, transport in zip(spec.hosts, spec.reached, strict=True)
    ]
    upload_code(code, destinations, say)
