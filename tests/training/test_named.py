"""A model of one's own, or of timm, by its name in --model."""

import sys

import pytest
import torch
import torchvision
from safetensors.torch import save_file

from rackrun.errors import MissingPackage, UsageError
from rackrun.training.data.transforms import Transforms
from rackrun.training.models.named import named_model, normalized_for
from rackrun.training.models.published import downloaded_weights
from rackrun.training.models.registered import registered
from rackrun.training.models.weights import load_weights
from rackrun.training.ranks import Ranks


def test_timm_is_an_extra(monkeypatch):
    """A model of the real timm has the right classes; without timm, the error names the extra."""
    model = named_model("timm:test_resnet", 5, 32)
    assert model(torch.zeros(2, 3, 64, 64)).shape == (2, 5)
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(MissingPackage, match=r"^timm is not installed; type: .*\[timm\]'$"):
        named_model("timm:test_resnet", 5, 32)


def test_weights_that_timm_publishes_are_found_on_the_host(tmp_path, monkeypatch):
    """In the cache that `hf download` fills; images are normalized as their training had them."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    alone = Ranks(0, 1, 0, 1, torch.device("cpu"))
    with pytest.raises(
        UsageError, match="type `hf download timm/test_vit.r160_in1k` on every host"
    ):
        downloaded_weights("imagenet", "timm:test_vit", alone)
    published = named_model("timm:test_vit", 1000, 160)
    folder = tmp_path / "models--timm--test_vit.r160_in1k"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    save_file(published.state_dict(), folder / "snapshots" / ("0" * 40) / "model.safetensors")
    model = named_model("timm:test_vit", 5, 96)
    line = load_weights(
        model, downloaded_weights("imagenet", "timm:test_vit", alone), tuple("abcde")
    )
    assert "position embeddings interpolated from 10 x 10 to 6 x 6" in line
    assert "has 5 classes instead of 1000 and is reinitialized" in line
    block = "blocks.0.attn.qkv.weight"
    assert torch.equal(model.state_dict()[block], published.state_dict()[block])
    result = normalized_for("timm:test_vit", Transforms(96))
    assert (result.mean, result.deviation) == ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def test_names_in_the_sources_are_those_that_the_libraries_have():
    """No model that exists is refused."""
    assert registered("torchvision") == sorted(
        torchvision.models.list_models(module=torchvision.models)
    )
    import timm

    names = registered("timm")
    assert {name.partition(".")[0] for name in timm.list_models()} <= set(names)
    assert all(map(timm.is_model, names))
    assert registered("no_such_library") == []
