"""The files that a launcher keeps of a run, where the disk or a colleague does not cooperate."""

import fcntl
from pathlib import Path

from rackrun.launcher.output.event_log import EventLog
from rackrun.launcher.output.log_files import LogFiles
from rackrun.launcher.run.plan import HostPlan, Plan
from rackrun.run_folder import RunFolder


def test_the_events_of_a_run_that_goes_on_are_locked_as_nfs_does_it(tmp_path):
    """NFS makes a lock on a range of it: alone only through a file that is open for writing."""
    events = RunFolder(tmp_path).events
    log = EventLog(events)
    opened = Path("/proc/self/fd").iterdir()
    file = next(int(file.name) for file in opened if file.resolve() == events.resolve())
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.close()


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
