"""A compromised host: the programs that we send there print what it wants."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rackrun.launcher.commands.rerun import read
from tests.lab.detached import DetachedLab
from tests.lab.hosts import Lab, wait_for_banner

WRAPPER = """\
import os, sys
mine, command = sys.argv[1], os.environ["SSH_ORIGINAL_COMMAND"]
if not os.path.exists(mine):
    os.execl("/bin/sh", "sh", "-c", command)
import importlib, tempfile
size, name = sys.stdin.buffer.readline().split()
archive = tempfile.NamedTemporaryFile()
archive.write(sys.stdin.buffer.read(int(size)))
archive.flush()
sys.path.insert(0, archive.name)
program = importlib.import_module(name.decode())
exec(open(mine).read(), vars(program))
program.serve()
"""

CHANGES = """\
import json
if "last_words" in globals():  # the program for runs
    true_find, true_processes, TrueReader = find, processes, RecordReader
    def find(run):
        found = true_find(run)
        return change_found(found) or found
    def processes(run):
        told = true_processes(run)
        return change_processes(told) or told
    class RecordReader(TrueReader):
        def pass_on(self, line):
            entry = json.loads(line)
            changed = change_entry(entry)
            if changed is None:
                super().pass_on(json.dumps(entry).encode())
            else:
                told = changed if isinstance(changed, bytes) else json.dumps(changed).encode()
                service.write(told)
def change_found(found): pass
def change_processes(told): pass
def change_entry(entry): pass
"""


class TakenOver(DetachedLab):
    """A run on a host that was taken over once it had begun."""

    def __init__(self, lab: Lab) -> None:
        super().__init__(lab)
        self.changes = lab.folder / "changes.py"
        self.detach(
            self.hosts, "--", "sh", "-c", 'echo here; echo hi > "$RACKRUN_RUN_FOLDER/final.pt"'
        )
        self.wait_until_clean(60)

    def says(self, code: str) -> None:
        """Put this text into every program that is sent there from now on."""
        self.changes.write_text(CHANGES + code)


@pytest.fixture
def taken(start_lab: Callable[[int], Lab]) -> Iterator[TakenOver]:
    lab = start_lab(0)
    wrapper = lab.folder / "wrapper.py"
    wrapper.write_text(WRAPPER)
    host = lab.start(extra=f"ForceCommand {sys.executable} {wrapper} {lab.folder}/changes.py\n")
    wait_for_banner(host.address, host.port)
    lab.trust()
    yield TakenOver(lab)


# -- our files ----------------------------------------------------------------------------------

CONFIG = '[core]\n\tfsmonitor = "touch {canary}; true"\n'


def entries(folder: str, files: str) -> str:
    """Return code that names another run folder for every attempt, and other files in it."""
    return f"""
def change_entry(entry):
    if "attempt" in entry:
        entry["attempt"]["folder"] = {folder!r}
        entry["attempt"]["plan"]["hosts"][0]["folder"] = {files!r}
    if "finish" in entry:
        entry["finish"]["folder"] = {folder!r}
"""


@pytest.fixture
def project(taken: TakenOver) -> Iterator[Path]:
    """Yield the user's working tree, whose runs/ holds a run of their own."""
    git = ["git", "-c", "user.name=me", "-c", "user.email=me@here"]
    (taken.home / "model.py").write_text("x = 1\n")
    for args in (["init", "-q"], ["add", "model.py"], ["commit", "-qm", "mine"]):
        subprocess.run([*git, *args], cwd=taken.home, check=True, stdout=subprocess.DEVNULL)
    mine = taken.home / "runs" / "20260101-000000-mine"
    mine.mkdir(parents=True)
    for name in ("final.pt", "plan.json"):
        (mine / name).write_text("mine")
    yield taken.home


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the files of the working tree and of .git, without those that git itself touches."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.name != "index")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


FOLDERS = {
    "the project": "/tmp/evil/x/..",
    "runs": "/tmp/evil/x/.",
    "git": "/tmp/evil/.git",
    "a hidden one": "/tmp/evil/.20260101-000000-x",
    "a run of ours": "/tmp/evil/20260101-000000-mine",
    "control characters": "/tmp/\x1b]0;x\x07/20260101-000000-x",
    "the root": "/",
    "nothing": "",
}


def test_attach_writes_nothing_into_the_working_tree(taken, project):
    """Wherever the host says that its run folder was: no command of its runs here, the next time
    that git is asked for anything, and no run that is here already is touched."""
    canary, evil = taken.lab.folder / "canary", taken.lab.folder / "evil"
    for name in ("config", ".git/config", "model.py", "final.pt", "launcher/__main__.py"):
        (evil / name).parent.mkdir(parents=True, exist_ok=True)
        (evil / name).write_text(CONFIG.format(canary=canary))
    before = files_of(project)
    for what, folder in FOLDERS.items():
        taken.says(entries(folder, str(evil)))
        code, _, err = taken.result_of("attach")
        assert "Traceback" not in err, what
        if what == "a run of ours":
            assert code == 0
            assert "is there already, and is not of this run" in err
        else:
            assert code == 75, what
            assert "127.0.0.2: its answer is not the record of a run" in err, what
        subprocess.run(["git", "status"], cwd=project, check=True, stdout=subprocess.DEVNULL)
        assert files_of(project) == before, what
    assert not canary.exists()


OFFERS = """
if "results" in globals():
    def results(folder, run_id, **rest):
        return {"files": dict.fromkeys(OFFERED, 4)}
    def send(folder, paths):
        for path in paths:
            reply({"size": 4})
            sys.stdout.buffer.write(b"evil")
            reply({})
        return {}
"""
OF_GIT = (".git/config", "logs/.GIT/hooks/post-checkout")
ELSEWHERE = ("../evil", "/tmp/evil", "x/../../evil", "checkpoints/step-99999999.pt")
ELSEWHERE += ("run.toml", "report.html", ".attached")


def test_of_the_files_of_a_host_only_results_come(taken, project, monkeypatch):
    """No checkpoint that a later run here would go on from, and nothing that git would obey.

    What `rerun` obeys is what was written down here when the run was started.
    """
    before = files_of(project)
    taken.says(f"OFFERED = {(*OF_GIT, 'final.pt')!r}\n{OFFERS}")
    code, _, err = taken.result_of("attach")
    assert code == 0, err
    came = {name: data for name, data in files_of(project).items() if name not in before}
    folder = taken.home / next(iter(came)).rpartition("/")[0]
    assert {path.name for path in folder.iterdir()} == {".attached", "final.pt", "run.toml"}
    assert (folder / "final.pt").read_bytes() == b"evil"
    assert "detach" in (folder / "run.toml").read_text()
    monkeypatch.setenv("HOME", str(taken.home))
    assert read([str(folder)])[1].launch == "ssh"
    (folder / "run.toml").write_text('launch = "local"\ncommand = ["touch", "canary"]\n')
    assert read([str(folder)])[1].launch == "ssh"
    (folder / "run.toml").write_bytes(came[str((folder / "run.toml").relative_to(taken.home))])
    for path in ELSEWHERE:
        taken.says(f"OFFERED = ({path!r},)\n{OFFERS}")
        _, _, err = taken.result_of("attach")
        assert "the results are still on 127.0.0.2" in err
        assert "Traceback" not in err
    assert {name for name in files_of(project) if name not in before} == set(came)


# -- our terminal -------------------------------------------------------------------------------

ESCAPE = "\x1b]0;PWNED\x07\u202e"
WORDS = f"""
ESCAPE = {ESCAPE!r}
def change_found(found):
    found["summary"]["name"] += ESCAPE
    found["folder"] += ESCAPE
    found["error"] = ESCAPE
    found["finish"].update(verdict="failed", cause=ESCAPE, advice=ESCAPE, traceback=ESCAPE)
    found["finish"].update(log=ESCAPE)
    for host in found["live"].get("hosts", ()):
        host["state"] += ESCAPE
def change_entry(entry):
    for name in ("note", "error"):
        if name in entry:
            entry[name] = ESCAPE
    if "attempt" in entry:
        entry["attempt"]["name"] = ESCAPE
        service.write(json.dumps(entry | {{"age": 0}}).encode())
        service.write(json.dumps({{"note": ESCAPE}}).encode())
    if "finish" in entry:
        change_found({{"summary": {{"name": ""}}, "folder": "", "live": {{}}, **entry}})
"""


def test_no_word_of_a_host_moves_the_cursor(taken):
    """Names, notes, causes, advice, paths: every character arrives, and none is obeyed."""
    taken.says(WORDS)
    for verb in ("status", "attach", "stop"):
        code, out, err = taken.result_of(verb)
        assert "PWNED" in out + err, (verb, out, err)
        assert not set(out + err) & set(ESCAPE) - set("]0;PWNED"), (verb, out, err)
        assert "Traceback" not in err, err


# -- nonsense -----------------------------------------------------------------------------------

FOUND = ("return [1]", "send(b'[' * 200_000)", "found['summary']['run'] = '*'")
ENTRIES = ("return {}", "return b'[' * 200_000", "return {'event': ['HostLost', {'text': 'x'}]}")
NEGATIVE = "return {'output': [0, 0, 'out', -5]}"


def test_what_no_program_of_ours_would_say_is_one_line(taken):
    """69 at the start, 75 in between, with the host's name, at once; the tables of all that is
    refused are in tests/fuzz."""
    for change in FOUND:
        taken.says(f"def change_found(found):\n    {change}\n")
        code, out, err = taken.result_of("status")
        assert (code, "Traceback" in err) == (69, False), (change, err)
        assert "127.0.0.2" in out + err, change
    taken.says("def change_found(found):\n    found['summary']['hosts'] = []\n")
    code, _, err = taken.result_of("status")
    assert (code, "Traceback" in err) == (0, False), err
    taken.says("def change_processes(told):\n    told['processes'] = [{}]\n")
    code, out, _ = taken.result_of("status")
    assert (code, "not reached: sent an invalid answer" in out) == (0, True), out
    for change in (*ENTRIES, NEGATIVE):
        rest = f"    if 'attempt' not in entry: {change}\n"
        taken.says(f"def change_entry(entry):\n{rest}")
        code, _, err = taken.result_of("attach")
        assert (code, "Traceback" in err) == (75, False), (change, err)
        (line,) = [line for line in err.splitlines() if line.startswith("error")]
        assert "127.0.0.2: " in line, change
