"""The checkpoints of a run: ranks save together, and one on each host writes in the background."""

from __future__ import annotations

import copy
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rackrun.atomic import write_whole
from rackrun.contract import phases
from rackrun.errors import SaveError
from rackrun.training import checkpoint
from rackrun.training.checkpoint import Content
from rackrun.training.divergence import diverged
from rackrun.training.log import Log
from rackrun.training.ranks import Ranks
from rackrun.training.run.resume import Earlier
from rackrun.training.state import TrainingState

TURN_SECONDS, LAST_TURN_SECONDS = 0.25, 2.0  # of 5 until the launcher kills: see `keep_step`
POLL_SECONDS = 0.05


class RunCheckpoints:
    """Saves the state of a run; an error that ends its context waits for the current save.

    The error of a failed save is raised by the next call of `report_ended` or `wait`.
    """

    def __init__(self, ranks: Ranks, log: Log, content: Content) -> None:
        """Take what is in every checkpoint beside the state: what the run is, its identity."""
        self._ranks, self._log, self._content = ranks, log, content
        self._thread: ThreadPoolExecutor | None = None  # on the rank that writes to its disk
        self._keep = 0
        self._save: Future[Path] | None = None  # under way
        self.images_by_rank: list[int] = []
        """Images that each rank gets of a full step, with --balance auto."""

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, failure: type[BaseException] | None, *error: object) -> None:
        # Of two failures the first one counts. A second Ctrl-C is no Exception, and does not wait.
        if self._save and failure and issubclass(failure, Exception):
            wait([self._save])

    def open(self, keep: int) -> None:
        """Begin to write on this rank, and keep the last `keep` checkpoints."""
        checkpoint.remove_partials(self._log.folder)
        self._thread = ThreadPoolExecutor(1, "checkpoint")  # 307 MB held up steps for 1.5 s
        self._keep = keep

    def take_over(self, step: int, earlier: Earlier) -> None:
        """Write what a run goes on from, so that every host could go on alone; free its memory."""
        if self._thread:
            checkpoint.keep_best(earlier.folder, self._log.folder)
            if not (path := self._log.folder.checkpoint(step)).exists():
                write_whole(path, earlier.data)
            self._log.phase(phases.START, checkpoint=step)
        earlier.release()

    def save(self, state: TrainingState, best: bool = False) -> None:
        """Begin to write a checkpoint, which gets a second name if it is the best so far.

        Raise Diverged if no run could continue from it, before the next line of the log does.
        """
        self._log.phase(phases.SAVE)
        if self._ranks.all_reduce_max(int(not state.is_finite)):
            raise diverged("weights are not finite", state.step)
        self.wait()
        # The file has the mean of all ranks' statistics, for whoever loads it, and those of each
        # rank: a run that resumes goes on with the same numbers as one that was not interrupted.
        statistics = self._ranks.gather_statistics(state.model)
        try:
            for model in state.models:
                self._ranks.share_statistics(model)
            self._begin(state, statistics, best)
        finally:
            self._ranks.restore_statistics(state.model, statistics)
        self._log.phase(phases.TRAIN)

    def keep_step(self, state: TrainingState) -> None:
        """Save the last whole step without the other ranks, of which one is lost.

        That may be the one that writes to the disk of this rank: after a moment others do, each in
        turn until one has. Batch norms keep the statistics of this rank, as nobody can take the
        mean any more; they may have seen the images of the step that was lost, too.
        """
        with state.whole() as is_whole:
            if not (is_whole and state.is_finite):
                return
            path, began = self._log.folder.checkpoint(state.step), time.monotonic()
            turn = min(TURN_SECONDS * (1 + self._ranks.rank), LAST_TURN_SECONDS)
            while not (self._thread or path.exists() or time.monotonic() > began + turn):
                time.sleep(POLL_SECONDS)
            self.wait()
            if not path.exists():
                self._thread = self._thread or ThreadPoolExecutor(1)
                self._begin(state, None, best=False)
                self.wait()

    def _begin(self, state: TrainingState, statistics: torch.Tensor | None, best: bool) -> None:
        if not self._thread:
            return
        content = {**self._content, "state": state.state_dict(), "statistics": statistics}
        # A copy: the next step changes these tensors in place while the thread still writes.
        copied = _copied({**content, "images_by_rank": self.images_by_rank})
        self._save = self._thread.submit(
            checkpoint.save, self._log.folder, copied, self._keep, best
        )

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise SaveError if that fails."""
        if self._save:
            self._log.phase(phases.SAVE)
            wait([self._save])
            self.report_ended()

    def report_ended(self) -> None:
        """Report a checkpoint that has been written since the last call; raise SaveError as `wait`.

        It costs next to nothing, so that every step may ask.
        """
        if self._save and self._save.done():
            done, self._save = self._save, None
            step = int(done.result().stem.removeprefix("step-"))
            self._log.phase(self._log.current_phase, checkpoint=step)

    def restore_best(self, state: TrainingState) -> None:
        """Give the first rank, which writes final.pt, the weights with the best evaluation.

        Its own host may lack them: one that a restart has added, or that has lost a rank in a save.
        """
        epoch = state.improvement.epoch
        if not epoch:
            return
        kept = self._best_here(epoch) if self._thread else None
        holders = self._ranks.gather(b"holds it" if kept else b"")
        if not any(holders):
            self._log.say(f"no host has the best checkpoint (epoch {epoch}): final.pt is the last")
            return
        if source := holders.index(max(holders)):
            payload = checkpoint.pack(kept) if kept and self._ranks.rank == source else None
            kept = checkpoint.unpack(self._ranks.broadcast_bytes(payload, source))
        if kept:
            state.evaluated.load_state_dict(kept["average"] or kept["model"])
            state.accuracy = kept["accuracy"]

    def _best_here(self, epoch: int) -> Content | None:
        # The state after this epoch: a later attempt may have named another one the best.
        step = epoch * self._content["identity"]["steps per epoch"]
        for path in (self._log.folder.best, self._log.folder.checkpoint(step)):
            with suppress(SaveError):
                state: Content = checkpoint.read(path)["state"]
                if state["epoch"] == epoch:
                    return state
        return None


def _copied(value: Any) -> Any:
    # On the CPU.
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        copied = copy.copy(value)  # with the versions of modules, which torch keeps beside
        copied.update((key, _copied(part)) for key, part in value.items())
        return copied
    return [_copied(part) for part in value] if isinstance(value, list) else value
