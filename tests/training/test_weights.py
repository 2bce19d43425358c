"""Models by name, and weights from files."""

from zipfile import ZIP_DEFLATED, ZipFile

import pytest
import torch
import torchvision
from torch import nn

from rackrun.errors import SaveError
from rackrun.training import checkpoint
from rackrun.training.data.transforms import Transforms
from rackrun.training.models.named import torchvision_model
from rackrun.training.models.weights import load_weights


def net(classes: int, width: int = 4) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.Flatten(), nn.Linear(width, classes))


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "googlenet", "vit_b_16"])
def test_a_model_of_torchvision_has_the_classes_and_size_of_the_task(name):
    """Also those that answer with more than one tensor, or for one size only."""
    with torch.device("meta"):
        model = torchvision_model(name, classes=7, size=64)
        assert model.train()(torch.zeros(2, 3, 64, 64)).shape == (2, 7)


@pytest.mark.parametrize(
    "per_family", [1, pytest.param(99, marks=pytest.mark.long)], ids=["one of each", "all"]
)
def test_every_classification_model_can_be_built(per_family):
    """Nothing in the registry needs an argument that we do not give."""
    families: dict[str, list[str]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        families.setdefault(torchvision.models.get_model_builder(name).__module__, []).append(name)
    assert len(families) > 15 and sum(map(len, families.values())) > 70
    del families["torchvision.models.regnet"]  # computes its widths, which needs a real device
    with torch.device("meta"):
        for names in families.values():
            for name in names[:per_family]:
                assert torchvision_model(name, classes=2, size=224)
    assert torchvision_model("regnet_x_400mf", classes=2, size=224)


def test_weights_are_found_in_our_own_files(tmp_path):
    """In a final.pt, and in a checkpoint the average if there is one."""
    old, averaged = net(2).state_dict(), net(2).state_dict()
    contents = {
        "final.pt": {"model": old, "classes": ["a"]},
        "step.pt": {"state": {"model": averaged, "average": old, "step": 3}},
        "plain.pt": {"state": {"model": old, "average": None, "step": 3}},
    }
    for name, content in contents.items():
        checkpoint.write(tmp_path / name, content)
        model = net(2)
        load_weights(model, tmp_path / name, ("cat", "dog"))
        assert torch.equal(model.state_dict()["2.weight"], old["2.weight"])


@pytest.mark.parametrize(
    ("classes", "said", "rows"),
    [
        ("red green blue", "", [0, 1, 2]),
        ("blue green red", "has the rows of 3 of 3 classes by name", [2, 1, 0]),
        ("blue red", "has the rows of 2 of 2 classes by name", [2, 0]),
        (
            "blue gray red",
            "has the rows of 2 of 3 classes by name; reinitialized: gray",
            [2, None, 0],
        ),
        ("cat dog emu", "had other classes (red, green, blue) and is reinitialized", [None] * 3),
    ],
)
def test_rows_of_the_last_layer_follow_their_classes(tmp_path, classes, said, rows):
    """By name, whatever their order and number; a row of another class is never kept."""
    names = classes.split()
    old, new = net(3), net(len(names))
    content = {"model": old.state_dict(), "classes": ["red", "green", "blue"]}
    checkpoint.write(tmp_path / "final.pt", content)
    fresh = new.state_dict()["2.weight"].clone()
    line = load_weights(new, tmp_path / "final.pt", names)
    expected = f"; the last layer (2.weight, 2.bias) {said}" if said else ""
    assert line == f"weights from {tmp_path / 'final.pt'}{expected}"
    for number, row in enumerate(rows):
        source = fresh[number] if row is None else old.state_dict()["2.weight"][row]
        assert torch.equal(new.state_dict()["2.weight"][number], source)


def test_another_normalization_of_weights_is_said(tmp_path):
    """Those of a run know theirs: a model that is fed otherwise answers wrongly."""
    content = {
        "model": net(2).state_dict(),
        "classes": ["cat", "dog"],
        "preparation": {"mean": (0.5, 0.5, 0.5), "deviation": (0.5, 0.5, 0.5)},
    }
    checkpoint.write(tmp_path / "final.pt", content)
    line = load_weights(net(2), tmp_path / "final.pt", ("cat", "dog"), Transforms(32))
    assert line.endswith("another normalization: type --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5")


def test_a_file_that_unpacks_to_more_than_it_is_is_refused(tmp_path):
    """torch stores tensors uncompressed: packed zeros are an attack on memory."""
    torch.save({"a": torch.zeros(1 << 20)}, tmp_path / "plain.pth")
    with (
        ZipFile(tmp_path / "plain.pth") as plain,
        ZipFile(tmp_path / "bomb.pth", "w", ZIP_DEFLATED) as bomb,
    ):
        for entry in plain.infolist():
            bomb.writestr(entry.filename, plain.read(entry))
    assert (tmp_path / "bomb.pth").stat().st_size < 100_000
    with pytest.raises(SaveError, match="compressed"):
        load_weights(net(2), tmp_path / "bomb.pth", ("cat", "dog"))


def test_names_of_tensors_cannot_play_with_the_terminal(tmp_path):
    """They are shown in the differences, cleaned and cut."""
    torch.save({"\x1b]0;owned\x07" + "x" * 9999: torch.zeros(1)}, tmp_path / "w.pth")
    with pytest.raises(SaveError, match="\u241b]0;owned\u2407x+ is") as observed:
        load_weights(net(2), tmp_path / "w.pth", ("cat", "dog"))
    assert str(observed.value).isprintable() and len(str(observed.value)) < 3000
