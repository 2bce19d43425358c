"""A disk without room for what the launcher writes: the run goes on, the next one is refused."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.launcher.output.console import NOTE
from tests.lab.needs import need


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 256 kB."""
    need("root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_disk_that_fills_up_ends_no_run_and_a_full_one_begins_none(start_lab, small):
    """The ranks' output fills the disk: the screen still has it, what is missing is said once, the
    run ends with 0. The next launch is refused with 74, and no rank was started."""
    lab = start_lab(1)
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()}"))
    args = ("--runs", str(small), hosts, "--", "sh", "-c")
    code, out, err = lab.result_of(*args, "touch started; seq 100000; echo done")
    assert code == 0, err
    # what the disk refuses goes straight to the terminal, whose reader may still be behind
    assert {"100000", "done"} <= set(out.splitlines())
    assert err.count("output is not logged any more: No space left on device") == 1
    (folder,) = small.glob("2*")
    missing = "result.json: cannot be written: No space left on device" in err
    assert missing != (folder / "result.json").exists()  # as the last free page would have it
    assert err.count(f"{NOTE}done in ") == 1
    (lab.folder / "started").unlink()
    code, _, err = lab.result_of(*args, "touch started")
    assert code == 74, err
    last = err.splitlines()[-1]
    assert "No space left on device" in last and last.endswith("or type: --runs FOLDER")
    assert "Traceback" not in err
    assert not (lab.folder / "started").exists()
