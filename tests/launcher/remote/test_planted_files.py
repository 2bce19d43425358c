"""What another account of a host puts in our way: neither our files nor our processes are its."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.launcher.remote import files, run_processes
from rackrun.launcher.remote.agent import shutdown
from tests.lab.detached import WAIT, DetachedLab
from tests.lab.needs import need

NOBODY = 65534
OTHER_RUN = secrets.token_hex(16)


class Stranger:
    """An account that knows the id of a run, and what it plants."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder = folder
        self.run = run
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folders: list[Path] = []

    def process(self, program: str = "sleep", uid: int = NOBODY, **variables: str) -> int:
        """Start a process of that account with these variables; return its id."""
        started = subprocess.Popen([program, "999"], env=variables, user=uid, group=uid)
        self.processes.append(started)
        return started.pid

    def program(self, name: str, mode: int) -> str:
        """Return `sleep` under another name."""
        path = self.folder / name
        shutil.copy(str(shutil.which("sleep")), path)
        path.chmod(mode)
        return str(path)

    def scratch(self, node: str, uid: int = NOBODY, **files: str) -> Path:
        """Make a folder named like that of an agent."""
        path = Path(f"/tmp/rackrun-{self.run}{node}")
        self.folders.append(path)
        path.mkdir(0o700)
        for name, text in files.items():
            (path / name.replace("_", ".")).write_text(text)
        for one in (path, *path.iterdir()):
            os.chown(one, uid, uid)
        return path

    def alive(self) -> list[int]:
        return [process.pid for process in self.processes if process.poll() is None]

    def go(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        for path in self.folders:
            path.unlink() if path.is_symlink() else shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def stranger(detached_on_one: DetachedLab, tmp_path: Path) -> Iterator[Callable[[], Stranger]]:
    need("root")
    came: list[Stranger] = []

    def come() -> Stranger:
        folder = Path(f"/tmp/stranger-{os.getpid()}")  # that account cannot read our files
        folder.mkdir(0o755)
        came.append(Stranger(folder, detached_on_one.run))
        came[0].folders.append(folder)
        return came[0]

    yield come
    for one in came:
        one.go()


@pytest.mark.security("PROC-2")
def test_stop_ends_and_removes_nothing_that_another_account_names(
    detached_on_one, stranger, tmp_path
):
    """Processes that claim to be of the run, folders and pipes in /tmp, a name: root's own folders
    and processes stay, stop answers, and the run itself is ended."""
    detached_on_one.detach(detached_on_one.hosts, "--", sys.executable, "-c", WAIT)
    detached_on_one.wait_for_ranks(1)
    they = stranger()
    important = tmp_path / "important"
    important.mkdir(0o700)
    (important / "work").write_text("of years")
    they.run = OTHER_RUN
    others = they.scratch("-0", uid=0)  # a run of ours that has nothing to do with it
    they.run = detached_on_one.run
    bystander = they.process(uid=0)
    name = f"rackrun{detached_on_one.run}"
    they.process(they.program(name, 0o755), uid=0)  # ours, and called like a relay
    setuid = they.program("setuid", 0o4755)  # root owns its folder in /proc, whoever starts it
    run_id = detached_on_one.run + "f" * 24
    for reports in (important, others):
        for program in ("sleep", setuid):
            marks = {"RACKRUN_RUN_ID": run_id, "RACKRUN_REPORTS": f"{reports}/reports"}
            they.process(program, **marks)
    report = json.dumps(run_processes.identity(bystander))
    they.scratch("evil", agent_pid=report, container="")
    rest = "f" * 24
    they.scratch(f"{rest}-1", agent_pid=report, command_json="{}", container="")
    they.scratch(f"{rest}-2", agent_pid="5")
    they.scratch(f"{rest}-3", agent_pid="[" * 100_000)
    os.mkfifo(they.scratch(f"{rest}-4") / "agent.pid")
    link = Path(f"/tmp/rackrun-{detached_on_one.run}{rest}-5")
    link.symlink_to(important)
    they.folders.append(link)
    (important / "agent.pid").write_text(report)
    planted = they.alive()

    code, _, err = detached_on_one.result_of("stop", "--force")
    assert (code, "1 of 1 host clean" in err) == (0, True), err
    assert they.alive() == planted
    assert (important / "work").read_text() == "of years"
    assert others.is_dir()
    detached_on_one.wait_until_clean()


HEX = "0123456789abcdef" * 2
NOT_OURS = {
    "no run": "/tmp/rackrun-0123-0",
    "no number": f"/tmp/rackrun-{HEX}-\N{SUPERSCRIPT TWO}",
    "another folder": f"/var/tmp/rackrun-{HEX}-0",
    "above it": f"/tmp/rackrun-{HEX}-0/..",
}


def test_a_folder_is_ours_by_its_name_its_owner_and_its_mode():
    """Another account may make any folder in /tmp, of any name."""
    need("root")
    run = os.urandom(16).hex()
    path = Path(f"/tmp/rackrun-{run}-12")
    assert not files.is_own_folder(str(path))
    path.mkdir(0o700)
    try:
        assert files.is_own_folder(str(path))
        assert not [name for name, other in NOT_OURS.items() if files.is_own_folder(other)]
        path.chmod(0o755)
        assert not files.is_own_folder(str(path))
        path.chmod(0o700)
        os.chown(path, NOBODY, NOBODY)
        assert not files.is_own_folder(str(path))
    finally:
        path.rmdir()
    path.symlink_to("/tmp")
    assert not files.is_own_folder(str(path))
    path.unlink()


def test_an_agent_sweeps_only_what_is_ours(tmp_path):
    """Whatever path it is given: a folder elsewhere, one of another account, one with a pipe."""
    need("root")
    kept = tmp_path / "kept"
    kept.mkdir(0o700)
    assert shutdown.sweep(str(kept)) == []
    assert kept.is_dir()
    path = Path(f"/tmp/rackrun-{os.urandom(16).hex()}-0")
    path.mkdir(0o700)
    os.mkfifo(path / "agent.pid")
    assert run_processes.agents_of(str(path)) == {}
    (path / "agent.pid").unlink()
    with subprocess.Popen(["sleep", "999"]) as bystander:
        try:
            (path / "agent.pid").write_text(json.dumps(run_processes.identity(bystander.pid)))
            os.chown(path, NOBODY, NOBODY)
            assert shutdown.sweep(str(path)) == []
            assert bystander.poll() is None
            assert path.is_dir()
            os.chown(path, 0, 0)
            assert shutdown.sweep(str(path)) == []
            assert bystander.wait(10) == -signal.SIGKILL
            assert not path.exists()
        finally:
            bystander.kill()
