"""The formats of an export.

    Trained -> bytes of the format -> read back, held against the model's answers -> file

The input is what the model sees: normalized float32 images (N, channels, side, side).
"""

import copy
import io
import json
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from rackrun.atomic import write_whole
from rackrun.errors import MissingPackage, SaveError
from rackrun.terminal import one_line
from rackrun.training.trained import Trained

IMAGES = 3  # in the check: another number than at the export, which must not be built in
TOLERANCE = 1e-4  # of the largest output

Answering = Callable[[torch.Tensor], torch.Tensor]


class Format(NamedTuple):
    """How a model becomes bytes, and how these predict."""

    write: Callable[[Trained], bytes]
    read: Callable[[Trained, bytes], Answering]
    packages: tuple[str, ...] = ()
    """Packages of the extra `onnx` that it needs."""


@torch.no_grad()
def export(trained: Trained, out: Path) -> float:
    """Write a model in the format of the suffix; return how far its answers are from the model's.

    SaveError when the model cannot be exported, or what was exported answers differently.
    """
    chosen = FORMATS[out.suffix]
    for package in chosen.packages:
        if find_spec(package) is None:
            raise MissingPackage(package, "onnx")
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")  # of exporters, on what users cannot change
            data = chosen.write(trained)
            run_exported = chosen.read(trained, data)
    # torch.export, onnx and ONNX Runtime have errors without a common class, and raise those of the
    # model's own code; all mean that this model has no such format.
    except Exception as error:
        raise SaveError(
            f"{trained.path}: cannot be exported as {out.suffix}: {one_line(str(error))[:300]};"
            f" type another suffix: {', '.join(FORMATS)}"
        ) from None
    difference = check(trained, run_exported, out)
    write_whole(out, data)
    return difference


def check(trained: Trained, run_exported: Answering, out: Path) -> float:
    """Return the largest difference of outputs for random images; SaveError if it is too large."""
    images = examples(trained, IMAGES)
    expected = trained.model(images)
    outputs = run_exported(images)
    difference = float((outputs - expected).abs().max())
    limit = TOLERANCE * (1 + float(expected.abs().max()))
    if not difference <= limit:  # nor may it be no number
        raise SaveError(
            f"{out}: not written: its answers differ from the model's by {difference:.1e}, more"
            f" than {limit:.1e}; type another suffix: {', '.join(FORMATS)}"
        )
    return difference


def examples(trained: Trained, count: int) -> torch.Tensor:
    """Return random images as the model sees them."""
    side = trained.transforms.evaluation_size or trained.transforms.size
    random = torch.Generator().manual_seed(0)
    return torch.randn(count, trained.transforms.channels, side, side, generator=random)


def metadata(trained: Trained) -> dict[str, str]:
    """Return what the use of the model needs besides, as JSON by name."""
    return {
        "task": trained.task,
        "classes": json.dumps(trained.classes),
        "preparation": json.dumps(asdict(trained.transforms)),
    }


def _safetensors(trained: Trained) -> bytes:
    from safetensors.torch import save

    weights = {name: each.clone() for name, each in trained.model.state_dict().items()}
    return save({name: each.contiguous() for name, each in weights.items()}, metadata(trained))


def _with_weights(trained: Trained, data: bytes) -> Answering:
    from safetensors.torch import load

    model: nn.Module = copy.deepcopy(trained.model)
    for each in model.state_dict().values():
        each.zero_()  # so that a weight that is missing from the file shows
    model.load_state_dict(load(data))
    return model


def _program(trained: Trained) -> torch.export.ExportedProgram:
    any_number = ({0: torch.export.Dim.DYNAMIC},)
    return torch.export.export(trained.model, (examples(trained, 2),), dynamic_shapes=any_number)


def _pt2(trained: Trained) -> bytes:
    file = io.BytesIO()
    torch.export.save(_program(trained), file, extra_files=metadata(trained))
    return file.getvalue()


def _loaded_program(trained: Trained, data: bytes) -> Answering:
    return torch.export.load(io.BytesIO(data)).module()


def _onnx(trained: Trained) -> bytes:
    program = torch.onnx.export(
        _program(trained), input_names=["images"], output_names=["outputs"], verbose=False
    )
    assert program
    program.model.metadata_props.update(metadata(trained))
    data: bytes = program.model_proto.SerializeToString()
    return data


def _onnxruntime(trained: Trained, data: bytes) -> Answering:
    import onnxruntime  # type: ignore[import-untyped]

    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


FORMATS = {
    ".safetensors": Format(_safetensors, _with_weights),
    ".onnx": Format(_onnx, _onnxruntime, ("onnx", "onnxscript", "onnxruntime")),
    ".pt2": Format(_pt2, _loaded_program),
}
