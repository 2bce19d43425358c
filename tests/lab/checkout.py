"""A folder in which rackrun lies, as after `git clone`."""

import shutil
import subprocess
from pathlib import Path

from tests.lab.hosts import ROOT


def copy_rackrun(folder: Path, python: Path) -> None:
    """Make a working tree of rackrun, from where --sync copies it; its environment is a Python."""
    linked = [path.name for path in (ROOT / "rackrun").iterdir() if path.is_symlink()]
    for package in ("rackrun", *linked):
        shutil.copytree(ROOT / package, folder / package, symlinks=True, dirs_exist_ok=True)
    made = f"mkdir -p .venv/bin; ln -sf {python} .venv/bin/python"
    (folder / "launcher" / "venv.sh").write_text(f"venv_python() {{ {made}; }}\n")
    with (folder / ".gitignore").open("a") as ignored:
        ignored.write("__pycache__/\n.venv\nruns/\n")
    subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
    subprocess.run(["git", "-C", folder, "add", "."], check=True)
