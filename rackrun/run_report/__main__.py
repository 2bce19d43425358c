"""`rackrun report RUN [RUN ...]`: draw the page of a run, or one that compares runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from rackrun.commandline import parse, run
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.run_report.called import run_called

ABOUT = "Draw report.html into a run's folder; of several runs, a page that compares them."
COMPARISON = "compare.html"


@dataclass(frozen=True)
class ReportOptions:
    """Options of `report`."""

    runs: Positional[tuple[Path, ...]]
    """Run folders such as runs/20260102-030405-catdog, run names, or beginnings of run IDs."""

    out: Path | None = None
    """File to write (default: report.html in the run folder; for several runs, compare.html)."""


def main(args: list[str]) -> None:
    """Write the page and print its path."""
    from rackrun.run_report.page import (  # what they need takes a while to import
        write,
        write_comparison,
    )

    options = parse(ReportOptions, called("report"), args, ABOUT)
    if not options.runs:
        raise UsageError(f"report of which run? type: {called('report')} RUN [RUN ...]")
    folders = list(map(run_called, options.runs))
    if len(folders) == 1:
        print(write(folders[0], options.out))
    else:
        print(write_comparison(folders, options.out or Path(COMPARISON)))


if __name__ == "__main__":
    run(main)
