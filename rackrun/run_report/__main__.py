"""`rackrun report RUN [RUN ...]`: draw the page of a run, or one that compares runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from rackrun.commandline.options import Examples, Positional
from rackrun.commandline.parser import parse
from rackrun.commandline.program import run
from rackrun.commands import called
from rackrun.errors import UsageError
from rackrun.runs import run_folder

COMPARISON = "compare.html"


@dataclass(frozen=True)
class ReportOptions:
    """Draw report.html into a run's folder; of several runs, a page that compares them."""

    examples: ClassVar[Examples] = (
        ("{prog} runs/latest", "draw the page of the newest run again"),
        ("{prog} catdog-a catdog-b", "compare runs: compare.html"),
    )

    runs: Positional[tuple[Path, ...]]
    """Runs: ID, start of an ID, name, folder, or latest."""

    out: Path | None = None
    """File to write (default: report.html in the run folder; for several runs, compare.html)."""


def main(args: list[str]) -> None:
    """Write the page and print its path."""
    from rackrun.run_report.page import (  # what they need takes a while to import
        write,
        write_comparison,
    )

    options = parse(ReportOptions, called("report"), args)
    if not options.runs:
        raise UsageError(f"report of which run? type: {called('report')} RUN [RUN ...]")
    folders = list(map(run_folder, options.runs))
    if len(folders) == 1:
        print(write(folders[0], options.out))
    else:
        print(write_comparison(folders, options.out or Path(COMPARISON)))


if __name__ == "__main__":
    run(main)
