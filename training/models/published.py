"""Published weights: their addresses, and the files that a host keeps of them.

A file is where torch.hub keeps it, in TORCH_HOME or ~/.cache/torch below hub/checkpoints, so what
torchvision has downloaded is found. Its name ends with the first digits of its SHA-256, as in
densenet121-a639ec97.pth, and it is held against them whenever it is used.
"""

import hashlib
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import torch

from rackrun.contract.files import PUBLISHED
from rackrun.errors import Problem, SaveError, UsageError
from rackrun.terminal import one_line
from rackrun.training.models.named import repository, timm_weights
from rackrun.training.models.registered import TIMM, refuse_unpublished
from rackrun.training.ranks import Ranks

URL = re.compile(r"https?://[^/\s]+/\S+")
DIGEST = re.compile(r"[\w.+-]+-([0-9a-f]{8,64})\.[a-z]+")
SECONDS = 60  # without an answer
MEETING_SECONDS = 0.1  # between two exchanges


def downloaded_weights(given: str, model: str, ranks: Ranks) -> Path:
    """Return the file that --weights means; the first rank of each host downloads it if need be.

    UsageError or SaveError where there is none; all ranks raise when any host has none.
    """
    if given == PUBLISHED and model.startswith(TIMM):
        return _of_timm(model.removeprefix(TIMM), ranks)
    if given == PUBLISHED:
        return _cached(published_url(model), ranks)
    return _cached(given, ranks) if URL.fullmatch(given) else Path(given)


def published_url(model: str) -> str:
    """Return the address of torchvision's best weights for a model; UsageError without any."""
    import torchvision

    torchvision_names = torchvision.models.list_models(module=torchvision.models)
    refuse_unpublished(model, torchvision_names)
    url: str = torchvision.models.get_model_weights(model).DEFAULT.url
    return url


def _of_timm(name: str, ranks: Ranks) -> Path:
    path = timm_weights(name)
    # Whether a host lacks them is exchanged: else its ranks end, and the others wait for them.
    if ranks.all_reduce_max(path is None) or not path:
        where = "another host" if path else socket.gethostname()
        raise UsageError(
            f"--weights {PUBLISHED}: {where} has no weights of {TIMM}{name}; type"
            f" `hf download {repository(name)}` on every host, or type --weights FILE"
        )
    return path


def _cached(url: str, ranks: Ranks) -> Path:
    path = Path(torch.hub.get_dir()) / "checkpoints" / Path(urlsplit(url).path).name
    with ThreadPoolExecutor(1) as pool:
        bringing = pool.submit(bring, url, path) if ranks.writes else None
        # All meet again and again: a download may take longer than an exchange may wait.
        while ranks.all_reduce_max(int(bringing is not None and not bringing.done())):
            time.sleep(MEETING_SECONDS)
    problem: Problem | None = None
    try:
        if bringing:
            bringing.result()
    except Problem as error:
        problem = error
    if ranks.all_reduce_max(int(problem is not None)):
        raise problem or SaveError(f"--weights {url}: not on every host")
    return path


def bring(url: str, path: Path) -> None:
    """Download a file unless the host has it; Problem with what to bring where if that fails."""
    name = DIGEST.fullmatch(path.name)
    if not name:
        raise UsageError(
            f"--weights {url}: its name ends with no digest, as in densenet121-a639ec97.pth;"
            " download it yourself and type --weights FILE"
        )
    if path.exists():
        with path.open("rb") as file:
            if not hashlib.file_digest(file, "sha256").hexdigest().startswith(name[1]):
                raise SaveError(f"{path}: damaged: not the digest in its name; remove the file")
        return
    socket.setdefaulttimeout(SECONDS)  # torch.hub sets none: a silent server would be waited for
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=name[1], progress=False)
    except (OSError, HTTPException, RuntimeError, ValueError) as error:
        why = one_line(str(getattr(error, "reason", error)))[:200]  # without "<urlopen error"
        raise SaveError(
            f"--weights: {socket.gethostname()} cannot download {url} ({why}); bring that file to"
            f" {path}, or type --weights FILE, or --weights '' to train from random weights"
        ) from None
    finally:
        socket.setdefaulttimeout(None)
