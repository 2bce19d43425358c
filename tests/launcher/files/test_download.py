"""Results come back: the run's files and no others, within a time limit."""

import contextlib
import json
import os
import signal
import sys

import pytest

from rackrun.errors import Problem
from rackrun.launcher.files.download import MOST_BYTES, fetch_results
from rackrun.launcher.remote import service
from rackrun.launcher.transport.rpc import RpcClient
from tests.fuzz.targets_launcher import Recorded
from tests.lab.hosts import Lab, children, command_line
from tests.lab.waiting import until
from tests.launcher.fake_host import TrackedTransport, host_plan, replies

EVENTS = "events.out.tfevents.1767323045.host-1.4711.0"


def test_results_come_back_from_the_first_host(start_lab):
    """final.pt, metrics and figures of rank 0 are in the launcher's run folder, byte for byte."""
    lab = start_lab(2)
    for number in (1, 2):
        (lab.folder / f"there-{number}").mkdir()
    script = (
        "import os; from pathlib import Path; out = Path(os.environ['RACKRUN_RUN_FOLDER'])\n"
        "if os.environ['RANK'] == '0':\n"
        "    (out / 'final.pt').write_bytes(bytes(range(256)) * 40_000)\n"
        "    (out / 'metrics.jsonl').write_text('{}')\n"
        f"    (out / 'tensorboard').mkdir(); (out / 'tensorboard' / '{EVENTS}').write_text('e')\n"
        "    (out / 'checkpoints').mkdir(); (out / 'checkpoints' / 'heavy').write_text('h')\n"
        "else:\n"
        "    (out / 'of-rank-1.txt').write_text('')\n"
    )
    hosts = [f"python={lab.cheap_python()} workdir={lab.folder}/there-{n}" for n in (1, 2)]
    args = (str(lab.write_hosts(*hosts)), "--", sys.executable, "-c", script)
    code, _, err = lab.result_of(*args)
    assert code == 0, err
    assert "3 files came back from 127.0.0.2" in err
    assert err.splitlines()[-1].startswith("rackrun: done")
    (folder,) = (lab.folder / "runs").glob("2*")
    assert (folder / "final.pt").read_bytes() == bytes(range(256)) * 40_000
    assert (folder / "tensorboard" / EVENTS).read_text() == "e"
    assert not (folder / "checkpoints").exists()
    assert not (folder / "of-rank-1.txt").exists()
    assert json.loads((folder / "result.json").read_text())["verdict"] == "done"


@pytest.mark.parametrize("code", [0, 3])
def test_who_does_not_wait_for_the_results_has_the_result(start_lab, code):
    """Ctrl-C while they come: last line and code are the run's, and no file is cut.

    A run that failed is not started again after Ctrl-C.
    """
    lab = start_lab(1)
    (lab.folder / "there-1").mkdir()
    big = "os.truncate(os.open('final.pt', os.O_CREAT | os.O_RDWR), 1 << 31)"
    script = f"import os; os.chdir(os.environ['RACKRUN_RUN_FOLDER']); {big}; os._exit({code})"
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}/there-1"))
    launcher = lab.run_ssh("--max-restarts", "1", hosts, "--", sys.executable, "-c", script)
    runs = lab.folder / "runs"
    until(lambda: bool(list(runs.glob("2*/.final.pt.partial"))), "it is on its way", 60)
    for pid in senders(lab):
        os.kill(pid, signal.SIGSTOP)  # so that it stays on its way
    launcher.send_signal(signal.SIGINT)
    _, err = launcher.communicate()
    assert launcher.returncode == code, err
    assert "rackrun: not waited for: the results are still on 127.0.0.2, in " in err
    last = "done in" if code == 0 else "failed: rank 0 on 127.0.0.2: exit code 3"
    assert err.splitlines()[-1].startswith(f"rackrun: {last}")
    (folder,) = runs.glob("2*")
    assert json.loads((folder / "result.json").read_text())["exit_code"] == code
    assert not list(folder.glob("*final.pt*"))


def senders(lab: Lab) -> list[int]:
    """Return our programs on all hosts: after a run, those that send files."""
    below = [pid for host in lab.hosts for pid in children(host.process.pid)]
    return [pid for pid in below if 'g["serve"]' in command_line(pid)]


OURS = ("plan.json", "result-node3.json", "usage.jsonl", "logs/fake/rank-0.out")
OURS += ("returned/rank-1.json", "checkpoints/step-99999999.pt")
ONLY_HERE = (
    "run.toml",
    "Run.TOML",
    "report.html",
    "state.json",
    "state-node1.json/x",
    "events.jsonl",
    "output.log",
)
ONLY_HERE += ("tracker-wandb.json", "Tracker-MLflow.JSON")


@pytest.mark.parametrize("path", [*OURS, *ONLY_HERE])
def test_no_host_writes_a_file_of_the_launcher(path, tmp_path):
    """Neither settings, which `rerun` would run here, nor a page for our browser, nor the id of
    another run of a tracker, which a resumed run would continue."""
    data = replies(json.dumps({"files": {path: 4}}).encode(), b'{"size": 4}') + b"evil"
    host = Recorded(data + replies(b"{}", b"{}"))
    with pytest.raises(Problem, match="a host must not send this file"):
        fetch_results(host, host_plan(tmp_path), "", tmp_path)
    assert list(tmp_path.iterdir()) == []
    if path in ONLY_HERE:  # nor what supervises a run, which writes the others
        host.left = service.MARKER + data
        with pytest.raises(Problem, match="a host must not send this file"):
            fetch_results(host, host_plan(tmp_path), "", tmp_path, ())


def test_a_file_that_became_shorter_while_it_was_read_is_not_kept(tmp_path):
    """Nor is what was to come after it given up."""
    files = b'{"files": {"a.txt": 3, "b.txt": 1}}'
    shorter = replies(files, b'{"size": 3}') + b"abc" + replies(b'{"error": "became shorter"}')
    host = Recorded(shorter + replies(b'{"size": 1}') + b"b" + replies(b"{}", b"{}"))
    assert "a.txt: became shorter" in str(fetch_results(host, host_plan(tmp_path), "", tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["b.txt"]


def test_a_host_says_which_file_was_cut_while_it_was_sent(tmp_path):
    """Its size is announced by then: the rest is filled up, so that others can follow."""
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 26)
    transport = TrackedTransport()
    with contextlib.closing(RpcClient(transport, "")) as client:
        client.order("send", folder=str(tmp_path), paths=["a.bin"])
        assert client.reply() == {"size": 1 << 26}
        os.truncate(tmp_path / "a.bin", 0)
        assert sum(map(len, client.receive(1 << 26))) == 1 << 26
        assert client.reply() == {"error": "became shorter while it was read"}
    transport.wait_for_end()


def test_a_host_sends_no_more_than_it_has_listed(tmp_path):
    """Beyond what logs may grow meanwhile, a disk would fill up."""
    much = MOST_BYTES * 2
    host = Recorded(replies(b'{"files": {"a.txt": 3}}', b'{"size": %d}' % much) + b"abc")
    with pytest.raises(Problem, match="have grown since they were listed, a.txt for example"):
        fetch_results(host, host_plan(tmp_path), "", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_good_run_stays_good_whatever_its_host_says_of_results(start_lab):
    """Who answers for files there lies: the run was done, its last line says so, and its code."""
    lab = start_lab(1)
    (lab.folder / "there").mkdir()
    mark = service.MARKER.decode().encode("unicode_escape").decode()
    lie = f"printf '{mark}5\\n[[[[['; exec sleep 1\n"  # sshd's bash reads it for the next program
    script = f"import os; open(os.path.expanduser('~/.bashrc'), 'w').write({lie!r})"
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}/there"))
    code, _, err = lab.result_of(hosts, "--", sys.executable, "-c", script)
    assert code == 0, err
    assert "the results are still on 127.0.0.2, in " in err
    assert "sent an invalid answer" in err
    assert err.splitlines()[-1].startswith("rackrun: done in")


def test_many_files_come_as_one_stream_and_the_odd_ones_are_named(tmp_path):
    """Names of any kind and links: what can come comes, byte for byte; the rest is named."""
    remote, local = tmp_path / "there", tmp_path / "here"
    (remote / "deep" / "er").mkdir(parents=True)
    local.mkdir()
    for number in range(500):
        (remote / "deep" / f"file {number}.txt").write_bytes(bytes([number % 256]) * number)
    (remote / "deep" / "er" / "größe.pt").write_bytes(os.urandom(700_000))
    (remote / "bad\nname").touch()
    (remote / "latin-\udce9").touch()
    (remote / "link").symlink_to("/etc/passwd")
    (remote / "plan.json").write_text('{"run_id": "another"}')
    os.mkfifo(remote / "fifo")
    transport = TrackedTransport()
    content = fetch_results(transport, host_plan(remote), "mine", local, kept=("plan.json",))
    assert len(content.files) == 501
    for path in content.files:
        assert (local / path).read_bytes() == (remote / path).read_bytes()
    assert str(content).startswith("501 files came back from fake; still on fake, in ")
    assert str(content).endswith(": 2 with odd names")
    (remote / "plan.json").write_text('{"run_id": "mine"}')
    assert str(fetch_results(transport, host_plan(remote), "mine", local)) == ""
    transport.wait_for_end()


LEFT = (
    "wandb/settings",
    "conftest.py",
    "test_it.py",
    "sitecustomize.py",
    ".envrc",
    ".env",
    "Makefile",
)
LEFT += (".git/config", "sub/.GIT/hooks/post-checkout", ".vscode/settings.json", ".mcp.json", "go")
LEFT += ("package.json", "sub/Package.JSON", "CMakeLists.txt", "requirements-dev.txt", "pytest.ini")
LEFT += ("page.html", "a.svg", "run.sh", "lib.so", "x.pyc", "notebook.ipynb", "model.pkl", "a.tar")
LEFT += ("pyproject.toml", "setup.cfg", "AGENTS.md", "mlruns/1/2/tags/conftest.py", "json.py/a.PY")
LEFT += ("CMakeUserPresets.json", "x-1.dist-info/entry_points.txt", "sub/tsconfig.app.json")
LEFT += ("kernel.json", "nodemon.json", "babel.config.json")
LEFT += ("docker-compose.yaml", "mlruns/1/2/params/mlflow.it_test.py", "wandb/run-1/files/x.yaml")
TAKEN = ("final.pt", "metrics.jsonl", "figures/loss.PNG", f"tensorboard/{EVENTS}", "table.csv")
TAKEN += ("wandb/offline-run-1-x/run-x.wandb", "wandb/offline-run-1-x/files/config.yaml")
TAKEN += ("mlruns/1/meta.yaml", "mlruns/1/2/metrics/train/loss", "mlruns/1/2/params/resolved.name")


@pytest.mark.security("HOST-3")
def test_nothing_comes_back_that_a_program_here_would_run_or_obey(tmp_path):
    """HOST-3: names and kinds are an allow-list; the rest stays on the host, and is named."""
    remote, local = tmp_path / "there", tmp_path / "here"
    local.mkdir()
    for path in (*LEFT, *TAKEN):
        (remote / path).parent.mkdir(parents=True, exist_ok=True)
        (remote / path).write_text(path)
        (remote / path).chmod(0o777)
    host = TrackedTransport()
    fetched = fetch_results(host, host_plan(remote), "", local)
    host.wait_for_end()
    files = [path for path in local.rglob("*") if path.is_file()]
    assert sorted(path.relative_to(local).as_posix() for path in files) == sorted(TAKEN)
    assert not any(os.access(path, os.X_OK) or path.stat().st_mode & 0o111 for path in files)
    left = f"{len(LEFT)} of kinds that are not fetched (.env, .envrc, .git/config and"
    assert left in str(fetched)
