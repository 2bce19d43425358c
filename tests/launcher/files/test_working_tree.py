"""The code that a launch compares and brings: what is odd about it is said, and no file is kept."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.commands import upload
from rackrun.launcher.commands.settings import SshOptions
from rackrun.launcher.files.working_tree import (
    WorkingTree,
    remarks_on,
    with_installed,
    with_untracked,
    working_tree,
)
from rackrun.launcher.remote.files import INSTALLED
from rackrun.launcher.run.hosts import Host
from tests.lab.hosts import Lab
from tests.lab.needs import need
from tests.lab.run import write
from tests.lab.waiting import until

DIGESTS = """
import json
from pathlib import Path
from rackrun.launcher.files.working_tree import WorkingTree, with_installed
print(json.dumps(with_installed(WorkingTree(Path.cwd(), {})).files))
"""


def test_what_was_brought_can_be_brought_on(tmp_path):
    """As from the host of `--on`, where rackrun has come without a package around it."""
    code = with_installed(WorkingTree(tmp_path, {}))
    for path in code.files:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(code.source(path), tmp_path / path)
    env = {**os.environ, "PYTHONPATH": str(tmp_path / INSTALLED)}
    words = (sys.executable, "-P", "-c", DIGESTS)
    on = subprocess.run(words, cwd=tmp_path, env=env, check=True, capture_output=True, text=True)
    assert json.loads(on.stdout) == code.files


def test_code_that_cannot_be_read_is_named(start_lab):
    """An unreadable file, and a repository within ours, are reported before any copy."""
    lab = start_lab(1)
    source = lab.folder / "project"
    subprocess.run(["git", "init", "-q", source, "-b", "main"], check=True)
    subprocess.run(["git", "-C", source, "init", "-q", "nested"], check=True)
    commit = ["-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "--allow-empty", "-m", "x"]
    subprocess.run(["git", "-C", source / "nested", *commit], check=True)
    (source / "model.py").touch()
    subprocess.run(["git", "-C", source, "add", "model.py"], check=True)
    (source / "model.py").chmod(0)
    hosts = str(lab.write_hosts(f"python={lab.cheap_python()} workdir={lab.folder}/there"))
    mortal = ("setpriv", "--bounding-set=-dac_override,-dac_read_search") * (os.geteuid() == 0)
    code, _, err = lab.result_of("--sync", hosts, "--", "true", cwd=source, before=mortal)
    assert code == 64
    assert "model.py: Permission denied; add what the ranks do not need to .gitignore" in err
    assert not (lab.folder / "there").exists()


def test_much_code_is_named_before_it_is_read(tmp_path):
    """A data set that git does not ignore takes minutes; the biggest file is named, with advice."""
    for name, size in (("small.py", 10), ("data.tar", 3 * 10**9), ("other.tar", 10**9)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    (remark,) = remarks_on(tmp_path, ["small.py", "data.tar", "other.tar", "gone"])
    assert remark.startswith("the code has 4.0 GB, of which data.tar has 3.0 GB")
    assert remark.endswith("add it to .gitignore")
    assert remarks_on(tmp_path, ["small.py"]) == []


def test_what_git_refuses_is_said_in_its_words(tmp_path, monkeypatch):
    """A repository of another owner, as in a container: also from a folder in it."""
    need("root")
    monkeypatch.setenv("HOME", str(tmp_path))
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    subprocess.run(["git", "init", "-q", project], check=True)
    os.chown(project, 1234, 1234)
    os.chown(project / ".git", 1234, 1234)
    lines: list[str] = []
    assert working_tree(project / "src", lines.append) is None
    (line,) = lines
    assert "git: detected dubious ownership in repository at" in line
    assert line.endswith(f"; type: git config --global --add safe.directory {project}")


def test_a_log_that_grows_is_no_code(tmp_path):
    """`./run-ssh --sync ... | tee train.log` in the working tree: left out, unless asked for."""
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "model.py").touch()
    lines: list[str] = []
    with subprocess.Popen(["tee", tmp_path / "train.log"], stdin=subprocess.PIPE) as tee:
        until((tmp_path / "train.log").exists, "tee has opened its file", 20)
        code = working_tree(tmp_path, lines.append)
        assert code is not None
        assert list(with_untracked(code, [], lines.append).files) == ["model.py"]
        assert lines == ["left out: train.log: a program is writing it; add it to .gitignore"]
        asked = with_untracked(code, ["train.log"], lines.append)
        assert list(asked.files) == ["model.py", "train.log"]
        assert tee.stdin is not None
        tee.stdin.close()


def own_repository(lab: Lab) -> tuple[Path, list[str]]:
    """Make a user's project without our .gitignore, and two hosts with a clone each."""
    source = lab.folder / "project"
    source.mkdir()
    (source / "model.py").write_text("x = 1\n")
    lines = [f"python={lab.cheap_python()} workdir={lab.folder}/there-{n}" for n in (1, 2)]
    (source / "hosts.txt").write_text(lab.write_hosts(*lines).read_text())
    git(source, "init", "-q", "-b", "main")
    git(source, "add", ".")
    git(source, "-c", "user.name=x", "-c", "user.email=x", "commit", "-q", "-m", "x")
    for number in (1, 2):
        git(lab.folder, "clone", "-q", str(source), f"there-{number}")
    with (source / "hosts.txt").open("a") as file:
        file.write("# which of them are mine is nobody else's business\n")
    return source, ["hosts.txt", "--", sys.executable, "-c"]


def git(folder: Path, *args: str) -> None:
    subprocess.run(["git", "-C", folder, *args], check=True)


def test_in_a_project_of_ones_own_what_we_write_and_read_is_no_code(start_lab):
    """Runs, hosts.txt, logs that grow: a second launch, --sync and --max-restarts go on."""
    lab = start_lab(2)
    source, args = own_repository(lab)
    (source / "new.py").touch()
    code, _, err = lab.result_of(*args, "pass", cwd=source)
    assert code == 0, err
    assert "warning: git does not track new.py: " in err
    assert "type: git add new.py" in err
    (source / "new.py").unlink()
    for options in (("--sync",), ("--max-restarts", "1")):
        with (source / "train.log").open("w") as log:
            log.write("a line of an earlier time\n")
            log.flush()
            more = {"stdout": log, "stderr": log}
            fails = "raise SystemExit(3)" if options == ("--max-restarts", "1") else "pass"
            launcher = lab.run_ssh(*options, *args, fails, cwd=source, **more)
            code = launcher.wait(timeout=120)
        text = (source / "train.log").read_text()
        assert code == (3 if options == ("--max-restarts", "1") else 0), text
        assert ("restart 1 of 1" in text) == (options == ("--max-restarts", "1"))
        assert "left out" not in text
        assert not (lab.folder / "there-1" / "train.log").exists()
    output = subprocess.run(["git", "-C", source, "status", "--porcelain"], capture_output=True)
    assert output.stdout.decode() == " M hosts.txt\n?? train.log\n"


RANK_1 = "runs/2*/logs/*/*/rank-1.out"
EDIT = """\
import os, pathlib, time
edited = pathlib.Path({!r})
print("runs", flush=True)
while not edited.exists():
    time.sleep(0.02)
raise SystemExit(3)
"""


def edited_meanwhile(lab: Lab, source: Path, words: list[str]) -> str:
    """Return the messages of a run that fails after model.py is edited, and is started again."""
    mark = lab.folder / "edited"
    before = len(list(source.glob(RANK_1)))
    launcher = lab.run_ssh("--max-restarts", "1", *words, EDIT.format(str(mark)), cwd=source)
    until(lambda: len(list(source.glob(RANK_1))) > before, "it runs", 60)
    (source / "model.py").write_text("x = 2\n")
    mark.touch()
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 3, err
    mark.unlink()
    return str(err)


def test_an_edit_while_a_run_goes_on_keeps_its_restarts(start_lab):
    """Hosts are held to the code of the first attempt; where they share our folder, it is said."""
    lab = start_lab(2)
    source, args = own_repository(lab)
    err = edited_meanwhile(lab, source, args)
    assert "rackrun: restart 1 of 1" in err
    assert "left out" not in err
    code, _, err = lab.result_of(*args, "pass", cwd=source)
    assert code == 78, "another launch is held to the code of now"
    assert "code: model.py; copy it from here with --sync" in err
    git(source, "checkout", "-q", "model.py")
    lines = [f"python={lab.cheap_python()} workdir={source}"] * 2
    (source / "hosts.txt").write_text(lab.write_hosts(*lines).read_text())
    err = edited_meanwhile(lab, source, args)
    assert "rackrun: restart 1 of 1" in err
    assert "left out" not in err
    assert "warning: 127.0.0.2, 127.0.0.3: code: model.py" in err


def test_a_host_with_other_code_than_the_others_is_left_out_of_a_restart(start_lab):
    """The code of one host changed, and only there: the attempt after goes on without it."""
    lab = start_lab(2)
    source, args = own_repository(lab)
    mark = lab.folder / "edited"
    options = ("--max-restarts", "1", "--min-hosts", "1")
    launcher = lab.run_ssh(*options, *args, EDIT.format(str(mark)), cwd=source)
    until(lambda: any(source.glob(RANK_1)), "it runs", 60)
    (lab.folder / "there-2" / "model.py").write_text("x = 3\n")
    mark.touch()
    _, err = launcher.communicate(timeout=120)
    assert launcher.returncode == 3, err
    assert "left out: 127.0.0.3: code: model.py; copy it from here with --sync" in err


@pytest.mark.parametrize(
    "path, why",
    [
        ("", "git does not know this folder; type: git init"),
        ("/nowhere", "git is not installed here; type: sudo apt-get install git"),
    ],
)
def test_a_folder_without_git_is_refused_with_advice(tmp_path, monkeypatch, capsys, path, why):
    """Hosts whose line names python= would get nothing, which is refused; others get rackrun."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", path or os.environ["PATH"])
    assert working_tree(tmp_path, print) is None
    with pytest.raises(UsageError, match=f"^--sync: {re.escape(why)}$"):
        upload._files_to_copy(None, [Host("gpu01", python="/opt/python")], SshOptions())
    brought = upload._files_to_copy(None, [Host("gpu01")], SshOptions())
    assert all(name.startswith(f"{INSTALLED}/") for name in brought.files)
    assert f"only rackrun itself is copied: {why}\n" in capsys.readouterr().err


SECRET = """
.env prod.env .env.local .envrc kaggle.json conf/.kaggle/x token.json hf_token HF_TOKEN.txt key.pem
service-account.json service_account_prod.json client_secret_12.json wandb-api-key.txt api_keys.json
openai.key access_key.json terraform.tfvars x.tfstate .pgpass .boto rclone.conf .netrc auth.json
id_ed25519 id_rsa.pub my-credentials.csv credential.json private_key.txt db_password.txt .npmrc
.aws/config .docker/config.json .vault-token cert.p12 secrets.yaml deploy.secret gh-token kubeconfig
oauth.json jwt.txt bearer.txt cookies.txt session_cookie vault.json authorized_keys
github_pat.txt kube.config
"""
PLAIN = """
train.py tokens.txt tokenizer.json special_tokens_map.json added_tokens.json vocab.json keys.py
keyboard.csv environment.yml data.csv model.pt tokenize.py monkey.txt auth/login.py secretary.csv
"""


@pytest.mark.security("SSH-9")
def test_names_of_secrets_are_known_and_others_are_not(tmp_path):
    """SSH-9: what programs call their secrets is left out of --sync; vocabularies are not."""
    write(tmp_path, dict.fromkeys((SECRET + PLAIN).split(), ""))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    code = working_tree(tmp_path, print)
    assert sorted(with_untracked(code, [], print).files) == sorted(PLAIN.split())
