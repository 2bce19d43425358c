"""Name the tests that fail beside others and pass alone: flakes, defects if only of the test.

A pytest plugin: `pytest -p tests.flakes`. What failed runs twice more, without the others. If it
passes both times, the last lines name and count it and the exit code is 0, unless there are more
than ten (a fixture that fails takes all its tests with it).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

AT_MOST = 10


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> Iterator[None]:
    """Run what failed again, after the summary and once all that tests shared has ended."""
    yield
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or session.exitstatus != pytest.ExitCode.TESTS_FAILED:
        return
    reporter = session.config.pluginmanager.getplugin("terminalreporter")
    failed, passed = tests(reporter, "failed", "error"), tests(reporter, "passed")
    reporter.write_line("twice more, without the others, what failed:")
    if not all(pass_alone(failed, session.config.rootpath) for _ in range(2)):
        return
    for test in failed:
        reporter.write_line(f"flaky, failed beside others and passed alone twice: {test}")
    passed += [test for test in failed if test not in passed]
    reporter.write_line(f"{len(passed)} passed, 0 failed, {len(failed)} flaky (at most {AT_MOST})")
    if len(failed) <= AT_MOST:
        session.exitstatus = pytest.ExitCode.OK


def tests(reporter: Any, *outcomes: str) -> list[str]:
    """Return the ids of the tests that ended so, each once, without the group that xdist adds."""
    reports = [report for outcome in outcomes for report in reporter.stats.get(outcome, ())]
    return list(dict.fromkeys(re.sub(r"@[\w./-]+$", "", report.nodeid) for report in reports))


def pass_alone(tests: list[str], root: Path) -> bool:
    """Return whether the tests pass in one process that runs nothing else."""
    again = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests]
    return subprocess.run(again, cwd=root, check=False).returncode == 0
