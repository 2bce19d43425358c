"""What is made of a run's files when it has ended: report.html, and its use of hosts as curves."""

from __future__ import annotations

from pathlib import Path

from rackrun.run_folder import RunFolder
from rackrun.terminal import one_line


def write_run_page(folder: Path, task: str) -> str:
    """Draw report.html of a task, also of one that has failed before its first step.

    Return why that failed, else nothing. A command's own program that measures nothing has no page;
    `rackrun report RUN` draws one of its hosts.
    """
    if not (task or RunFolder(folder).metrics.exists()):
        return ""
    try:
        from rackrun.run_report.page import write
        from rackrun.run_report.tensorboard import write_usage
    except ImportError:  # the controller of a detached run: the page is drawn where one attaches
        return ""
    try:
        write(folder)
        write_usage(folder)
    except Exception as error:  # whatever it is, the run is over
        return f"no report.html: {one_line(str(error))[:300]}"
    return ""
