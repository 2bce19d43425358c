"""The files that a launcher keeps of a run, where the disk or a colleague does not cooperate."""

import fcntl
from pathlib import Path

from rackrun.launcher.output.event_log import EventLog
from rackrun.run_folder import RunFolder


def test_the_events_of_a_run_that_goes_on_are_locked_as_nfs_does_it(tmp_path):
    """NFS makes a lock on a range of it: alone only through a file that is open for writing."""
    events = RunFolder(tmp_path).events
    log = EventLog(events)
    opened = Path("/proc/self/fd").iterdir()
    file = next(int(file.name) for file in opened if file.resolve() == events.resolve())
    fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    log.close()
