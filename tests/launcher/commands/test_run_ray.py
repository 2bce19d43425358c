"""`./run-ray` on a real Ray cluster of two nodes, which are this machine twice."""

import json
import os
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab import warm
from tests.lab.clusters import ray_cluster
from tests.lab.hosts import processes_with
from tests.lab.waiting import until
from tests.lab.warm import ROOT


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Yield the address of a Ray head with one more node."""
    with ray_cluster() as address:
        yield address


def start(address: str, folder: Path, *args: str, canary: str = "") -> subprocess.Popen[str]:
    """Start `./run-ray` as a user does, on hosts that are one machine."""
    options = ["--ignore-check", "machine", "--python", warm.interpreter()]
    return warm.Launcher(
        *("-m", "rackrun", "./run-ray", "--address", address, *options, *args),
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RUN_CANARY": canary},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def result(folder: Path) -> Any:
    (path,) = folder.glob("runs/2*/result.json")
    return json.loads(path.read_text())


def test_two_nodes_train_two_ranks(address, tmp_path, monkeypatch):
    """One rank a node, the same folder, logs and result as by any other way: in the notebook."""
    drawn = ("-m", "rackrun.catdog", "demo", "data/demo", "--images", "60")
    ours = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert warm.run(*drawn, start=warm.Launcher, cwd=tmp_path, env=ours).returncode == 0
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").symlink_to(warm.interpreter())
    import nbclient
    import nbformat

    notebook = nbformat.read(ROOT / "notebooks" / "ray-demo.ipynb", 4)
    variables = {"RAY_ADDRESS": address, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=resources).execute()
    written = json.dumps(notebook)
    assert "done {0: 0, 1: 0}" in written and "image/png" in written
    ended = result(tmp_path)
    assert ended["codes"] == {"0": 0, "1": 0}
    assert list(ended["hosts"].values()) == ["clean", "clean"]
    assert next(tmp_path.glob("runs/2*/final.pt"))
    assert len(list(tmp_path.glob("runs/2*/logs/*/*/rank-*.out"))) >= 1


def test_a_launcher_that_is_killed_leaves_nothing_on_the_nodes(address, tmp_path):
    """Ray ends its actors, and the agents end what they started."""
    canary = str(uuid.uuid4())
    args = ["--env", "RUN_CANARY", "--", "python", "-c", "import time; time.sleep(1000)"]
    run = start(address, tmp_path, *args, canary=canary)

    def ranks() -> list[str]:
        lines = processes_with(f"RUN_CANARY={canary}").values()
        return [line for line in lines if "sleep(1000)" in line and "run-ray" not in line]

    until(lambda: len(ranks()) == 2)
    run.kill()
    run.communicate()
    until(lambda: not ranks())


def test_a_cluster_of_another_version_is_named_with_what_to_install(address, tmp_path):
    """78, both versions, and the command; nothing of Ray's own traceback."""
    ours = {**os.environ, "PYTHONPATH": str(ROOT)}
    args = ("-c", OTHER_RAY, "--address", address, "--", "true")
    output = warm.run(*args, start=warm.Launcher, cwd=tmp_path, env=ours)
    assert output.returncode == 78, output.stderr
    assert re.fullmatch(
        r"error: the cluster runs Ray 2\.\S+ with Python \S+, and here is Ray 2\.1\.0 with Python"
        r" \S+; type, with that Python: python -m pip install 'ray==2\.\S+'\n",
        output.stderr,
    )


OTHER_RAY = """
import sys
import ray
import rackrun.__main__
ray.__version__ = "2.1.0"
rackrun.__main__.command(["ray", *sys.argv[1:]])
"""


def test_without_a_cluster_there_is_a_command_to_type(tmp_path):
    """69, and how a cluster is started; nothing of Ray's own long words."""
    run = start("127.0.0.1:9", tmp_path, "--", "true")
    _, err = run.communicate()
    assert run.returncode == 69, err
    assert "type: ray start --head" in err and "Traceback" not in err
