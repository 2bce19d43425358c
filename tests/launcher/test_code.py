"""The code that a launch compares and brings: what is odd about it is said, and no file is kept."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from launcher.code import oddities
from tests.launcher.lab import ROOT, Lab

Labs = Callable[[int], Lab]


def test_code_that_cannot_be_read_is_named(lab: Labs) -> None:
    """A file that is not ours to read, and a repository within ours, are told before any copy."""
    one = lab(1)
    source = one.folder / "project"
    subprocess.run(["git", "init", "-q", source, "-b", "main"], check=True)
    subprocess.run(["git", "-C", source, "init", "-q", "nested"], check=True)
    commit = ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(["git", "-C", source / "nested", *commit], check=True)
    (source / "secret").touch(mode=0)
    hosts = str(one.write_hosts(f"python={one.cheap_python()} workdir={one.folder}/there"))
    mortal = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") * (os.geteuid() == 0)
    code, _, err = one.said("--sync", hosts, "--", "true", cwd=source, before=mortal)
    assert code == 64
    assert "secret: Permission denied; what the ranks do not need belongs into .gitignore" in err
    assert "warning: nested/ is a git repository of its own" in err
    assert not (one.folder / "there").exists()


def test_much_code_is_named_before_it_is_read(tmp_path: Path) -> None:
    """A data set that nobody ignores takes minutes; the biggest file is said, and what to do."""
    for name, size in (("small.py", 10), ("data.tar", 3 * 10**9), ("other.tar", 10**9)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    (remark,) = oddities(tmp_path, ["small.py", "data.tar", "other.tar", "gone"])
    assert remark.startswith("4.0 GB of code are compared, of which data.tar is 3.0 GB")
    assert remark.endswith("put it into .gitignore")
    assert oddities(tmp_path, ["small.py"]) == []


def test_a_big_file_is_read_in_pieces(tmp_path: Path) -> None:
    """Launcher, probe and porter say the same of its content, and none keeps it in memory."""
    with (tmp_path / "big").open("wb") as file:
        file.write(b"code")
        file.truncate(200 << 20)
    program = (
        "import os, sys; from launcher import porter, probe\n"
        "from tests.launcher.drive import peak_mib\n"
        "print(porter.digest_of(sys.argv[1]), probe.file_digest(sys.argv[1]))\n"
        "print(peak_mib(os.getpid()))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "big")]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours, theirs, peak = told.split()
    with (tmp_path / "big").open("rb") as file:
        assert ours == theirs == hashlib.file_digest(file, "sha256").hexdigest()
    assert float(peak) < 150
