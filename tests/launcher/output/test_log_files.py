"""The files that a launcher keeps of a run, where the disk or a colleague does not cooperate."""

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.launcher.output.event_log import EventLog
from rackrun.launcher.output.log_files import LogFiles, unfinished_run_notice
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.run_folder import RunFolder
from tests.lab.needs import need
from tests.lab.warm import ROOT

BEGIN = """
import sys
from pathlib import Path
from rackrun.run_folder import RunFolder
from rackrun.launcher.output.log_files import LogFiles, unfinished_run_notice
from rackrun.launcher.output.event_log import EventLog
from rackrun.launcher.run.plan import Plan
runs = Path(sys.argv[1])
(runs / "first").mkdir()
LogFiles(RunFolder(runs / "first"), Plan("id", 0, ()))
record = EventLog(RunFolder(runs / "first").events)
print(unfinished_run_notice(runs, besides=runs / "second"))
"""

NOBODY = 65534


def begun(folder: Path) -> int:
    """Return the descriptor of the locked file of a run that goes on."""
    folder.mkdir()
    LogFiles(RunFolder(folder), Plan("id", 0, ()))
    events = RunFolder(folder).events
    EventLog(events)
    opened = Path("/proc/self/fd").iterdir()
    return next(int(file.name) for file in opened if file.resolve() == events.resolve())


def test_the_events_of_a_run_that_goes_on_are_locked_as_nfs_does_it(tmp_path):
    """NFS makes a lock on a range of it: alone only through a file that is open for writing."""
    file = begun(tmp_path / "run")
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert json.loads((tmp_path / "run" / "plan.json").read_text())["run_id"] == "id"
    assert unfinished_run_notice(tmp_path, besides=tmp_path / "next") == ""
    os.close(file)
    assert "its launcher was killed" in unfinished_run_notice(tmp_path, besides=tmp_path / "next")


@pytest.mark.parametrize("refusal", ["ENOLCK", "ENOSYS", "EOPNOTSUPP"])
def test_a_file_system_without_locks_costs_only_the_notice(tmp_path, refusal):
    """Every call of flock is refused, as on Lustre without its option: the run begins."""
    need("strace")
    refuse = ["strace", "-qqq", "-o", "/dev/null", "-e", f"inject=flock:error={refusal}"]
    command = [*refuse, sys.executable, "-c", BEGIN, str(tmp_path)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert (output.stdout, output.stderr) == ("\n", "")


def test_the_run_of_a_colleague_who_keeps_it_to_himself_is_left_alone(tmp_path, monkeypatch):
    """Runs of several users in one folder: what cannot be read is no unfinished run."""
    os.close(begun(tmp_path / "run"))
    (tmp_path / "run" / "events.jsonl").chmod(0o000)
    tmp_path.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    we = os.geteuid()
    os.seteuid(we or NOBODY)  # root reads everything
    try:
        assert unfinished_run_notice(Path(), besides=Path("next")) == ""
    finally:
        os.seteuid(we)


def test_a_log_that_cannot_be_read_is_empty(tmp_path):
    """Its disk may be gone by the end of the run, which is no reason to lose the exit code."""
    host = HostPlan(
        **{**dict.fromkeys(HostPlan.__dataclass_fields__, ()), "name": "node1", "node": 0}
    )
    journal = LogFiles(RunFolder(tmp_path), Plan("id", 1, (host,)))
    log = journal.log(0, 0, "err")
    assert journal.tail(0, 0, "err") == ""
    log.mkdir()
    assert journal.tail(0, 0, "err") == ""
