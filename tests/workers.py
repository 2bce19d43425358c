"""Run the tests on several processes, each forked from the one that has collected them.

A pytest plugin: `pytest --workers 5`. Collecting costs 30 s of a core, most of it imports, so it is
done once rather than by each worker, as pytest-xdist would.
"""

import atexit
import gc
import multiprocessing.util
import os
import traceback
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.runner import pytest_sessionfinish as tear_down_session

TOGETHER = ("tests/nginx/", "tests/slurm/")  # share a Docker daemon, and a cluster
Group = list[pytest.Item]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare --workers."""
    parser.addoption("--workers", type=int, default=0, help="processes that run tests; 0: this one")


def shared_with(nodeid: str, root: Path) -> str:
    """Return the folder or file whose tests have to stay on one worker, or the test alone."""
    for folder in TOGETHER:
        if nodeid.startswith(folder):
            return folder
    file = nodeid.partition("::")[0]
    return file if is_shared(root / file) else nodeid


@cache
def is_shared(path: Path) -> bool:
    """Return whether the tests of a file share a fixture."""
    return 'scope="module"' in path.read_text()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Hand the tests out group by group, and report what the workers answer."""
    count = session.config.getoption("workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None  # pytest's own loop
    root = session.config.rootpath
    groups: dict[str, Group] = {}
    for item in session.items:
        groups.setdefault(shared_with(item.nodeid, root), []).append(item)
    session.config.pluginmanager.getplugin("capturemanager").stop_global_capturing()
    gc.freeze()  # a collection in a worker would copy every page that it looks at
    # Made here: pytest keeps the folders of three sessions, and each worker would make one.
    session.config._tmp_path_factory.getbasetemp()
    workers: list[Worker] = []
    for _ in range(count):
        workers.append(Worker(session, workers))
    try:
        hand_out(session, workers, iter(groups.values()))
    finally:
        for worker in workers:
            worker.end()
    return True


def hand_out(session: pytest.Session, workers: list["Worker"], groups: Iterator[Group]) -> None:
    """Give each worker a group as soon as it asks for one, until all have run."""
    busy = {worker.connection: worker for worker in workers if worker.take(next(groups, []))}
    while busy:
        for connection in wait(list(busy)):
            assert isinstance(connection, Connection)
            worker = busy[connection]
            for report in worker.reports():
                session.config.hook.pytest_runtest_logreport(report=report)
                if report.when == "teardown":
                    names = {"nodeid": report.nodeid, "location": report.location}
                    session.config.hook.pytest_runtest_logfinish(**names)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if not worker.group and not (worker.process and worker.take(next(groups, []))):
                del busy[connection]


class Worker:
    """A forked process that runs a group of tests after another, as its parent sees it."""

    def __init__(self, session: pytest.Session, earlier: list["Worker"]) -> None:
        self.connection, other = Pipe()
        self.group: Group = []
        self.config = session.config
        self.places = {id(item): index for index, item in enumerate(session.items)}
        self.process = os.fork()
        if not self.process:
            for worker in (self, *earlier):  # or the parent's end would not be seen
                worker.connection.close()
            work(session, len(earlier), other)
        other.close()

    def take(self, group: Group) -> bool:
        """Have it run a group; return whether there is one."""
        self.group = group
        if group:
            self.connection.send([self.places[id(item)] for item in group])
        return bool(group)

    def reports(self) -> list[pytest.TestReport]:
        """Return what it has to report: one phase of a test, or its own death during a group."""
        try:
            data = self.connection.recv()
        except EOFError:
            return self.dead()
        report = self.config.hook.pytest_report_from_serializable(config=self.config, data=data)
        if report.when == "teardown":
            self.group = [item for item in self.group if item.nodeid != report.nodeid]
        return [report]

    def dead(self) -> list[pytest.TestReport]:
        """Return a failure for each test that the group still held."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        self.process = 0
        text = f"the worker of this group of tests ended with code {code}"
        left, self.group = self.group, []
        return [
            pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "teardown")
            for item in left
        ]

    def end(self) -> None:
        """Let it tear down what its tests shared, and wait for it."""
        self.connection.close()
        if self.process:
            os.waitpid(self.process, 0)


def work(session: pytest.Session, number: int, connection: Connection) -> NoReturn:
    """Run what the parent asks for, until it closes the connection."""
    code = 1
    try:
        become_worker(session.config, number, connection)
        for group in asked(connection):
            items = [session.items[position] for position in group]
            # What only these tests share ends with the last one; what the session shares stays.
            for item, following in zip(items, [*items[1:], session], strict=True):
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        tear_down_session(session)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        multiprocessing.util._exit_function()
        atexit._run_exitfuncs()
        os._exit(code)


def become_worker(config: pytest.Config, number: int, connection: Connection) -> None:
    """Report to the parent rather than on the terminal, and keep files and output apart."""
    plugins = config.pluginmanager
    terminal = plugins.unregister(name="terminalreporter")
    plugins.register(Reporter(config, connection, terminal), "terminalreporter")
    plugins.getplugin("capturemanager").start_global_capturing()
    factory = config._tmp_path_factory
    factory._basetemp = factory.getbasetemp() / str(number)
    factory._basetemp.mkdir(0o700)


class Reporter:
    """Sends the report of each phase of a test to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection, terminal: Any) -> None:
        self.config = config
        self.connection = connection
        self._tw = terminal._tw  # where pytest-timeout writes every stack

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Send a report."""
        to_data = self.config.hook.pytest_report_to_serializable
        self.connection.send(to_data(config=self.config, report=report))


def asked(connection: Connection) -> Iterator[list[int]]:
    """Return the places of a group's tests, group after group."""
    with suppress(EOFError):
        while True:
            yield connection.recv()
