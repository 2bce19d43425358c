"""Fixtures and settings of all tests."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rackrun.commands import _Caller
from tests.lab import certificates, needs
from tests.lab.hosts import Lab
from tests.lab.network import NetLab, net_labs
from tests.lab.run import Result, run

# No example has a deadline: the machine may be slow.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("short", settings.get_profile("patient"), max_examples=40)
settings.load_profile("patient")


def pytest_configure(config: pytest.Config) -> None:
    """Draw fewer examples where `--long` does not ask for all of them."""
    settings.load_profile("short" if config.option.markexpr == "not long" else "patient")


# What tests start gets SIGINT and SIGHUP, also where the caller ignores them (nohup).
for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, lambda number, frame: None)


# What decides how commands run and write is what each test says, not where the tests run.
for name in [name for name in os.environ if name == "CI" or name.startswith("RACKRUN_")]:
    del os.environ[name]

# `python3` is the interpreter itself, not a version manager's script, which takes 0.1 s to find it.
base = Path(sys._base_executable).resolve().parent
os.environ["PATH"] = f"{base}:{os.environ['PATH']}"

# Threads of one rank wait for one another actively, for ages where others keep the cores busy.
os.environ.setdefault("OMP_NUM_THREADS", "1")


# What waits or trains for minutes starts first, so that nothing long is left alone at the end.
SLOW_FIRST = (
    "imagenet/test_end_to_end.py",
    "slurm/test_jobs.py",
    "launcher/commands/test_run_ray.py",
    "test_commands.py",
    "contract/train/test_exact.py",
    "launcher/lifecycle/test_restarts.py",
    "test_venv.py",
    "catdog/test_training.py",
    "training/test_restarts.py",
    "training/test_loop.py",
    "launcher/viewer/test_detach.py",
    "launcher/commands/test_run_ssh.py",
)
TESTS = Path(__file__).parent
TOGETHER = ("gpu", "nginx", "slurm")  # folders whose tests share GPUs, a Docker daemon, a cluster


# What tests need of the machine, by a fixture that they use; other tests call needs.need.
NEEDS = {
    **dict.fromkeys(("net", "pair", "account"), pytest.mark.root),
    **{"daemon": pytest.mark.docker, "slurm": pytest.mark.slurm},
}

# A file that imports one of these needs nginx.
SERVE = {"access_log", "serving", "serving_with", "serving_tls", "nginx_of"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow files first, and leave tests that share a fixture to one worker."""
    positions = {TESTS / name: index for index, name in enumerate(SLOW_FIRST)}
    items.sort(key=lambda item: positions.get(item.path, len(positions)))
    for item in items:
        place = item.path.relative_to(TESTS)
        if place.parts[0] in TOGETHER:
            item.add_marker(pytest.mark.xdist_group(place.parts[0]))
        elif shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(place.as_posix()))
        for fixture in NEEDS.keys() & {*item.fixturenames}:
            item.add_marker(NEEDS[fixture])


def shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a fixture of the test is made once for all tests of its file."""
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    return any(fixture.scope == "module" for each in fixtures for fixture in each)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what this user cannot run."""
    if SERVE & vars(item.getparent(pytest.Module).obj).keys():
        needs.need("nginx")
    for mark in item.iter_markers():
        if mark.name in needs.MARKS:
            needs.need(mark.name)
    if gpu := item.get_closest_marker("gpu"):
        needs.need_gpus(*gpu.args)


@pytest.fixture(autouse=True)
def no_variables_of_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unset what a launch would name, be it the user's or left by a conversion in this process."""
    for name in [name for name in os.environ if name.startswith(("NCCL_", "GLOO_", "HF_"))]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def called_by_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget how commands were called: the next test's messages would name them likewise."""
    monkeypatch.setattr(_Caller, "by_name", False)
    monkeypatch.setattr(_Caller, "folder", "./")


@pytest.fixture(autouse=True)
def nothing_outlives_its_test() -> Iterator[None]:
    """End the loader workers, which ignore SIGTERM: the interpreter would wait for them."""
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(scope="session")
def daemon() -> Iterator[None]:
    """Yield with this machine's Docker daemon, or with one of our own for the tests."""
    from tests.lab.servers import docker_daemon

    with docker_daemon():
        yield


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    """Yield a lab without hosts; `lab.ready(2)` starts two real sshd on loopback addresses."""
    (tmp_path / "lab").mkdir()
    lab = Lab(tmp_path / "lab")
    yield lab
    lab.stop()


@pytest.fixture
def start_lab(lab: Lab) -> Callable[[int], Lab]:
    """Return `start_lab(4)`, which starts four real sshd, known to the client."""
    return lab.ready


@pytest.fixture
def net(tmp_path: Path) -> Iterator[Callable[[int], NetLab]]:
    """Yield `net(3)`, which makes three hosts behind cables, and a launcher at the switch."""
    with net_labs(tmp_path / "net") as make:
        yield make


@pytest.fixture
def cli(tmp_path: Path) -> Callable[..., Result]:
    """Return `cli("rackrun ps")`, which types a line in the test's own folder."""

    def typed(line: str | list[str], **more: Any) -> Result:
        return run(line, tmp_path, **more)

    return typed


@pytest.fixture(scope="session")
def keys(tmp_path_factory: pytest.TempPathFactory) -> certificates.Keys:
    """Make new certificates for 127.0.0.1."""
    return certificates.make(tmp_path_factory.mktemp("keys"))
