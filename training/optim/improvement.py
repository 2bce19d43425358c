"""The best evaluation so far, and what follows when no better one comes.

All ranks have the same counts, summed over all of them, so all come to the same decisions.
"""

from dataclasses import dataclass

from training.counts import Counts
from training.settings.optim import TuningSettings


@dataclass
class Improvement:
    """Evaluations compared by accuracy, and by loss where that is equal."""

    accuracy: float = 0.0  # of the best evaluation
    loss: float = float("inf")  # likewise
    epoch: int = 0  # likewise: how many were done; 0: there was none
    stale: int = 0  # evaluations since the best one
    waited: int = 0  # evaluations since the best one, or since the learning rate fell
    lr_factor: float = 1.0  # of the schedule's learning rate

    def update(self, evaluation: Counts, config: TuningSettings, epoch: int) -> bool:
        """Count the evaluation after this many epochs; return whether it is as good as the best.

        While only the last layer trains (--head-epochs), nothing is counted.
        """
        score = (evaluation.accuracy, -evaluation.mean_loss)
        best_score = (self.accuracy, -self.loss)
        if score >= best_score:
            self.accuracy, self.loss = evaluation.accuracy, evaluation.mean_loss
            self.epoch = epoch
        if score > best_score or epoch <= config.head_epochs:
            self.stale = self.waited = 0
        else:
            self.stale += 1
            self.waited += 1
        if self.waited >= config.plateau_epochs and config.lr_schedule == "plateau":
            self.lr_factor *= config.plateau_factor
            self.waited = 0
        return score >= best_score

    def exhausted(self, config: TuningSettings) -> bool:
        """Return whether --patience evaluations in a row were no better than the best."""
        return 0 < config.patience <= self.stale
