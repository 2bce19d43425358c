"""The training code on the torch of requirements/cuda12.txt, the oldest that rackrun supports."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BASE = sys._base_executable
HOURS = 3600


@pytest.mark.long  # 3 GB from the index, and the tests of this folder once more
@pytest.mark.timeout(4 * HOURS)
def test_all_holds_on_the_torch_for_old_gpus(tmp_path):
    """It has code for V100, and every test of training passes in an environment made from its lock;
    what only tests need is that of this environment."""
    uv, python = Path(sys.executable).with_name("uv"), tmp_path / "old" / "bin" / "python"
    lock = ROOT / "requirements" / "cuda12.txt"
    exact = ("--no-deps", "--require-hashes", "--only-binary", ":all:", "--requirement", lock)
    subprocess.run([uv, "venv", "--quiet", "--python", BASE, tmp_path / "old"], check=True)
    subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *exact], check=True)
    (folders,) = (tmp_path / "old").glob("lib/python3*/site-packages")
    ours = sysconfig.get_path("purelib")
    (folders / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    archs = "import torch; print(torch.__version__, torch._C._cuda_getArchFlags())"
    text = subprocess.run([python, "-c", archs], capture_output=True, text=True, check=True).stdout
    assert text.startswith("2.10.") and "sm_70" in text
    folder = ("-p", "no:cacheprovider", "--basetemp", tmp_path / "tests")
    environment = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [python, "-m", "pytest", "tests/training", "tests/unit", "-q", "-m", "not long", *folder],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
