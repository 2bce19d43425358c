"""Where a run goes on: the newest whole checkpoint that any node has, handed to all ranks."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from shards.errors import Problem, SaveError, UsageError
from training.checkpoint import Content, newest_valid, parse, read_bytes, steps_in
from training.config import Config
from training.distributed import Ranks
from training.folder import RunFolder, newest_run

Found = tuple[Path, bytes]  # a checkpoint and its bytes


@dataclass
class Earlier:
    """The checkpoint that a run goes on from."""

    path: Path
    content: Content
    source: int  # a rank whose node has it
    data: bytes  # the whole file

    @property
    def folder(self) -> RunFolder:
        """The run that wrote it."""
        return RunFolder(self.path.parents[1])

    def with_batch(self, config: Config) -> Config:
        """The settings with the global batch of the earlier run, where that can be chosen."""
        batch = self.content.get("identity", {}).get("global batch", 0)
        adopts = config.exact_epochs and not config.global_batch
        return replace(config, global_batch=batch) if adopts else config

    def release(self) -> None:
        """Free its memory, once it is taken up."""
        self.content, self.data = {}, b""


def resumed(resume: str, task: str, ranks: Ranks) -> Earlier:
    """The newest whole checkpoint that `--resume` means on any node.

    A node may be new and have none, or a damaged one. When no node has one, each rank raises what
    its node's writer found, or that.
    """
    found, problem = _found_here(resume, task) if ranks.writes else (None, None)
    name = f"{found[0].parents[1].name}/{found[0].name}" if found else ""
    offers = [bytes(offer) for offer in ranks.gathered(np.frombuffer(name.encode(), np.uint8))]
    if not any(offers):
        raise problem or SaveError(f"--resume {resume}: no node has a whole checkpoint")
    newest = max(offers, key=lambda offer: offer if resume == "latest" else offer.split(b"/")[-1])
    source = offers.index(newest)
    path = ranks.share_bytes(str(found[0]).encode() if found else None, source).decode()
    data = ranks.share_bytes(found[1] if found else None, source)
    return Earlier(Path(path), parse(data, Path(path)), source, data)


def _found_here(resume: str, task: str) -> tuple[Found | None, Problem | None]:
    try:
        path, data = wanted(resume, task)
    except Problem as problem:
        return None, problem
    return (path.absolute(), data), None


def wanted(resume: str, task: str) -> tuple[Path, bytes]:
    """The checkpoint that `--resume` means: a file, a run folder, or `latest`; and its bytes."""
    run = newest_run(task) if resume == "latest" else Path(resume)
    if run is None:
        raise UsageError(f"--resume latest: no run of {task} under runs/ has a checkpoint")
    if run.is_file():
        return run, read_bytes(run)
    folder = RunFolder(run)
    if not steps_in(folder.checkpoints):
        raise UsageError(f"--resume {resume}: {folder.checkpoints} has no checkpoint")
    return newest_valid(folder.checkpoints)
