"""Weights in the layouts in which they are published, made by torchvision's own models."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchvision import models
from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

from rackrun.errors import SaveError
from rackrun.training.models.named import torchvision_model
from rackrun.training.models.weights import adapted, load_weights

NO_NAMES = (
    "; the last layer (fc.weight, fc.bias) keeps its 2 rows: the file does not say of which classes"
)
Tensors = dict[str, torch.Tensor]
COUNT = {"n_averaged": torch.ones(())}  # as torch's AveragedModel saves


class Small(nn.Module):
    """What wrappers wrap."""

    def __init__(self, classes: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.fc = nn.Linear(4, classes)


def loaded(model: nn.Module, path: Path, content: Any, classes: int = 2) -> str:
    """Write a file, load it, and return what is said, without the file's name."""
    torch.save(content, path)
    names = tuple(map(str, range(classes)))
    return load_weights(model, path, names).removeprefix(f"weights from {path}")


def same(model: nn.Module, weights: Tensors, but: str = "nothing") -> bool:
    ours = model.state_dict()
    return all(torch.equal(ours[name], weights[name]) for name in ours if not name.startswith(but))


def below(prefix: str, weights: Tensors) -> Tensors:
    return {prefix + name: tensor for name, tensor in weights.items()}


@pytest.mark.parametrize(
    ("wrapped", "message"),
    [
        (lambda w: {"state_dict": w, "epoch": 3}, ""),
        (lambda w: {"model": below("module.", w), "optimizer": {}}, ""),
        (lambda w: {"model": {}, "model_ema": below("module.", w) | COUNT}, ""),
        (lambda w: {"state_dict": {}, "state_dict_ema": w}, ""),
        (lambda w: {"state_dict": below("model.", w)}, "; found below model."),
        (
            lambda w: {"state_dict": below("module.encoder_q.", w) | {"queue": torch.ones(2)}},
            "; found below encoder_q. (1 others left out)",
        ),
        (lambda w: {n: tensor for n, tensor in w.items() if not n.endswith("tracked")}, ""),
        (
            lambda w: {n: tensor for n, tensor in w.items() if not n.startswith("fc.")},
            "; the last layer (fc.weight, fc.bias) is not there and is reinitialized",
        ),
    ],
    ids=["timm", "DDP", "EMA", "timm's EMA", "Lightning", "MoCo", "no counts", "no head"],
)  # fmt: skip
def test_wrappers_are_opened(tmp_path, wrapped, message):
    """Whatever stands around the weights or before their names; averages go before weights."""
    weights, model = Small().state_dict(), Small()
    said = loaded(model, tmp_path / "w.pth", wrapped(weights))
    assert said == (message if "reinitialized" in message else f"{message}{NO_NAMES}")
    assert same(model, weights, "fc" if "reinitialized" in message else "nothing")


def test_densenet_is_read_as_it_is_published(tmp_path):
    """norm.1 for norm1, without counts; 1,000 classes become 2."""
    published = models.DenseNet(8, (2, 2), 16, num_classes=1000).state_dict()
    old = {
        name.replace("norm1.", "norm.1.").replace("norm2.", "norm.2.")
        .replace("conv1.", "conv.1.").replace("conv2.", "conv.2."): tensor
        for name, tensor in published.items()
        if not name.endswith("num_batches_tracked")
    }  # fmt: skip
    assert "features.denseblock1.denselayer1.norm.1.weight" in old
    model = models.DenseNet(8, (2, 2), 16, num_classes=2)
    message = loaded(model, tmp_path / "w.pth", old)
    assert message == (
        "; earlier names; the last layer (classifier.weight, classifier.bias)"
        " has 2 classes instead of 1000 and is reinitialized"
    )
    assert same(model, published, "classifier")


def test_auxiliary_heads_are_left_out(tmp_path):
    """GoogLeNet is published with two heads that only its training needs, Inception with one."""
    published = models.googlenet(num_classes=10, init_weights=False).state_dict()
    model = torchvision_model("googlenet", 10, 64)
    inception = {"AuxLogits.fc.bias": torch.zeros(10)}
    message = loaded(model, tmp_path / "w.pth", published | inception)
    assert message == "; auxiliary heads left out"
    assert same(model, published)


def vit(side: int) -> nn.Module:
    return VisionTransformer(side, 16, 2, 2, 8, 16, num_classes=5)


def test_position_embeddings_are_interpolated(tmp_path):
    """As torchvision does it for its own weights, and under the names of its published files."""
    published = vit(64).state_dict()
    old = {
        name.replace("mlp.0.", "mlp.linear_1.").replace("mlp.3.", "mlp.linear_2."): tensor
        for name, tensor in published.items()
    }
    model = vit(96)
    message = loaded(model, tmp_path / "w.pth", old)
    assert message == "; earlier names; position embeddings interpolated from 4 x 4 to 6 x 6"
    expected = interpolate_embeddings(96, 16, dict(published))["encoder.pos_embedding"]
    torch.testing.assert_close(model.state_dict()["encoder.pos_embedding"], expected)
    assert same(model, published | {"encoder.pos_embedding": expected})


def swin(window: int) -> nn.Module:
    return models.SwinTransformer([4, 4], 8, [2], [2], [window, window], num_classes=5)


def test_relative_biases_are_interpolated(tmp_path):
    """Swin with another window; the table of indices is the model's own."""
    old, model = swin(4), swin(6)
    name = "features.1.0.attn.relative_position_bias_table"
    across = torch.linspace(-1, 1, 7).repeat(7, 1)
    old.state_dict()[name][:] = torch.stack([across, across.T], dim=2).view(49, 2)
    indices = model.state_dict()["features.1.0.attn.relative_position_index"].clone()
    message = loaded(model, tmp_path / "w.pth", old.state_dict())
    assert message == "; relative biases interpolated from 7 x 7 to 11 x 11"
    table = model.state_dict()[name].view(11, 11, 2)
    assert torch.equal(model.state_dict()["features.1.0.attn.relative_position_index"], indices)
    assert float(table[0, 0, 0]) == pytest.approx(-1) == float(table[5, 0, 0])
    assert float(table[5, 5, 0]) == pytest.approx(0, abs=1e-6)
    assert adapted({name: torch.ones(50, 2)}, {name: torch.ones(9, 2)})[1] == []


def test_what_is_left_is_refused(tmp_path):
    """Adapting is no excuse for loading another model's weights."""
    other = {**Small().state_dict(), "conv.weight": torch.ones(5, 3, 3, 3), "more": torch.ones(1)}
    with pytest.raises(
        SaveError, match=r"not of this model: conv.weight is \(5, 3, 3, 3\) there.*type --model"
    ):
        loaded(Small(), tmp_path / "w.pth", other)
    with pytest.raises(SaveError, match="holds no named weights.* its keys: state_dict; save the"):
        loaded(Small(), tmp_path / "w.pth", {"state_dict": {"model": {"a": 1}}})
    two = {"generator": Small().state_dict(), "critic": Small().state_dict(), "epoch": 3}
    with pytest.raises(SaveError, match="several tables of them; its keys: generator, critic, epo"):
        loaded(Small(), tmp_path / "w.pth", two)
