"""The checkpoints of a run: ranks save together, and one on each host writes in the background."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch

from rackrun.atomic import write_whole
from rackrun.contract import phases
from rackrun.errors import SaveError
from rackrun.training import checkpoint
from rackrun.training.checkpoint import BackgroundSaves, Content
from rackrun.training.divergence import check_weights
from rackrun.training.log import Log
from rackrun.training.ranks import Ranks
from rackrun.training.run.resume import Earlier
from rackrun.training.state import TrainingState


class RunCheckpoints:
    """Saves the state of a run."""

    def __init__(self, ranks: Ranks, log: Log, content: Content) -> None:
        """Take what is in every checkpoint beside the state: what the run is, its identity."""
        self._ranks = ranks
        self._log = log
        self._content = content
        self._saves: BackgroundSaves | None = None  # on the rank that writes to its disk
        self.images_by_rank: list[int] = []
        """Of a full step, with --balance auto."""

    def open(self, keep: int) -> None:
        """Begin to write on this rank, and keep the last `keep` checkpoints."""
        checkpoint.remove_partials(self._log.folder)
        self._saves = BackgroundSaves(self._log.folder, keep)

    def __enter__(self) -> RunCheckpoints:
        return self

    def __exit__(self, failure: type[BaseException] | None, *error: object) -> None:
        if failure and self._saves:
            self._saves.end(failure)

    def take_over(self, step: int, earlier: Earlier) -> None:
        """Write what a run goes on from, so that every host could go on alone; free its memory."""
        if self._saves:
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
        check_weights(state.step, not self._ranks.all_reduce_max(int(not state.is_finite)))
        self.wait()  # for the save before: its copy of the state is written over now
        # The file has the mean of all ranks' statistics, for whoever loads it, and those of each
        # rank: a run that resumes goes on with the same numbers as one that was not interrupted.
        statistics = self._ranks.gather_statistics(state.model)
        try:
            for model in state.models:
                self._ranks.share_statistics(model)
            if self._saves:
                self._begin(self._saves, state, statistics, best)
        finally:
            self._ranks.restore_statistics(state.model, statistics)
        self._log.phase(phases.TRAIN)

    def keep_step(self, state: TrainingState) -> None:
        """Save the last whole step without the other ranks, of which one is lost.

        Batch norms keep the statistics of this rank, as nobody can take the mean any more; they may
        have seen the images of the step that was lost, too.
        """
        if not self._saves or not state.is_finite:
            return
        self.wait()
        if self._log.folder.checkpoint(state.step).exists():
            return
        self._begin(self._saves, state, None, best=False)
        self.wait()

    def _begin(
        self,
        saves: BackgroundSaves,
        state: TrainingState,
        statistics: torch.Tensor | None,
        best: bool,
    ) -> None:
        content: Content = {**self._content, "state": state.state_dict(), "statistics": statistics}
        saves.begin({**content, "images_by_rank": self.images_by_rank}, best)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise SaveError if that fails."""
        if self._saves:
            self._log.phase(phases.SAVE)
            self._report(self._saves.wait())

    def report_ended(self) -> None:
        """Report a checkpoint that has been written since the last call; raise SaveError as `wait`.

        It costs next to nothing, so that every step may ask.
        """
        if self._saves:
            self._report(self._saves.ended())

    def _report(self, step: int) -> None:
        if step:  # 0: of no checkpoint
            self._log.phase(self._log.current_phase, checkpoint=step)

    def _best_kept(self, state: TrainingState) -> Content | None:
        # On the first rank, which writes final.pt: a checkpoint that did better than the state.
        best, accuracy = None, state.accuracy
        for path in checkpoint.steps_in(self._log.folder.checkpoints) if self._ranks.first else ():
            with suppress(SaveError):
                kept = checkpoint.read(path)["state"]
                if kept["accuracy"] > accuracy:
                    best, accuracy = kept, kept["accuracy"]
        return best

    def restore_best(self, state: TrainingState) -> None:
        """Give the first rank, which writes final.pt, the weights with the best evaluation.

        Its own host may lack them: one that a restart has added, or that has lost a rank in a save.
        """
        epoch, best = state.improvement.epoch, None
        if self._saves:
            with suppress(SaveError):  # it may be absent, or damaged
                recorded = checkpoint.read(self._log.folder.best)["state"]
                best = recorded if recorded["epoch"] == epoch else None
        offers = self._ranks.all_gather(np.array([int(best is not None)]))
        if not any(offers):
            if epoch:
                kept = self._best_kept(state)
                which = f"the best of those left (epoch {kept['epoch']})" if kept else "the last"
                self._log.say(
                    f"no host has the best checkpoint (epoch {epoch}): final.pt is {which}"
                )
                if kept:
                    state.evaluated.load_state_dict(kept["average"] or kept["model"])
                    state.accuracy = kept["accuracy"]
            return
        source = [bool(offer) for offer in offers].index(True)
        if source and best and self._ranks.rank == source:
            self._ranks.send_bytes(checkpoint.pack(best), 0)
        if self._ranks.first:
            best = checkpoint.unpack(self._ranks.receive_bytes(source)) if source else best
            assert best
            state.evaluated.load_state_dict(best["average"] or best["model"])
            state.accuracy = best["accuracy"]
