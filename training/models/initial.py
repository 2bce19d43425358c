"""A model before its first step: what the settings add to it, and the weights it begins with."""

from torch import nn

from rackrun.contract import phases
from training.config import Config
from training.models.dropout import with_dropout
from training.models.published import weights_file
from training.models.recomputed import with_recomputed_blocks
from training.models.weights import load_weights
from training.ranks import Ranks
from training.run.progress import ProgressReporter


def extended(model: nn.Module, config: Config) -> nn.Module:
    """Return a task's model with dropout and gradient checkpointing as the settings ask."""
    model = with_dropout(model, config.dropout)
    return with_recomputed_blocks(model, config.gradient_checkpointing)


def load_initial_weights(
    model: nn.Module, config: Config, ranks: Ranks, progress: ProgressReporter
) -> str:
    """Load the weights of --weights, downloaded if need be; return a line about them."""
    progress.phase(phases.DOWNLOAD)
    path = weights_file(config.weights, config.model, ranks)
    progress.phase(phases.START)
    return load_weights(model, path)
