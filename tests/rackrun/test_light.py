"""A light installation, without the extra `train`: a head node or a laptop that only launches."""

import json
import os
import sys
import tomllib
from pathlib import Path

import pytest

from rackrun import errors
from rackrun.catdog.drawing import jpeg
from rackrun.errors import install_command
from tests.lab import warm

ROOT = Path(__file__).parents[2]
EXTRA = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
HIDDEN = [need.partition(">=")[0] for need in EXTRA["train"]]
LIGHT = f"""
import sys
from importlib.machinery import PathFinder

class Light(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in {HIDDEN}:
            return super().find_spec(name, path, target)

sys.meta_path[:] = [Light if finder is PathFinder else finder for finder in sys.meta_path]
"""
COMMAND = f"""
import light, sys
assert not sys.modules.keys() & set({HIDDEN})
from rackrun.__main__ import command
command(sys.argv[1:])
"""
MISSING = f"error: torch is not installed; type: {install_command('train')}\n"
WORKS = [
    "convert folder images shards",
    "convert verify shards",
    "convert summary shards",
    "check {hosts}",
    "ssh {hosts} -- true",
    "ssh --dry-run {hosts} catdog --data shards",
    "local --help",
    "local catdog --help",
    "ps",
    "report runs/latest",
]
NEEDS_IT = [
    "local",
    "local -- true",
    "local catdog --data shards",
    "evaluate model.pt shards",
    "predict model.pt images/cat/0.jpg",
    "export model.pt model.onnx",
]


def test_what_needs_no_torch_works_and_the_rest_names_the_extra(lab):
    """With every package of the extra hidden, also from the processes that a command starts."""
    for name in ("light", "sitecustomize"):  # the latter for interpreters that are started
        (lab.folder / f"{name}.py").write_text(LIGHT)
    for kind in ("cat", "dog"):
        (lab.folder / "images" / kind).mkdir(parents=True)
        for n in range(4):
            (lab.folder / "images" / kind / f"{n}.jpg").write_bytes(jpeg(kind, 0, n))
    (lab.folder / "model.pt").touch()  # one that is not there is refused before torch is needed
    hosts = lab.ready(1).write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}")
    where = f"--ssh-config {lab.config} {hosts}"
    for line in (*WORKS, *NEEDS_IT):
        done = warm.run(
            *("-c", COMMAND, *line.format(hosts=where).split()),
            start=warm.Launcher,
            cwd=lab.folder,
            env={**os.environ, "PYTHONPATH": f"{lab.folder}:{ROOT}", "HOME": str(lab.home)},
        )
        if line in WORKS:
            assert done.returncode == 0, f"{line}: {done.stdout}{done.stderr}"
        else:
            assert (done.returncode, done.stderr) == (78, MISSING), f"{line}: {done.stdout}"


@pytest.mark.parametrize(
    "made_by, checkout, typed",
    [
        ("uv-receipt.toml", "", "uv tool install 'rackrun[train,wandb]'"),
        ("pipx_metadata.json", "", "pipx install --force 'rackrun[train,wandb]'"),
        ("bin/pip", "", "pip install 'rackrun[wandb]'"),
        ("", "", "{python} -m pip install 'rackrun[wandb]'"),
        ("", "pyproject.toml", "{python} -m pip install --editable '{root}[wandb]'"),
        ("no pip", "", "uv pip install --python {python} 'rackrun[wandb]'"),
    ],
)
def test_an_extra_is_installed_as_rackrun_was(made_by, checkout, typed, tmp_path, monkeypatch):
    """By uv or pipx as a tool, which keeps only what is named; by the pip of this environment, or
    into a clone's; from the wheel that was installed, as no index may have it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    (tmp_path / "rackrun").mkdir()
    for name in filter(None, (made_by, checkout)):
        (tmp_path / name).touch(0o755)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(errors, "__file__", str(tmp_path / "rackrun" / "errors.py"))
    monkeypatch.setenv("PATH", f"{python.parent}:/usr/bin:/bin")
    if made_by == "no pip":
        monkeypatch.setattr(errors, "find_spec", lambda name: None)
    assert errors.install_command("wandb") == typed.format(python=python, root=tmp_path)
    if checkout:
        return
    installed = tmp_path / "rackrun-0.1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Name: rackrun\nVersion: 0.1.0\n")
    wheel = "file:///home/me/rackrun-0.1.0-py3-none-any.whl"
    (installed / "direct_url.json").write_text(json.dumps({"url": wheel, "archive_info": {}}))
    typed = f"{typed[:-1]} @ {wheel}'"
    assert errors.install_command("wandb") == typed.format(python=python)
