"""Resume from the newest intact checkpoint of any node, broadcast to all ranks."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rackrun.contract.files import LATEST
from rackrun.errors import Problem, SaveError, UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import run_folder
from rackrun.training.checkpoint import Content, content_of, newest_valid, read_bytes, steps_in
from rackrun.training.config import Config
from rackrun.training.ranks import Ranks
from rackrun.training.run.folder import newest_run, runs_folder

UNDECIDED = {"image_size": 0, "short_side": 0, "interpolation": "auto", "mean": "", "std": ""}
"""Settings of images that the published weights of a new run decide."""

CheckpointFile = tuple[Path, bytes]  # a checkpoint and its bytes


@dataclass
class Earlier:
    """The checkpoint that a run continues from."""

    path: Path
    content: Content
    data: bytes  # the whole file

    @property
    def folder(self) -> RunFolder:
        """The run that wrote it."""
        return RunFolder(self.path.parent.parent)

    def table(self, name: str) -> Mapping[str, Any]:
        """Return what it has recorded under a name; none where that is something else."""
        recorded = self.content.get(name)
        return recorded if isinstance(recorded, Mapping) else {}

    def resolved(self, config: Config) -> Config:
        """Return settings with what the earlier run chose where these leave the choice."""
        recorded = self.table("config")
        kept = {
            name: recorded[name]
            for name, undecided in UNDECIDED.items()
            if getattr(config, name, None) == undecided
            and type(recorded.get(name)) is type(undecided)
        }
        batch = self.table("identity").get("global batch")
        if config.exact_epochs and not config.global_batch and isinstance(batch, int):
            kept["global_batch"] = batch
        return replace(config, **kept)

    def release(self) -> None:
        """Free its memory, once the run has what it needs of it."""
        self.content, self.data = {}, b""


def earlier_run(config: Config, task: str, ranks: Ranks) -> Earlier | None:
    """Return the checkpoint that the settings name; None if the run starts from scratch.

    After a restart that is the newest one of the same launch, if it has saved any.
    """
    attempt = config.earlier_attempts
    earlier = _newest(partial(_of_attempt, RunFolder(Path(attempt))), ranks) if attempt else None
    return earlier or (resumed(config.resume, task, ranks) if config.resume else None)


def resumed(resume: str, task: str, ranks: Ranks) -> Earlier:
    """Return the newest whole checkpoint that `--resume` means on any node.

    A node may be new and have none, or a damaged one. When no node has a whole one, each rank
    raises the Problem that its node's writer met with, or SaveError.
    """
    earlier = _newest(partial(requested_checkpoint, resume, task), ranks, by_run=resume == LATEST)
    if not earlier:
        raise SaveError(f"--resume {resume}: no node has an intact checkpoint")
    return earlier


def _newest(
    search: Callable[[], CheckpointFile | None], ranks: Ranks, by_run: bool = True
) -> Earlier | None:
    checkpoint: CheckpointFile | None = None
    problem: Problem | None = None
    if ranks.writes:
        try:
            checkpoint = search()
        except Problem as error:  # another node may have a whole one
            problem = error
    path, data = checkpoint or (None, None)
    name = f"{path.absolute().parent.parent.name}/{path.name}" if path else ""
    # Run folder and step, both with zeros in front: the greatest text is the newest.
    offers = ranks.gather(name.encode())
    if not any(offers):
        if problem:
            raise problem
        return None
    newest = max(offers, key=lambda offer: offer if by_run else offer.split(b"/")[-1])
    source = offers.index(newest)
    own_path = str(path.absolute()).encode() if path else None
    path = Path(ranks.broadcast_bytes(own_path, source).decode())
    data = ranks.broadcast_bytes(data, source)
    return Earlier(path, content_of(data, path), data)


def _of_attempt(folder: RunFolder) -> CheckpointFile | None:
    if not steps_in(folder.checkpoints):
        return None
    try:
        return newest_valid(folder.checkpoints)
    except SaveError:
        text = f"{folder.checkpoints}: no checkpoint of an earlier attempt is whole"
        raise SaveError(text) from None


def requested_checkpoint(resume: str, task: str) -> CheckpointFile:
    """Return the checkpoint (and its bytes) of `--resume`: a file, a run folder, or `latest`."""
    is_latest = resume == LATEST
    run = newest_run(task) if is_latest else run_folder(resume, runs_folder())
    if not run.exists():
        raise UsageError(f"--resume {resume}: no such file or run folder; type its path, or latest")
    if run.is_file():
        return run, read_bytes(run)
    folder = RunFolder(run)
    if not steps_in(folder.checkpoints):
        raise UsageError(f"--resume {resume}: {folder.checkpoints} has no checkpoint")
    return newest_valid(folder.checkpoints)
