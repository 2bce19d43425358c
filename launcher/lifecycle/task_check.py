"""What a task needs before a host is contacted or a folder made: right options, and its data."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

from rackrun.commands import called
from rackrun.contract import variables
from rackrun.contract.files import LATEST, PUBLISHED
from rackrun.contract.task_needs import TaskNeeds
from rackrun.data_location import is_folder, parts_of
from rackrun.errors import DataError, MissingPackage, UsageError, UserCodeError
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.run.job import (
    PYTHONS,
    Command,
    JobTemplate,
    TaskWork,
    Work,
    data_of,
    is_on_cpu,
    option_of,
)
from rackrun.launcher.transport.local import gpu_count
from rackrun.machine import core_count
from rackrun.run_folder import RunFolder, file_name
from rackrun.runs import run_folder
from rackrun.shapes import Misshapen, parsed
from rackrun.shard_folder import why_no_shards
from rackrun.units import data_size
from rackrun.user_code.tasks import why_no_task

MOST_BYTES = 1 << 20  # of what a task needs
RANK_BYTES = 500_000_000
"""What a rank of a task takes at least: torch alone takes 372 MiB, and its loader has processes."""
CPU = "to train on the CPU type --device cpu"
NO_GPUS = "to run without GPUs type CUDA_VISIBLE_DEVICES= before it; with another torch: --python"
"""What to type where GPUs cannot be used: for a task, and for a command, which has no --device."""


@contextmanager
def check_task_options(
    work: Work, name: str, *args: str, local_jobs: JobTemplate | None = None
) -> Iterator[Callable[[], TaskNeeds]]:
    """Ask a task in a process of its own; what is yielded waits, and raises what it complained of.

    A quarter of a second, in which the hosts can be reached. It returns what else must be true of
    them. The command `name`, with `args`, precedes the task in its messages. `local_jobs`: what the
    run is started from if its ranks will be on this machine, where checkpoints can be looked at.
    """
    if not isinstance(work, TaskWork):
        yield TaskNeeds
        return
    _refuse_hidden_package()
    of_run = {}
    if local_jobs:
        folder = str(local_jobs.planned_folder(work).path)
        name_of_run = file_name(local_jobs.name or work.name)
        of_run = {variables.RUN_FOLDER: folder, variables.RUN_NAME: name_of_run}
    command = [sys.executable, "-m", "rackrun.training", work.task, "check", *work.options]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **of_run, variables.TYPED: " ".join((called(name), *args))},
    ) as process:
        yield lambda: _refuse(process)


def _refuse_hidden_package() -> None:
    """Raise UsageError for a module of the current folder that ranks would import in place of ours.

    `python -m` looks into the current folder first. A checkout of rackrun is meant to come first.
    """
    if Path("rackrun/contract/tasks.py").exists():
        return
    for path in (Path("rackrun.py"), Path("rackrun/__init__.py")):
        if path.exists():
            raise UsageError(
                f"{path}: ranks would import it in place of rackrun; rename it, or type the command"
                " in another folder"
            )


def _refuse(process: subprocess.Popen[str]) -> TaskNeeds:
    needs, complaint = process.communicate()
    for kind in (UsageError, DataError):
        if process.returncode == kind.exit_code:
            raise kind(complaint.strip().removeprefix("error: "))
    # A model that no rank can train; any other exception may be due to this machine alone.
    last = complaint.strip().rpartition("\n")[2].removeprefix("error: ")
    if process.returncode == UserCodeError.exit_code and last.startswith("--model "):
        raise UserCodeError(last)
    try:
        return parsed("".join(needs.splitlines()[-1:]), TaskNeeds, MOST_BYTES)
    except Misshapen:  # a task of the user's that this machine cannot import: its ranks say why
        return TaskNeeds()


def refuse_missing_packages(needs: TaskNeeds, python: str) -> None:
    """Raise UsageError or MissingPackage for what this interpreter of the ranks cannot import."""
    if needs.imports:
        from rackrun.launcher.remote.interpreter import describe

        missing = describe([python], needs.imports, str(Path.cwd())).get("missing", ())
        for name in missing:
            if name in needs.modules:
                where = f"in {Path.cwd()} or installed"
                hint = "type MODULE:NAME, as my_module:Net for my_module.py"
                raise UsageError(f"no module {name} {where}; {hint}")
        if missing and python != sys.executable:
            names, them = " or ".join(missing), "it" if len(missing) == 1 else "them"
            hint = f"install {them} there, or leave out --python"
            raise UsageError(f"{python} has no {names}; {hint}")
        if missing:
            raise MissingPackage(missing[0], missing[0])


def refuse_cache(needs: TaskNeeds) -> None:
    """Raise UsageError for a --cache in which ranks on this machine can keep nothing."""
    from rackrun.launcher.remote.disks import cache_problem

    if needs.cache and (why := cache_problem(needs.cache)):
        raise UsageError(f"--cache {needs.cache}: {why}; name another folder")


def refuse_unready_data(work: Work, environment: Iterable[tuple[str, str]] = ()) -> None:
    """Raise UsageError when a folder that a task is to read here is no folder of shards.

    Likewise for a file of weights that is not there, and for one that is to identify the reader to
    a server of shards. `environment` is set for the ranks over what is set here.
    """
    for data in parts_of(data_of(work)):
        if is_folder(data) and (reason := why_no_shards(data)):
            raise UsageError(reason)
    if "://" in data_of(work):
        variables_of_ranks = {**os.environ, **dict(environment)}
        for name in variables.ACCESS:
            if (file := variables_of_ranks.get(name)) is not None and not Path(file).is_file():
                raise UsageError(f"{name}={file}: no such file")
    weights = option_of(work, "--weights")
    is_file = weights and weights != PUBLISHED and "://" not in weights
    if is_file and not Path(weights).is_file():
        raise UsageError(f"--weights {weights}: no such file{_file_meant(Path(weights))}")


def _file_meant(path: Path) -> str:
    if RunFolder(path).final.is_file():
        return f"; did you mean {path / 'final.pt'}?"
    names = [other.name for other in path.parent.glob("*") if other.is_file()]
    close = get_close_matches(path.name, [*names, PUBLISHED], n=1)
    meant = close and (PUBLISHED if close[0] == PUBLISHED else path.parent / close[0])
    return f"; did you mean {meant}?" if meant else ""


def refuse_absent_run(work: Work, runs: Path) -> None:
    """Raise UsageError when a task is to resume from what is not on this machine."""
    resume = option_of(work, "--resume")
    if resume not in ("", LATEST) and not run_folder(resume, runs).exists():
        raise UsageError(
            f"--resume {resume}: no such file or run; type its path, its name, or latest"
        )


def refuse_absent_program(work: Work) -> None:
    """Raise UsageError for a command whose program, or Python file, is not on this machine."""
    if not isinstance(work, Command):
        return
    program, file, *_ = *work.args, ""
    if program in PYTHONS:
        if file.endswith(".py") and not Path(file).is_file():
            raise UsageError(why_no_task(file))
        return
    if shutil.which(program):
        return
    if program.endswith(".py") and Path(program).is_file():
        raise UsageError(f"{program}: not a program by itself; type: -- python {program}")
    if Path(program).is_file():
        raise UsageError(f"{program}: not a program that can be run; type: chmod +x {program}")
    close = get_close_matches(program, [*PYTHONS, "bash"], n=1)
    meant = f"did you mean {close[0]}?" if close else "install it, or type its path"
    raise UsageError(f"{program}: no such program; {meant}")


def refuse_more_than_fit(work: Work, ranks: int) -> None:
    """Raise UsageError for more ranks of a task than fit into the memory of this machine.

    They would end in the kernel's OOM killer, which takes other programs as well.
    """
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if isinstance(work, TaskWork) and ranks > 1 and ranks * RANK_BYTES > memory:
        raise UsageError(
            f"--nproc {ranks}: needs {data_size(ranks * RANK_BYTES)} of memory, at least"
            f" {data_size(RANK_BYTES)} a rank, and this machine has {data_size(memory)};"
            f" type --nproc {core_count()}, a rank per core"
        )


def check_gpus(
    work: Work,
    ranks: int,
    name: str,
    python: str,
    image: str,
    environment: Iterable[tuple[str, str]] = (),
) -> None:
    """Refuse to count ranks by GPUs of this machine that their torch cannot use.

    Likewise --device cuda without a GPU, and more ranks of a task than GPUs. What an image holds is
    looked at where it is started.
    """
    gpus = gpu_count(environment)
    if option_of(work, "--device") == "cuda" and not gpus:
        raise UsageError(
            "--device cuda: this machine has no GPU, or CUDA_VISIBLE_DEVICES hides it; type"
            " --device cpu, or leave it out"
        )
    if isinstance(work, TaskWork) and not is_on_cpu(work) and 0 < gpus < ranks:
        raise UsageError(
            f"--nproc {ranks}: a rank needs its own GPU, and this machine has {gpus}; {CPU},"
            " or start fewer"
        )
    if gpus and not is_on_cpu(work) and not image:
        from rackrun.cuda import driver_here, gpu_problem
        from rackrun.launcher.remote.interpreter import describe

        versions = describe([python])
        torch, cuda = versions.get("torch", ""), versions.get("cuda", "")
        if torch and (why := gpu_problem(torch, cuda, "", driver_here(), [])):
            # torch would leave the GPUs alone, and train on the CPU without a word
            way_out = CPU if isinstance(work, TaskWork) else NO_GPUS
            raise PreflightRefused(f"{name}: {why}; {way_out}")
