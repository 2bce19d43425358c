"""A pytest plugin: run the tests that reach each mutant, in forks of the process that collected.

    pytest -p tests.mutation.walk --mutants FOLDER TESTS      in a copy with mutated modules

First all tests run once without a mutant, and note which functions they call, in whatever process.
Then the tests that reach a mutant run with it, quick ones first, until one fails.
"""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import Phase, settings

from tests.mutation.mutate import Mutant
from tests.mutation.switch import REACHED, UNDER_TEST
from tests.workers import become_worker, is_shared

SLOWEST = 40.0
"""Seconds after which a test is not used for mutants."""


@dataclass
class Test:
    """What a test took without a mutant, and the functions it called."""

    seconds: float
    functions: list[str]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options of a walk."""
    parser.addoption("--mutants", type=Path, help="folder with mutants.json")
    parser.addoption("--seconds", type=float, default=60.0, help="of tests for each mutant")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Spare hypothesis the search for the shortest example."""
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", settings.get_profile("short"), phases=phases)
    settings.load_profile("mutants")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Walk the mutants of the folder, and append to outcomes.jsonl what became of each."""
    folder = session.config.getoption("mutants")
    if not folder or session.testsfailed:
        return None
    session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    mutants = [Mutant(**each) for each in json.loads((folder / "mutants.json").read_text())]
    tests = reached(session, folder)
    outcomes = folder / "outcomes.jsonl"
    walked = outcomes.read_text().splitlines() if outcomes.exists() else []
    known = {json.loads(line)["mutant"] for line in walked}
    for number, mutant in enumerate(mutants, 1):
        if str(mutant) in known:
            continue
        outcome = outcome_of(session, mutant, tests)
        with outcomes.open("a") as file:
            file.write(json.dumps({"mutant": str(mutant), "outcome": outcome}) + "\n")
        sys.stderr.write(f"{number}/{len(mutants)} {mutant}: {outcome}\n")
    return True


def reached(session: pytest.Session, folder: Path) -> dict[str, Test]:
    """Run all tests without a mutant; return those that pass, with the functions they call."""
    cache = folder / "tests.json"
    known = json.loads(cache.read_text()) if cache.exists() else {}
    files: dict[Path, list[pytest.Item]] = {}
    for item in session.items:
        if item.nodeid not in known:
            files.setdefault(item.path, []).append(item)
    for path, items in files.items():
        left = items
        while left:
            left = _measure(session, left, folder, known)
        if is_shared(path):  # a fixture runs what it needs in the first test
            shared = known.get(items[0].nodeid) or {"functions": []}
            for item in items[1:]:
                if test := known[item.nodeid]:
                    test["functions"] = sorted({*test["functions"], *shared["functions"]})
        cache.write_text(json.dumps(known))
    selected = {item.nodeid for item in session.items}
    return {name: Test(**test) for name, test in known.items() if test and name in selected}


def _measure(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    folder: Path,
    known: dict[str, dict[str, object] | None],
) -> list[pytest.Item]:
    """Run tests of a file in one fork; return those that are left when one takes too long."""
    notes = folder / "reached"
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    running = 0
    seconds, passed = 0.0, True
    for report in forked(session, items, {}, SLOWEST, notes):
        seconds += report.duration
        passed = passed and report.outcome == "passed"
        if report.when == "teardown":
            note = notes / str(running)
            functions = sorted(set(note.read_text().splitlines())) if note.exists() else []
            name = items[running].nodeid
            known[name] = {"seconds": seconds, "functions": functions} if passed else None
            sys.stderr.write(f"{name}: {seconds:.1f} s{'' if passed else ', not used'}\n")
            seconds, passed = 0.0, True
            running += 1
    if running < len(items):
        known[items[running].nodeid] = None
        sys.stderr.write(f"{items[running].nodeid}: not used\n")
    return list(items[running + 1 :])


def outcome_of(session: pytest.Session, mutant: Mutant, tests: dict[str, Test]) -> str:
    """Return which test failed on a mutant, or how it survived."""
    function = mutant.name.partition("__mutmut")[0]
    module = mutant.path.removesuffix(".py").replace("/", ".")
    able = [item for item in session.items if function in _functions(tests, item)]
    imports = {item.path: module in item.path.read_text() for item in able}
    able.sort(key=lambda item: (not imports[item.path], tests[item.nodeid].seconds))
    budget = session.config.getoption("seconds")
    chosen: list[pytest.Item] = []
    planned = 0.0
    for item in able:
        planned += tests[item.nodeid].seconds
        if not chosen or planned < budget:
            chosen.append(item)
    if not chosen:
        return "not reached"
    limit = 30.0 + 5 * max(tests[item.nodeid].seconds for item in chosen)
    finished = 0
    for report in forked(session, chosen, {UNDER_TEST: mutant.name}, limit):
        if report.outcome == "failed":
            return f"caught by {report.nodeid}"
        finished += report.when == "teardown"
    if finished < len(chosen):
        return f"caught by the time limit in {chosen[finished].nodeid}"
    return f"survived {len(chosen)} of {len(able)} tests"


def _functions(tests: dict[str, Test], item: pytest.Item) -> list[str]:
    test = tests.get(item.nodeid)
    return test.functions if test else []


def forked(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    environment: dict[str, str],
    limit: float,
    notes: Path | None = None,
) -> Iterator[pytest.TestReport]:
    """Run tests in a fork and yield their reports, until none has come for `limit` seconds."""
    connection, other = Pipe()
    pid = os.fork()
    if not pid:
        connection.close()
        os.environ.update(environment)
        _work(session, items, other, notes)
    other.close()
    try:
        while connection.poll(limit):
            data = connection.recv()
            config = session.config
            yield config.hook.pytest_report_from_serializable(config=config, data=data)
    except EOFError:
        pass
    finally:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        connection.close()


def _work(
    session: pytest.Session,
    items: Sequence[pytest.Item],
    connection: Connection,
    notes: Path | None,
) -> NoReturn:
    os.setsid()
    with Path(os.devnull).open("r+b") as nothing:
        for number in range(3):
            os.dup2(nothing.fileno(), number)
    try:
        become_worker(session.config, time.monotonic_ns(), connection)
        for number, (item, following) in enumerate(zip(items, [*items[1:], None], strict=True)):
            if notes:
                os.environ[REACHED] = str(notes / str(number))
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        shutil.rmtree(session.config._tmp_path_factory._basetemp)
    finally:
        os._exit(0)
