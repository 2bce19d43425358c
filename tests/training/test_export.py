"""`python -m rackrun.training export`: each format answers as the model does, or is not written."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from rackrun.errors import SaveError
from rackrun.training.export import formats
from rackrun.training.export.command import main
from rackrun.training.trained import load_of_any_task
from tests.lab.warm import ROOT
from tests.training.conftest import SHAPES


def test_nothing_but_the_result_is_printed(untrained, tmp_path):
    """What the export imports would print its leaks in the interpreter's shutdown."""
    program = [sys.executable, "-P", "rackrun/__main__.py"]
    args = [*program, "export", str(untrained), str(tmp_path / "model.pt2")]
    done = subprocess.run(args, cwd=ROOT, capture_output=True, text=True, check=True)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)


def images(count: int) -> torch.Tensor:
    return torch.linspace(-2, 2, count * 3 * 24 * 24).view(count, 3, 24, 24)


def expected(final: Path, count: int) -> torch.Tensor:
    with torch.no_grad():
        predictions: torch.Tensor = load_of_any_task(final).model(images(count))
    return predictions


def test_onnx_answers_as_the_model_does(untrained, tmp_path):
    """onnxruntime gives the model's answers, for another number of images than at the export."""
    out = tmp_path / "model.onnx"
    assert main([str(untrained), str(out)]) == 0
    import onnxruntime

    session = onnxruntime.InferenceSession(out.read_bytes(), providers=["CPUExecutionProvider"])
    (result,) = session.run(None, {"images": images(5).numpy()})
    np.testing.assert_allclose(result, expected(untrained, 5).numpy(), atol=1e-5)
    kept = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(kept["classes"])) == SHAPES
    assert json.loads(kept["preparation"])["size"] == 24


def test_a_program_answers_as_the_model_does(untrained, tmp_path):
    """torch.export reads the program back; it takes another number of images."""
    out = tmp_path / "model.pt2"
    assert main([str(untrained), str(out)]) == 0
    extra = {"classes": ""}
    program = torch.export.load(io.BytesIO(out.read_bytes()), extra_files=extra)
    torch.testing.assert_close(program.module()(images(5)), expected(untrained, 5))
    assert tuple(json.loads(extra["classes"])) == SHAPES


def test_what_answers_otherwise_is_not_written(untrained, tmp_path):
    """Answers off by a thousandth, or no numbers, are refused; nothing has the file's name."""
    trained = load_of_any_task(untrained)
    model = trained.model
    with torch.no_grad():
        for wrong in (1e-3, float("nan")):
            with pytest.raises(SaveError, match="not written: its answers differ"):
                formats.check(
                    trained, lambda images, by=wrong: model(images) + by, tmp_path / "x.onnx"
                )
    assert not list(tmp_path.iterdir())
