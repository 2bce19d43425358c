"""`rackrun report RUN [RUN ...]`: draw the page of a run, or one that compares runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.run_folder import RunFolder
from rackrun.runs import is_supervised, run_folder

COMPARISON = "compare.html"
WATCH_SECONDS = 5


@dataclass(frozen=True)
class ReportOptions:
    """Write report.html of a run, or a page that compares several runs."""

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest", "write the page of the newest run again"),
        ("{prog} --watch latest", "update it until the run ends"),
        ("{prog} catdog-a catdog-b", "compare runs: compare.html"),
    )

    runs: Positional[tuple[Path, ...]]
    """Runs: ID, start of an ID, name, folder, or latest."""

    out: Path | None = None
    """File to write (default: report.html in the run folder; for several runs, compare.html)."""
    watch: bool = False
    """Write the page again every 5 seconds until the run ends."""


def main(args: list[str]) -> None:
    """Write the page and print its path."""
    from rackrun.run_report.page import write, write_comparison  # which import for a while

    options = parse(ReportOptions, called("report"), args)
    if not options.runs:
        raise UsageError(f"report: which run? type: {called('report')} RUN [RUN ...]")
    folders = list(map(run_folder, options.runs))
    if options.watch:
        if len(folders) > 1:
            raise UsageError(f"--watch is for one run; type: {called('report')} --watch RUN")
        watch(folders[0], options.out)
    elif len(folders) == 1:
        print(write(folders[0], options.out))
    else:
        print(write_comparison(folders, options.out or Path(COMPARISON)))


def watch(folder: Path, out: Path | None) -> None:
    """Draw the page of a run until the run has ended."""
    from rackrun.run_report.page import write

    print(write(folder, out, WATCH_SECONDS), flush=True)
    files = RunFolder(folder)
    while not files.result.exists() and is_supervised(files):
        time.sleep(WATCH_SECONDS)
        write(folder, out, WATCH_SECONDS)
    write(folder, out)


if __name__ == "__main__":
    run(main)
