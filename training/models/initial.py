"""A model before its first step: what the settings add to it, and the weights it begins with."""

from collections.abc import Sequence

from torch import nn

from rackrun.contract import phases
from training.config import Config
from training.models.dropout import with_dropout
from training.models.published import weights_file
from training.models.recomputed import with_recomputed_blocks
from training.models.stochastic_depth import with_stochastic_depth
from training.models.weights import load_weights
from training.ranks import Ranks
from training.run.progress import ProgressReporter


def extended(model: nn.Module, config: Config, classes: int) -> nn.Module:
    """Return a task's model with dropout, stochastic depth and gradient checkpointing as set."""
    model = with_dropout(model, config.dropout, classes)
    model = with_stochastic_depth(model, config.stochastic_depth)
    return with_recomputed_blocks(model, config.gradient_checkpointing)


def load_initial_weights(
    model: nn.Module,
    classes: Sequence[str],
    config: Config,
    ranks: Ranks,
    progress: ProgressReporter,
) -> str:
    """Load the weights of --weights, downloaded if need be; return a line about them."""
    progress.phase(phases.DOWNLOAD)
    path = weights_file(config.weights, config.model, ranks)
    progress.phase(phases.START)
    return load_weights(model, path, classes)
