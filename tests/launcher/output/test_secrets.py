"""What `--secret` hides, in a run of real torchrun that fails."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import warm
from tests.lab.hosts import SHORT
from tests.lab.waiting import until

SECRET = f"canary-{os.getpid()}-in-the-coal-mine"
FAIL = """\
import os, pathlib, sys, time
here = pathlib.Path(sys.argv[1])
assert len(os.environ['TOKEN']) == int(sys.argv[2])
(here / f"met-{os.environ['RANK']}").touch()
while not (here / 'go').exists():
    time.sleep(0.05)
if os.environ['RANK'] == '1':
    raise ValueError('out of the mine')
time.sleep(999)
"""


@pytest.mark.security("SSH-6")
def test_a_secret_is_in_nothing_that_a_failing_run_leaves(start_lab):
    """SSH-6: no command line of the machine and no file shows it, meanwhile and afterwards."""
    lab = start_lab(2)
    hosts = str(lab.write_hosts(f"python={warm.interpreter()}"))
    script = lab.folder / "fail.py"
    script.write_text(FAIL)
    remote = (str(script), str(lab.folder), str(len(SECRET)))
    args = (*SHORT, "--secret", "TOKEN", hosts, "--", sys.executable, *remote)
    process = lab.run_ssh(*args, env={"TOKEN": SECRET})
    met = [lab.folder / "met-0", lab.folder / "met-1"]
    try:
        until(lambda: all(path.exists() for path in met), "both ranks run", 60)
        plan = json.loads((lab.run_folder() / "plan.json").read_text())
        scratch_folders = [Path(host["scratch"]) for host in plan["hosts"]]
        assert all((folder / "command.json").exists() for folder in scratch_folders)
        of_torchrun = {folder for pid in lab.of_the_run() for folder in temporary_of(pid)}
        assert of_torchrun
        positions = {lab.folder, *scratch_folders, *of_torchrun}
        assert not showing(positions)
        assert not [line for line in command_lines() if SECRET.encode() in line]
    finally:
        (lab.folder / "go").touch()
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "ValueError: out of the mine" in err
    code, plan, _ = lab.result_of("--dry-run", "--json", *args, env={"TOKEN": SECRET})
    assert code == 0
    assert SECRET not in out + err + plan
    assert not showing(positions)


def temporary_of(pid: int) -> Iterator[Path]:
    """Yield the folder for error files that torchrun names to a rank."""
    with contextlib.suppress(OSError):
        for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, value = pair.decode(errors="replace").partition("=")
            if name == "TORCHELASTIC_ERROR_FILE":
                yield Path(value).parents[3]


def showing(folders: set[Path]) -> list[Path]:
    """Return the files below these folders that hold the secret."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


def command_lines() -> Iterator[bytes]:
    """Yield the command line of every process on this machine, which is that of every host."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield (entry / "cmdline").read_bytes()
