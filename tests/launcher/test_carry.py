"""Code goes to the hosts, results come back: over real sshd, and nothing else is touched."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launcher import porter
from launcher.conversation import Conversation
from launcher.link import drain
from launcher.local import LocalChannel, LocalPlace
from tests.launcher.lab import Lab, children, command_line, wait_until

Labs = Callable[[int], Lab]


def project(one: Lab) -> Path:
    """A working tree that git knows: a script, a package, a link, an ignored file."""
    folder = one.folder / "project"
    (folder / "package").mkdir(parents=True)
    (folder / "train.py").write_text("from package import words\nprint(words.HELLO)\n")
    (folder / "package" / "words.py").write_text("HELLO = 'hello from the tree'\n")
    (folder / "run.sh").write_text("#!/bin/sh\necho run\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("train.py")
    (folder / ".gitignore").write_text("ignored\nruns/\n")
    (folder / "ignored").write_text("stays here\n")
    subprocess.run(["git", "-C", folder, "init", "-q"], check=True)
    return folder


def launch(one: Lab, *words: str, **more: Any) -> tuple[int, str, str]:
    workdirs = [f"python={one.cheap_python()} workdir={one.folder}/there-{n}" for n in (1, 2)]
    hosts = str(one.write_hosts(*workdirs))
    return one.said(*words, hosts, "--", sys.executable, "train.py", cwd=project_of(one), **more)


def project_of(one: Lab) -> Path:
    return one.folder / "project"


def test_sync_brings_the_tree_and_later_only_what_changed(lab: Labs) -> None:
    """New hosts get all that git knows, then only the difference; what is gone here goes there."""
    one = lab(2)
    source = project(one)
    code, out, err = launch(one)
    assert code == 78
    assert "there is no folder" in err
    code, out, err = launch(one, "--sync")
    assert code == 0, err
    assert "hello from the tree" in out
    assert "127.0.0.2: 5 files brought" in err or "127.0.0.2: 5 of 5 files brought" in err
    for number in (1, 2):
        there = one.folder / f"there-{number}"
        assert (there / "link").readlink() == Path("train.py")
        assert os.access(there / "run.sh", os.X_OK)
        assert not (there / "ignored").exists()
        (there / "mine").write_text("a file of the host")
    (source / "package" / "words.py").write_text("HELLO = 'hello again'\n")
    (source / "run.sh").unlink()
    code, _, err = launch(one)
    assert code == 78
    assert "package/words.py" in err
    code, out, err = launch(one, "--sync")
    assert code == 0, err
    assert "hello again" in out
    assert "1 of 1 files" in err
    for number in (1, 2):
        there = one.folder / f"there-{number}"
        assert not (there / "run.sh").exists()
        assert (there / "mine").exists()
    code, _, err = launch(one, "--sync")
    assert code == 0
    assert "brought" not in err


def test_the_environment_is_made_there_with_progress(lab: Labs) -> None:
    """A project that says how gets its .venv on the host, told line by line; a failure is named."""
    one = lab(2)
    source = project(one)
    (source / "launcher").mkdir()
    script = source / "launcher" / "venv.sh"
    script.write_text("venv_python() { echo installing 1 of 2; echo installing 2 of 2; }\n")
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert "rackrun: 127.0.0.3: installing 2 of 2" in err
    script.write_text("venv_python() { echo the disk is full; return 5; }\n")
    code, _, err = launch(one, "--sync")
    assert code == 78
    assert "no environment could be made" in err
    assert err.count("the disk is full") >= 2


def test_an_installation_ends_with_the_launcher_that_wanted_it(lab: Labs) -> None:
    """It may run for minutes without a word: Ctrl-C ends it on the hosts, with all it started."""
    one = lab(2)
    source = project(one)
    (source / "launcher").mkdir()
    marked = one.folder / "long"
    marked.symlink_to(shutil.which("sleep") or "")
    script = f"venv_python() {{ echo installing; ({marked} 600); }}\n"
    (source / "launcher" / "venv.sh").write_text(script)
    words = [f"python={one.cheap_python()} workdir={one.folder}/there-{n}" for n in (1, 2)]
    hosts = str(one.write_hosts(*words))
    launcher = one.run_ssh("--sync", hosts, "--", "true", cwd=source)

    def installing() -> list[int]:
        below = [pid for host in one.hosts for pid in children(host.process.pid)]
        return [pid for pid in below if command_line(pid).startswith(f"{marked}\0")]

    wait_until(lambda: len(installing()) == 2, "both hosts install", 60)
    left = installing()
    launcher.send_signal(signal.SIGINT)
    launcher.communicate()
    assert launcher.returncode == 130
    wait_until(lambda: not any(map(command_line, left)), "nobody installs any more", 60)


def test_code_does_not_go_into_a_home_directory(lab: Labs) -> None:
    """A careless workdir=~ is refused before a file is written."""
    one = lab(1)
    project(one)
    hosts = str(one.write_hosts(f"python={one.cheap_python()} workdir=~"))
    code, _, err = one.said("--sync", hosts, "--", "true", cwd=project_of(one))
    assert code == 78
    assert "is no place for code" in err


def test_results_come_back_from_the_first_host(lab: Labs) -> None:
    """final.pt, metrics and figures of rank 0 are in the launcher's run folder, byte for byte."""
    one = lab(2)
    for number in (1, 2):
        (one.folder / f"there-{number}").mkdir()
    script = (
        "import os; from pathlib import Path; out = Path(os.environ['RACKRUN_RUN_FOLDER'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    (out / 'final.pt').write_bytes(bytes(range(256)) * 40_000)\n"
        "    (out / 'metrics.jsonl').write_text('{}')\n"
        "    (out / 'tensorboard').mkdir(); (out / 'tensorboard' / 'events').write_text('e')\n"
        "    (out / 'checkpoints').mkdir(); (out / 'checkpoints' / 'heavy').write_text('h')\n"
        "else:\n"
        "    (out / 'of-rank-1').write_text('')\n"
    )
    hosts = [f"python={one.cheap_python()} workdir={one.folder}/there-{n}" for n in (1, 2)]
    words = (str(one.write_hosts(*hosts)), "--", sys.executable, "-c", script)
    code, _, err = one.said(*words)
    assert code == 0, err
    assert "3 files came back from 127.0.0.2" in err
    assert err.splitlines()[-1].startswith("rackrun: done")
    (folder,) = (one.folder / "runs").iterdir()
    assert (folder / "final.pt").read_bytes() == bytes(range(256)) * 40_000
    assert (folder / "tensorboard" / "events").read_text() == "e"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "of-rank-1").exists()
    assert json.loads((folder / "result.json").read_text())["verdict"] == "done"


def test_who_does_not_wait_for_the_results_has_the_result(lab: Labs) -> None:
    """Ctrl-C while they come: the run was done, its last line says so, and result.json is there."""
    one = lab(1)
    (one.folder / "there-1").mkdir()
    script = "import os; os.truncate(os.open('final.pt', os.O_CREAT | os.O_RDWR), 1 << 40)"
    script = f"import os; os.chdir(os.environ['RACKRUN_RUN_FOLDER']); {script}"
    hosts = str(one.write_hosts(f"python={one.cheap_python()} workdir={one.folder}/there-1"))
    launcher = one.run_ssh(hosts, "--", sys.executable, "-c", script)
    runs = one.folder / "runs"
    wait_until(lambda: bool(list(runs.glob("*/.final.pt.partial"))), "it is on its way", 60)
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert launcher.returncode == 130
    assert "rackrun: done in" in err
    (folder,) = runs.iterdir()
    assert json.loads((folder / "result.json").read_text())["verdict"] == "done"
    assert not list(folder.glob("*final.pt*"))


def test_a_shared_folder_is_not_copied_onto_itself(lab: Labs) -> None:
    """Where launcher and host see the same run folder, nothing is fetched."""
    one = lab(1)
    hosts = str(one.write_hosts(f"python={one.cheap_python()} workdir={one.folder}"))
    script = "import os; open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write('x')"
    code, _, err = one.said(hosts, "--", sys.executable, "-c", script)
    assert code == 0, err
    assert "came back" not in err


def test_two_thousand_files_come_as_one_stream_and_then_only_what_changed(lab: Labs) -> None:
    """Names with spaces and newlines, empty files and folders that vanish: both hosts are equal."""
    one = lab(2)
    source = project(one)
    for number in range(2000):
        folder = source / f"part {number % 40}"
        folder.mkdir(exist_ok=True)
        (folder / f"f\n{number}.txt").write_bytes(bytes([number % 251]) * (number % 997))
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert "127.0.0.2: 500 of 2005 files brought" in err
    assert "127.0.0.3: 2005 of 2005 files brought" in err
    for number in (1, 2):
        assert tree(one.folder / f"there-{number}") == tree(source)
    for path in (source / "part 7").iterdir():
        path.unlink()
    (source / "part 7").rmdir()
    (source / "part 7").write_text("a file now")
    (source / "part 8" / "f\n8.txt").unlink()
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert "1 of 1 files brought" in err
    for number in (1, 2):
        assert tree(one.folder / f"there-{number}") == tree(source)


def test_files_that_only_went_away_go_away_there(lab: Labs) -> None:
    """A sync that has nothing to bring still removes what is gone here."""
    one = lab(2)
    source = project(one)
    assert launch(one, "--sync")[0] == 0
    (source / "run.sh").unlink()
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert not (one.folder / "there-1" / "run.sh").exists()


def test_what_may_be_executed_here_may_be_there(lab: Labs) -> None:
    """A script that only gained or lost its executable bit is brought, too, and only once."""
    one = lab(2)
    source = project(one)
    assert launch(one, "--sync")[0] == 0
    (source / "train.py").chmod(0o755)
    (source / "run.sh").chmod(0o644)
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert "2 of 2 files brought" in err
    for number in (1, 2):
        there = one.folder / f"there-{number}"
        assert os.access(there / "train.py", os.X_OK)
        assert not (there / "run.sh").stat().st_mode & 0o111
    code, _, err = launch(one, "--sync")
    assert code == 0, err
    assert "brought" not in err


def test_a_stream_that_breaks_changes_nothing(tmp_path: Path) -> None:
    """Files take their place together: half a stream, or one file that fails, leaves the old."""
    there = tmp_path / "there"
    (there / "b").mkdir(parents=True)
    (there / "a").write_text("old")
    words = {"root": str(there), "gone": [], "paths": ["a", "b"]}
    for name, end in (("c", b""), ("a/x", b"\n")):
        talk = Conversation(LocalPlace("here"), porter)
        channel = talk._channel
        assert isinstance(channel, LocalChannel)
        talk.order("unpack", **words)
        headers = [{"path": path, "size": 3, "mode": 0o644, "link": False} for path in ("a", name)]
        talk.send(b"".join(json.dumps(header).encode() + b"\nnew" for header in headers) + end)
        if not end:
            channel.stream.shutdown(socket.SHUT_WR)
        assert ("error" in talk.answer()) == bool(end)
        channel.close()
        drain(channel)
        assert (there / "a").read_text() == "old"
        assert {path.name for path in there.iterdir()} == {"a", "b"}


def tree(folder: Path) -> dict[str, bytes | str]:
    """What is in a folder, but for git's own and ours."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else path.read_bytes()
        for path in folder.rglob("*")
        if (path.is_symlink() or path.is_file())
        and not {".git", "runs", "ignored", ".rackrun-files", "__pycache__"}
        & set(path.relative_to(folder).parts)
    }
