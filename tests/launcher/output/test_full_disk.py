"""A disk without room for what the launcher writes: the run goes on, the next one is refused."""

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rackrun.launcher.output.console import NOTE
from rackrun.launcher.run.events import Lost
from rackrun.launcher.supervision import agent_protocol
from rackrun.launcher.transport.local import LocalTransport
from rackrun.launcher.transport.rpc import RpcClient
from tests.lab.needs import need
from tests.launcher.conftest import LIMITS, agent_plan, heard


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Yield a disk of 256 kB."""
    need("root")
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "small", folder], check=True)
    yield folder
    subprocess.run(["umount", folder], check=True)


WITH_A_FULL_TMP = """
exec 3> {left}
mount -t tmpfs -o size=256k small /tmp && head -c 250k /dev/zero > /tmp/full || exit
"$@"
ls -A /tmp >&3
"""


def test_a_full_tmp_is_named(tmp_path):
    """The agent's own folder has no room: 78 names it, and nothing of it stays there."""
    need("root")
    plan = replace(agent_plan(tmp_path, "true"), workdir="/", folder="/")
    left = tmp_path / "left"
    inside = ("unshare", "-m", "sh", "-c", WITH_A_FULL_TMP.format(left=left), "sh")
    client = RpcClient(LocalTransport("here"))
    client.enter(inside, "python3")
    channel, _ = client.hand_over(agent_protocol.run_order(plan, LIMITS))
    (refused,) = [event for event in heard(channel, plan) if isinstance(event, Lost)]
    full = f"cannot prepare the run: {plan.scratch}: No space left on device"
    assert (refused.reason, refused.exit_code) == (full, 78)
    assert left.read_text() == "full\n"


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
