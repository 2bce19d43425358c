"""Published weights: from a real server into the host's cache, held against the digest."""

import hashlib
from pathlib import Path

import pytest
import torch
from torchvision import models

from rackrun.errors import SaveError, UsageError
from rackrun.training.models import published
from rackrun.training.models.published import bring, downloaded_weights, published_url
from rackrun.training.ranks import Ranks
from tests.lab.servers import served
from tests.lab.warm import free_port

ALONE = Ranks(0, 1, 0, 1, torch.device("cpu"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a new folder for the files of torch.hub."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hub" / "checkpoints"


def publish(folder: Path) -> str:
    """Put a file under the name that torchvision would give it."""
    name = f"net-{hashlib.sha256(b'weights').hexdigest()[:8]}.pth"
    folder.mkdir()
    (folder / name).write_bytes(b"weights")
    return name


def test_every_model_of_torchvision_has_an_address_with_a_digest():
    """The best of its weights, as torchvision says; other names are met with near ones."""
    for name in models.list_models(module=models):
        url = published_url(name)
        assert published.DIGEST.fullmatch(url.rpartition("/")[2]), url
    assert published_url("densenet121").endswith("/densenet121-a639ec97.pth")
    with pytest.raises(UsageError, match="torchvision has none for --model catdog; type --weights"):
        published_url("catdog")


def test_weights_are_downloaded_once(home, tmp_path, monkeypatch):
    """Into torch's own cache; the second run needs no server."""
    name = publish(tmp_path / "www")
    with served(tmp_path / "www") as (address, asked):
        monkeypatch.setattr(published, "published_url", lambda model: f"{address}/{name}")
        path = downloaded_weights("imagenet", "densenet121", ALONE)
    assert path == home / name and path.read_bytes() == b"weights" and asked == [f"/{name}"]
    assert downloaded_weights("imagenet", "densenet121", ALONE) == path
    assert [path.name for path in home.iterdir()] == [name]
    assert downloaded_weights("own.pth", "densenet121", ALONE) == Path("own.pth")


def test_what_is_damaged_is_refused(home, tmp_path):
    """On the way and in the cache; nothing of it is left or used."""
    name = publish(tmp_path / "www")
    (tmp_path / "www" / name).write_bytes(b"something else")
    with (
        served(tmp_path / "www") as (address, _),
        pytest.raises(SaveError, match="invalid hash value"),
    ):
        downloaded_weights(f"{address}/{name}", "", ALONE)
    assert not list(home.iterdir())
    (home / name).write_bytes(b"cut")
    with pytest.raises(SaveError, match=f"{name}: damaged: not the digest in its name; remove"):
        downloaded_weights(f"{address}/{name}", "", ALONE)


def test_without_a_network_the_error_says_what_to_bring_where(home):
    """Address, host and path: to be copied by hand."""
    url = f"http://127.0.0.1:{free_port('127.0.0.1')}/net-01234567.pth"
    with pytest.raises(SaveError, match=r"download .* \(\[Errno 111\] ") as observed:
        downloaded_weights(url, "", ALONE)
    assert url in str(observed.value) and f"bring that file to {home}/net-01234567.pth" in str(
        observed.value
    )
    with pytest.raises(UsageError, match="ends with no digest"):
        bring("http://127.0.0.1/net.pth", home / "net.pth")
