"""Detached runs on disks that are full, and on homes whose server is down."""

import re
import subprocess
import sys

import pytest

from tests.lab.detached import WAIT, DetachedLab
from tests.lab.waiting import until
from tests.launcher.conftest import TMPFS

FAILS = """\
import pathlib, time
while not pathlib.Path("go").exists():
    time.sleep(0.05)
raise RuntimeError("x" * 8000)
"""


def test_a_home_that_is_full_at_the_end_does_not_change_how_a_run_ended(start_lab, mounted):
    """Not a byte is left for the record: the exit code is the run's all the same."""
    lab = start_lab(1)
    home = lab.hosts[0].folder / ".rackrun"
    home.mkdir()
    mounted(home, *TMPFS, "size=16m")
    detached = DetachedLab(lab)
    detached.detach(detached.hosts, "--", sys.executable, "-c", FAILS)
    detached.wait_for_ranks(1)
    with (home / "full").open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with pytest.raises(OSError, match="No space left"):
                while True:
                    file.write(bytes(size))
        (detached.work / "go").touch()
        detached.wait_until_clean(60)
    assert detached.status()["exit_code"] == 1
    code, _, err = detached.result_of("attach")
    assert (code, "failed: rank 0 on 127.0.0.2: " in err) == (1, True), err


def hang(detached: DetachedLab, *hosts: int) -> None:
    """Let everything that reads the home directory of these hosts hang from now on."""
    for number in hosts:
        (detached.lab.hosts[number].folder / ".bashrc").write_text("exec sleep 999\n")


def ended(*processes: "subprocess.Popen[str]") -> list[tuple[int, str]]:
    """Wait for all; return the exit code and messages of each."""
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(p.returncode, "".join(args)) for p, args in zip(processes, outputs, strict=True)]


SILENT = r"does not answer within \d+ s; is its home directory on a disk that is down\?"


def test_a_home_that_does_not_answer_delays_nothing(detached):
    """status, logs, attach and stop name the host after a while; when it is not the controller's,
    the run is ended as ever, and only that host is not verified."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    hang(detached, 0, 2)
    verbs = ("status", "logs", "attach", "stop")
    for verb, (code, args) in zip(verbs, ended(*map(detached.start, verbs)), strict=True):
        assert code == 69, (verb, args)
        assert re.search(SILENT, args), (verb, args)
        assert ("127.0.0.4  not reached" in args) == (verb == "status"), (verb, args)
        assert (f"./run-ssh stop --force {detached.run}" in args) == (verb == "stop"), (verb, args)
    (detached.lab.hosts[0].folder / ".bashrc").unlink()
    code, _, err = detached.result_of("stop")
    assert code == 75
    assert re.search(rf"127\.0\.0\.4: {SILENT}", err), err
    assert "2 of 3 hosts clean" in err
    until(lambda: not detached.controller(), "the controller has ended", 20)


@pytest.mark.long
def test_a_run_can_be_ended_without_the_host_of_its_controller(detached):
    """--force: what runs on the other hosts is ended from here; then the controller ends itself."""
    detached.detach(detached.hosts, "--", sys.executable, "-c", WAIT)
    detached.wait_for_ranks(3)
    hang(detached, 0)
    code, _, err = detached.result_of("stop", "--force")
    assert (code, "ending what runs on the others" in err) == (75, True), err
    assert "2 of 3 hosts clean" in err
    until(lambda: not detached.controller(), "the controller has ended", 60)
