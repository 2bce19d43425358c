"""Say what was left out: a pytest plugin of ./run-tests, which prints these lines last."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

from tests.lab import needs


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Write what was left out into a file, which ./run-tests prints last."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", ())]
    wanting, unrun = (
        Counter(reason.rpartition(why)[2] for reason in reasons if why in reason)
        for why in (needs.LACKING, needs.UNRUN)
    )
    lines = [
        f"run-tests: unrun: {count} {'tests' if count > 1 else 'test'} of a GPU ({why})\n"
        for why, count in unrun.items()
    ]
    if wanting:
        named = ", ".join(f"{what} ({count})" for what, count in wanting.most_common())
        lines += [f"run-tests: left out: tests that need {named}; type: sudo ./run-tests\n"]
    if lines and "RUN_TESTS_LEFT_OUT" in os.environ:
        Path(os.environ["RUN_TESTS_LEFT_OUT"]).write_text("".join(lines))
