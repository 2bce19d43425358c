"""A real Docker daemon, an nginx image made of this machine's nginx, and a folder to serve."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rackrun.nginx.native import PATHS


@pytest.fixture(scope="session")
def daemon() -> Iterator[None]:
    """Yield with this machine's Docker daemon, or with one of our own for the tests."""
    with docker_daemon():
        yield


@contextmanager
def docker_daemon() -> Iterator[None]:
    """Start a Docker daemon where none answers, and let DOCKER_HOST lead to it meanwhile."""
    if docker("version").returncode == 0:
        yield
        return
    home = Path(tempfile.mkdtemp(prefix="rackrun-docker-"))
    log = (home / "log").open("wb")
    process = subprocess.Popen(
        [
            shutil.which("dockerd", path=PATHS) or "dockerd",
            *("--host", f"unix://{home}/docker.sock", "--pidfile", str(home / "pid")),
            *("--data-root", str(home / "data"), "--exec-root", str(home / "exec")),
            *("--bridge", "none", "--iptables=false", "--ip6tables=false"),
        ],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DOCKER_HOST", f"unix://{home}/docker.sock")
        while docker("version").returncode != 0:
            assert process.poll() is None, (home / "log").read_text()
            time.sleep(0.05)
        yield
    process.terminate()
    process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    log.close()
    subprocess.run(["umount", str(home / "exec/netns/default")], check=False)  # dockerd forgets it
    shutil.rmtree(home, ignore_errors=True)


def docker(*args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the docker command."""
    return subprocess.run(["docker", *args], input=stdin, capture_output=True, check=False)


@pytest.fixture(scope="session")
def image(daemon: None, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return an image of this machine's nginx and the libraries that it loads."""
    binary = shutil.which("nginx", path=PATHS)
    assert binary
    listed = subprocess.run(["ldd", binary], capture_output=True, text=True, check=True).stdout
    libraries = {arg for arg in listed.split() if arg.startswith("/")}
    archive = tmp_path_factory.mktemp("image") / "image.tar"
    with tarfile.open(archive, "w", dereference=True) as tar:
        tar.add(binary, "usr/sbin/nginx")
        for library in sorted(libraries):
            tar.add(library, library.lstrip("/"))
    name = f"rackrun-test-nginx:{hashlib.sha256(archive.read_bytes()).hexdigest()[:12]}"
    made = docker("import", str(archive), name)
    assert made.returncode == 0, made.stderr
    return name


LISTED = (
    *(f"cats-train-00000{number}.tar" for number in (0, 1, 2, 5, 8, 9)),
    *("9cats-train-000006.tar", "other.program_0.tar", f"{'long' * 50}.tar"),
)


def manifest_of(shards: Sequence[str], index: str) -> str:
    """Return as much of a manifest as a server reads."""
    return json.dumps({"splits": [{"shards": [{"name": name} for name in shards], "index": index}]})


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder that passes for shards, and files beside them that may not be served.

    Not under pytest's own folder, which is closed to the user that a root's nginx runs as.
    """
    top = Path(tempfile.mkdtemp(prefix="rackrun-test-"))
    path = top / "a folder, with 'quotes\""
    path.mkdir()
    (path / "dataset.json").write_text(manifest_of(LISTED, "cats-train.index.npy"))
    (path / "cats-train-000000.tar").write_bytes(bytes(range(256)) * 4096)
    (path / "cats-train-000001.tar").symlink_to("/etc/passwd")
    (path / "cats-train-000002.tar").mkdir()
    (path / ".cats-train-000003.tar.partial").write_bytes(b"not yet")
    (path / "cats-train.index.npy").write_bytes(b"\x93NUMPY")
    (path / "9cats-train-000006.tar").write_bytes(bytes(512))
    (path / "other.program_0.tar").write_bytes(bytes(512))
    (path / "cats-train-000004.tar").write_bytes(b"in no manifest")
    (path / "Cats-train-000000.tar").write_bytes(b"in no manifest")
    (path / "cats-train-000008.tar").touch(mode=0o000)
    (path / "dataset.v1.json").write_text("{}")
    (path / "report.json").write_text("{}")
    (path / "notes.txt").write_text("nobody's business")
    (top / "secret-train-000000.tar").write_text("outside the folder")
    for path_ in (top, path):
        path_.chmod(0o755)
    yield path
    shutil.rmtree(top)
