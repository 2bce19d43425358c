"""The image of a training host, built here and now, on a base of Debian's packages."""

import json
import platform
import subprocess
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.servers import docker

pytestmark = pytest.mark.long  # its base is a Debian made here: minutes
ROOT = Path(__file__).parents[1]
PACKAGES = "python3,python3-venv"
NO_MANUALS = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale")]


@pytest.fixture(scope="module")
def image(daemon: None) -> Iterator[str]:
    """Yield an image without PyTorch's gigabytes: this machine's libraries are mounted into it."""
    suite = platform.freedesktop_os_release()["VERSION_CODENAME"]
    packages = ["mmdebstrap", "--quiet", "--variant=apt", f"--include={PACKAGES}", *NO_MANUALS]
    with subprocess.Popen([*packages, suite, "-"], stdout=subprocess.PIPE) as making:
        base = subprocess.run(
            ["docker", "import", "-", "rackrun-test-base"], stdin=making.stdout, check=True
        )
    assert making.returncode == 0 == base.returncode
    given = {"BASE": "rackrun-test-base", "PACKAGES": "", "LOCK": "/dev/null"}
    args = [arg for name, value in given.items() for arg in ("--build-arg", f"{name}={value}")]
    built = docker("build", "--network", "host", *args, "--tag", "rackrun-test-image", str(ROOT))
    assert built.returncode == 0, built.stderr.decode() + built.stdout.decode()
    yield "rackrun-test-image"
    docker("rmi", "--force", "rackrun-test-image", "rackrun-test-base")


def in_container(image: str, *args: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command in a container that may only write to /tmp."""
    given = {"PYTHONPATH": "/opt/rackrun:/lent", **variables}
    return docker(
        *("run", "--rm", "--network", "host", "--read-only", "--tmpfs", "/tmp"),
        *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--volume", f"{sysconfig.get_path('purelib')}:/lent:ro"),
        *(arg for name, value in given.items() for arg in ("--env", f"{name}={value}")),
        *(image, *args),
    )


def test_the_image_does_not_run_as_root(image):
    """Not as root, and nothing of the project is its user's to change."""
    output = in_container(image, "sh", "-c", "id -u; touch /opt/rackrun/x 2>/dev/null || echo no")
    assert output.stdout.split() == [b"1000", b"no"], output.stderr


def test_a_container_finds_its_place_in_a_job(image):
    """The image's own command line, with the variables of a platform."""
    output = in_container(
        *(image, "python", "-m", "rackrun", "node", "--dry-run", "--json"),
        *("--ignore-check", "workdir", "catdog"),  # in a container that is only read
        PET_NNODES="2",
        PET_NODE_RANK="1",
        PET_MASTER_ADDR="catdog-node-0-0.catdog",
        PET_NPROC_PER_NODE="8",
    )
    assert output.returncode == 0, output.stderr
    plan = json.loads(output.stdout)["plan"]
    assert plan["world_size"] == 16
    assert plan["hosts"][0]["torchrun"][0] == "/opt/venv/bin/python"


def test_two_containers_train_together(image):
    """Each with its own processes; the libraries are lent by this machine's Python."""
    task = ["--image-size", "32", "--width", "4", "--batch-size", "8", "--device", "cpu"]
    script = (
        "python -m rackrun.catdog demo /tmp/drawn --images 60 >&2"
        " && exec python -m rackrun node"
        f" --runs /tmp/runs catdog --data /tmp/drawn/shards --epochs 1 {' '.join(task)}"
    )
    args = ["docker", "run", "--rm", "--network", "host", "--shm-size", "256m"]
    args += ["--volume", f"{sysconfig.get_path('purelib')}:/lent:ro"]
    nodes = []
    for node in range(2):
        given = {"MASTER_ADDR": "127.0.0.1", "NNODES": "2", "NODE_RANK": str(node)}
        given |= {"PYTHONPATH": "/opt/rackrun:/lent", "MASTER_PORT": "29617"}
        variables = [arg for name, value in given.items() for arg in ("-e", f"{name}={value}")]
        nodes.append(
            subprocess.Popen(
                [*args, *variables, image, "sh", "-c", script],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    outputs = [node.communicate() for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], outputs
    assert b"accuracy" in outputs[0][0] + outputs[0][1]
