"""python -m rackrun.training export: write a trained model for other programs.

torch is imported once there is something to export, so that `--help` answers at once.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.runs import final_weights
from rackrun.tables import require_folder
from rackrun.training.settings.model import ModelOptions, with_weights_first

SUFFIXES = (".safetensors", ".onnx", ".pt2")


@dataclass(frozen=True)
class Export:
    """Export a trained model; the file is written only if it predicts as the model does."""

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest model.onnx", "for ONNX Runtime"),
        ("{prog} runs/latest model.safetensors", "the weights only"),
        ("{prog} runs/latest model.pt2", "for torch.export.load"),
    )

    checkpoint: Positional[Path]
    """The weights: a run folder, its final.pt, or a checkpoint."""
    out: Positional[Path]
    """File to write; its suffix is the format: .safetensors, .onnx or .pt2 (torch.export)."""
    model: ModelOptions = field(default_factory=ModelOptions)


def main(args: Sequence[str]) -> int:
    """Export a model as the arguments ask; return the exit code."""
    given = parse(Export, called("export"), with_weights_first(args))
    if given.out.suffix not in SUFFIXES:
        raise UsageError(f"{given.out}: not a known format; type one of: {', '.join(SUFFIXES)}")
    require_folder(str(given.out))
    given.model.check()
    weights = final_weights(given.checkpoint)
    from rackrun.training.export.formats import export
    from rackrun.training.trained import load

    trained = load(weights, given.model)
    difference = export(trained, given.out)
    size = given.out.stat().st_size / 1e6
    sys.stdout.write(
        f"{given.out}: {size:.1f} MB; outputs for random images differ from the model's by at most"
        f" {difference:.1e}\n"
    )
    return 0
