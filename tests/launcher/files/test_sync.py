"""Code goes to the hosts over real sshd, and nothing else is touched, neither here nor there."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from rackrun.contract.tasks import PACKAGES, PLATFORM, TASKS
from rackrun.launcher.errors import PreflightRefused
from rackrun.launcher.files.sync import Destination, upload_code
from rackrun.launcher.files.working_tree import WorkingTree, with_files
from rackrun.launcher.supervision.agents import drain
from rackrun.launcher.transport.local import LocalChannel, LocalTransport
from rackrun.launcher.transport.rpc import RpcClient
from tests.lab.hosts import ROOT, Lab, children, command_line
from tests.lab.waiting import until
from tests.lab.wheels import only_here, uv_here
from tests.launcher.conftest import project
from tests.launcher.fake_host import TrackedTransport


def launch(lab: Lab, *args: str, named: bool = True, **more: Any) -> tuple[int, str, str]:
    """Launch on two hosts, whose lines name an interpreter, or leave it to --sync."""
    python = f"python={lab.cheap_python()}" if named else ""
    hosts = str(lab.write_hosts(*[f"{python} workdir={lab.folder}/there-{n}" for n in (1, 2)]))
    return lab.result_of(
        *args, hosts, "--", sys.executable, "train.py", cwd=lab.folder / "project", **more
    )


def test_sync_brings_the_tree_and_later_only_what_changed(start_lab):
    """New hosts get all that git knows, then only the difference; what is gone here goes there."""
    lab = start_lab(2)
    source = project(lab)
    code, out, err = launch(lab)
    assert code == 78
    assert "there is no folder" in err
    for look in ("--check", "--dry-run"):  # do not object to what --sync would bring
        assert launch(lab, "--sync", look)[0] == 0
    assert not (lab.folder / "there-1").exists()
    code, out, err = launch(lab, "--sync")
    assert code == 0, err
    assert "hello from the tree" in out
    assert "127.0.0.2: 5 files copied" in err or "127.0.0.2: 5 of 5 files copied" in err
    for number in (1, 2):
        remote = lab.folder / f"there-{number}"
        assert (remote / "link").readlink() == Path("train.py")
        assert os.access(remote / "run.sh", os.X_OK)
        assert not (remote / "ignored").exists()
        (remote / "mine").write_text("a file of the host")
    (source / "package" / "words.py").write_text("HELLO = 'hello again'\n")
    (source / "run.sh").unlink()
    code, _, err = launch(lab)
    assert code == 78
    assert "package/words.py" in err
    code, out, err = launch(lab, "--sync")
    assert code == 0, err
    assert "hello again" in out
    assert "1 of 1 files" in err
    for number in (1, 2):
        remote = lab.folder / f"there-{number}"
        assert not (remote / "run.sh").exists()
        assert (remote / "mine").exists()
    code, _, err = launch(lab, "--sync")
    assert code == 0
    assert "copied" not in err
    subprocess.run(["git", "-C", remote, "init", "-q"], check=True)
    status = subprocess.run(
        ["git", "-C", remote, "status", "--porcelain"], capture_output=True, text=True, check=True
    )
    assert "mine" in status.stdout and "rackrun" not in status.stdout


def test_sync_leaves_a_folder_alone_in_which_another_run_works(start_lab):
    """78 with the run's name and --workdir; without changes both may share the folder."""
    lab = start_lab(2)
    source = project(lab)
    assert launch(lab, "--sync")[0] == 0
    ranks = ("--", sys.executable, "-c", "import time; print('here', flush=True); time.sleep(999)")
    python = f"python={lab.cheap_python()}"
    first = str(lab.write_hosts(f"{python} workdir={lab.folder}/there-1"))
    night = lab.run_ssh("--name", "night", first, *ranks, cwd=source)
    logs = "runs/2*-night/logs/*/*/rank-0.out"
    until(lambda: any(path.read_text() for path in source.glob(logs)), "the run works", 60)
    (source / "package" / "words.py").write_text("HELLO = 'hello again'\n")
    code, _, err = launch(lab, "--sync")
    assert code == 78
    assert "files differ in" in err
    assert "which run night is using; type --workdir OTHER" in err
    assert "again" not in (lab.folder / "there-1" / "package" / "words.py").read_text()
    night.send_signal(signal.SIGINT)
    night.communicate(timeout=120)
    assert launch(lab, "--sync")[0] == 0


def checkout(lab: Lab) -> Path:
    """Return rackrun's own packages as a project, whose venv.sh tests may replace.

    A launcher that starts there, `before=("env",)`, is theirs; any other brings its own rackrun.
    """
    source = project(lab)
    with (source / ".gitignore").open("a") as ignored:
        ignored.write("__pycache__/\n")  # copied too, or the launcher there would compile it all
    for package in ("rackrun", *PLATFORM, *(TASKS.keys() - PACKAGES.keys())):
        shutil.copytree(ROOT / package, source / package, symlinks=True, dirs_exist_ok=True)
    return source


def test_the_environment_is_made_there_with_progress(start_lab):
    """A checkout gets its .venv on the host, with progress by line; a failure is named."""
    lab = start_lab(2)
    script = checkout(lab) / "launcher" / "venv.sh"
    made = f"mkdir -p .venv/bin; ln -sf {lab.cheap_python()} .venv/bin/python"
    message = "echo 2 of 2, torch $RACKRUN_OWN_TORCH, lock $RACKRUN_LOCK, own $RACKRUN_OWN_COMMAND"
    script.write_text(f"venv_python() {{ echo installing 1 of 2; {made}; {message}; }}\n")
    chosen = {"RACKRUN_OWN_TORCH": "yes", "RACKRUN_LOCK": "cuda12"}
    code, _, err = launch(lab, "--sync", named=False, before=("env",), env=chosen)
    assert code == 0, err
    assert "rackrun: 127.0.0.3: 2 of 2, torch yes, lock cuda12, own 1" in err
    script.write_text("venv_python() { printf 'the disk is full'; return 5; }\n")  # no newline
    code, _, err = launch(lab, "--sync")
    assert code == 0, err  # an interpreter that the host file names has its own packages
    code, _, err = launch(lab, "--sync", named=False, before=("env",))
    assert code == 78
    assert "no environment could be created" in err
    assert err.count("the disk is full") >= 2


def test_hosts_without_an_index_install_from_wheels_that_are_brought(start_lab):
    """The wheel exists in one folder on the launcher's machine; hosts are to ask no index."""
    lab = start_lab(1)
    lock = checkout(lab) / "requirements" / "base.txt"
    lock.parent.mkdir()
    lock.write_text(only_here(lab.folder / "wheels") + uv_here(lab.folder / "wheels"))
    wheels = ("--sync-wheels", str(lab.folder / "wheels"))
    code, _, err = launch(lab, "--sync", *wheels, named=False, before=("env",))
    assert code == 78 and "torch" in err, err  # the lock does not name it
    (installed,) = (lab.folder / "there-1").glob(".venv/lib/*/site-packages/only_here*")
    assert installed.name == "only_here-1.dist-info"
    for chosen, lock in (({}, "base.txt"), ({"RACKRUN_LOCK": "cuda12"}, "cuda12.txt")):
        args = ("--sync", "--sync-wheels", str(lab.folder))
        code, _, err = launch(lab, *args, named=False, env=chosen)
        assert code == 64 and "no wheel in it; type: python3 -m pip download" in err
        assert f"-r requirements/{lock} -d {lab.folder}" in err


def test_an_installation_ends_with_the_launcher_that_wanted_it(start_lab):
    """It may run for minutes without a word: Ctrl-C ends it on the hosts, with all it started."""
    lab = start_lab(2)
    source = checkout(lab)
    marked = lab.folder / "long"
    marked.symlink_to(shutil.which("sleep") or "")
    script = f"venv_python() {{ echo installing; ({marked} 600); }}\n"
    (source / "launcher" / "venv.sh").write_text(script)
    hosts = str(lab.write_hosts(*[f"workdir={lab.folder}/there-{n}" for n in (1, 2)]))
    launcher = lab.run_ssh("--sync", hosts, "--", "true", cwd=source, before=("env",))

    def installing() -> list[int]:
        below = [pid for host in lab.hosts for pid in children(host.process.pid)]
        return [pid for pid in below if command_line(pid).startswith(f"{marked}\0")]

    until(lambda: len(installing()) == 2, "both hosts install", 60)
    left = installing()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate()
    assert launcher.returncode == 130
    until(lambda: not any(map(command_line, left)), "nobody installs any more", 60)


def test_code_does_not_go_into_a_home_directory(start_lab):
    """A careless workdir=~ is refused before a file is written."""
    lab = start_lab(1)
    args = ("--sync", lab.cheap_hosts("workdir=~"), "--", "true")
    code, _, err = lab.result_of(*args, cwd=project(lab))
    assert code == 78
    assert "cannot hold the code" in err


def test_hundreds_of_files_come_as_one_stream_and_then_only_what_changed(start_lab):
    """Names with spaces and newlines, empty files and folders that vanish: both hosts are equal."""
    lab = start_lab(2)
    source = project(lab)
    for number in range(600):
        folder = source / f"part {number % 20}"
        folder.mkdir(exist_ok=True)
        (folder / f"f\n{number}.txt").write_bytes(bytes([number % 251]) * (number % 997))
    code, _, err = launch(lab, "--sync")
    assert code == 0, err
    assert "127.0.0.2: 500 of 605 files copied" in err
    assert "127.0.0.3: 605 of 605 files copied" in err
    for number in (1, 2):
        assert tree(lab.folder / f"there-{number}") == tree(source)
    for path in (source / "part 7").iterdir():
        path.unlink()
    (source / "part 7").rmdir()
    (source / "part 7").write_text("a file now")
    (source / "part 8" / "f\n8.txt").unlink()
    code, _, err = launch(lab, "--sync")
    assert code == 0, err
    assert "1 of 1 files copied" in err
    for number in (1, 2):
        assert tree(lab.folder / f"there-{number}") == tree(source)


def unpacked(root: Path, *names: str, end: bytes = bytes(512)) -> bool:
    """Send a tar of small files to this machine; return whether it complains."""
    client = RpcClient(LocalTransport("here"))
    channel = client._channel
    assert isinstance(channel, LocalChannel)
    client.order("unpack", root=str(root), paths=["a", "b"], count=2)
    for name in names:
        info = tarfile.TarInfo(name)
        info.size = 3
        client.send(info.tobuf() + b"new".ljust(512, b"\0"))
    client.send(end)
    if not end:
        channel.stream.shutdown(socket.SHUT_WR)
    complains = "error" in client.reply()
    if end:  # the next order is found behind the tar
        assert client.call("differences", root=str(root), files={}, modes={})["paths"] == []
    channel.close()
    drain(channel)
    return complains


@pytest.mark.parametrize(
    ("names", "end"), [(["a"], b""), (["a"], bytes(512)), (["a", "a/x"], bytes(512))]
)
def test_a_stream_that_breaks_changes_nothing(tmp_path, names, end):
    """Files take their place together: half a stream, or one file that fails, leaves the old."""
    remote = tmp_path / "there"
    (remote / "b").mkdir(parents=True)
    (remote / "a").write_text("old")
    assert unpacked(remote, *names, end=end)
    assert (remote / "a").read_text() == "old"
    assert {path.name for path in remote.iterdir()} == {"a", "b"}


def tree(folder: Path) -> dict[str, bytes | str]:
    """Return the contents of a folder, without git's files and ours."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file())
        and not {".git", "runs", "ignored", ".rackrun", "__pycache__"}
        & set(path.relative_to(folder).parts)
    }


SECRETS = {"server.key": 0o644, "conf/.env": 0o644, "mine.txt": 0o600, "closed/notes.txt": 0o644}


@pytest.mark.security("SSH-9")
def test_private_files_stay_here_unless_they_are_asked_for_by_name(start_lab):
    """Untracked keys, .env, what only its owner reads: left out, and named with what to type."""
    lab = start_lab(1)
    source = project(lab)
    subprocess.run(["git", "-C", source, "init", "-q", "nested"], check=True)
    (source / "nested" / "x").touch()
    (source / "plain.txt").write_text("goes along")
    for name, mode in SECRETS.items():
        path = source / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("hunter2")
        path.chmod(mode)
    (source / "closed").chmod(0o700)
    code, _, err = launch(lab, "--sync")
    assert code == 0, err
    assert "rackrun: left out: closed/notes.txt, conf/.env, mine.txt and 1 more: private" in err
    assert "type --sync-untracked closed/notes.txt" in err
    assert "warning: nested/ is a git repository of its own" in err
    remote = lab.folder / "there-1"
    assert (remote / "plain.txt").exists()
    assert not any((remote / name).exists() for name in SECRETS)
    expected = ("--sync-untracked", "*.key", "--sync-untracked", "closed")
    code, _, err = launch(lab, "--sync", *expected)
    assert code == 0, err
    came = {
        name: (remote / name).stat().st_mode & 0o777 for name in SECRETS if (remote / name).exists()
    }
    assert came == {"server.key": 0o644, "closed/notes.txt": 0o600}
    code, _, err = launch(lab, "--sync", "--sync-untracked", "none.key")
    assert code == 64
    assert "--sync-untracked none.key: no such untracked file" in err
    assert launch(lab, "--sync-untracked", "server.key")[0] == 64


def test_modes_of_files_are_no_wider_there_than_here(start_lab):
    """0600 stays 0600 and 0700 stays 0700, also for what came earlier as 0644; 0664 is 0644."""
    lab = start_lab(1)
    source = project(lab)
    modes = {"train.py": 0o600, "run.sh": 0o700, "package/words.py": 0o664, ".gitignore": 0o640}
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}/there"))
    args = ("--sync", hosts, "--", "true")
    assert lab.result_of(*args, cwd=source)[0] == 0
    for name, mode in modes.items():
        (source / name).chmod(mode)
    remote = lab.folder / "there"
    assert remote.joinpath("train.py").stat().st_mode & 0o777 == 0o644
    code, _, err = lab.result_of(*args, cwd=source)
    assert code == 0, err
    assert "2 of 2 files copied" in err
    by_file = {name: (remote / name).stat().st_mode & 0o777 for name in ("train.py", "run.sh")}
    assert by_file == {"train.py": 0o600, "run.sh": 0o700}
    shutil.rmtree(remote)
    assert lab.result_of(*args, cwd=source)[0] == 0
    by_file = {name: (remote / name).stat().st_mode & 0o777 for name in modes}
    assert by_file == {**modes, "package/words.py": 0o644}


def brought(remote: Path, files: dict[str, str]) -> tuple[list[str], TrackedTransport]:
    """Upload files to a folder of this machine; return the messages and the transport."""
    source = remote.parent / "source"
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    code = with_files(WorkingTree(source, {}), list(files), print)
    lines: list[str] = []
    transport = TrackedTransport()
    try:
        upload_code(code, [Destination(transport, str(remote))], lines.append)
    finally:
        transport.wait_for_end()
    return lines, transport


@pytest.mark.parametrize("trap", ["package", "package/deep", ".rackrun/files", "a"])
def test_links_of_a_host_are_not_written_through(tmp_path, trap):
    """A link where a folder should be is named; one where a file should be is replaced."""
    remote, outside = tmp_path / "there", tmp_path / "outside"
    outside.mkdir()
    (outside / "a").write_text("not ours")
    (remote / trap).parent.mkdir(parents=True)
    (remote / trap).symlink_to(outside / "a" if trap == "a" else outside)
    files = {"a": "new", "package/deep/words.py": "HELLO = 1"}
    if trap in ("package", "package/deep"):
        with pytest.raises(PreflightRefused, match="package/deep/words.py: a link or a file is"):
            brought(remote, files)
    elif trap == ".rackrun/files":
        with pytest.raises(PreflightRefused, match=r"\.rackrun/files"):
            brought(remote, files)
    else:
        brought(remote, files)
        assert (remote / "a").read_text() == "new"
        assert not (remote / "a").is_symlink()
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"a": "not ours"}
    assert not list(remote.glob(".rackrun-incoming-*"))


def test_what_a_host_left_that_went_down_in_a_copy_goes_after_a_day(tmp_path):
    """Not before: another copy may be on its way."""
    remote = tmp_path / "there"
    for name, age in (("old", 90_000), ("new", 60)):
        folder = remote / f".rackrun-incoming-{name}"
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - age,) * 2)
    brought(remote, {"a": "new"})
    assert {path.name for path in remote.iterdir()} == {"a", ".rackrun", folder.name}


def test_a_file_that_changes_while_it_is_brought_is_named(tmp_path):
    """All hosts get the code of one moment, or none of it."""
    remote = tmp_path / "there"
    brought(remote, {"a": "old"})
    source = tmp_path / "source"
    (source / "a").write_text("new")
    code = with_files(WorkingTree(source, {}), ["a"], print)
    (source / "a").write_text("newer")
    transport = TrackedTransport()
    with pytest.raises(PreflightRefused, match="a changed while it was copied; type the same"):
        upload_code(code, [Destination(transport, str(remote))], print)
    transport.wait_for_end()
    assert (remote / "a").read_text() == "old"


def test_a_task_of_ones_own_is_brought_or_refused(start_lab):
    """The launch names what git leaves out, or what is elsewhere; then --sync brings the task."""
    lab = start_lab(1)
    source = project(lab)
    for folder in (source / "mine", lab.folder / "elsewhere"):
        folder.mkdir()
        (folder / "model.py").write_text("raise SystemExit('the launcher runs no task')")
        (folder / "recipes.py").write_text(
            'from rackrun.training.config import Config\nRECIPES = {"default": Config}'
        )
    (source / ".gitignore").write_text("mine\n")
    host = f"python={lab.cheap_python(trains=True)} workdir={lab.folder}/there"
    args = ("--sync", str(lab.write_hosts(host)), "mine", "--synthetic", "--epochs")
    code, _, err = lab.result_of(*args, "none", cwd=source)
    assert (code, "error: --epochs none: not a number; type: " in err) == (64, True), err
    code, _, err = lab.result_of(*args, "1", cwd=source)
    assert (code, "as git ignores it; type: git add -f mine/model.py" in err) == (64, True), err
    (source / ".gitignore").write_text("")
    lab.result_of(*args, "1", cwd=source)
    assert (lab.folder / "there" / "mine" / "model.py").exists()

    bare = lab.write_hosts(f"workdir={lab.folder}/there")
    env = {"PYTHONPATH": str(lab.folder)}
    args = ("--sync", str(bare), "elsewhere", "--synthetic")
    code, _, err = lab.result_of(*args, cwd=source, env=env)
    assert (code, "which is what hosts get; move it there, or install" in err) == (
        64,
        True,
    ), err
