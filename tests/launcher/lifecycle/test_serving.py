"""Shards of this machine are served to the hosts of a run, for exactly as long as it lasts."""

import hashlib
import json
import os
import re
import signal
import socket
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from rackrun.errors import UsageError
from rackrun.launcher.lifecycle.serving import folder_to_serve, is_here, own_address
from rackrun.launcher.run.job import Command, TaskWork
from rackrun.launcher.run.settings import Serving
from rackrun.shards.index import Manifest, Shard, Split
from tests.lab import warm
from tests.lab.data import drawn_shards
from tests.lab.hosts import ROOT, Lab
from tests.lab.servers import hashed, nginx_of, serving_tls
from tests.lab.waiting import until

# Stands in for `-m rackrun.training TASK` on hosts: reads its data as a rank does, prints its URL.
READER = """\
import re, sys, time, urllib.request
data = re.search("--data[= ]([^ ]+)", " ".join(sys.argv))[1]
sys.exit() if "check" in sys.argv else None
print(sys.argv[1], file=sys.stderr)
print(data, len(urllib.request.urlopen(data + "toy-train-000000.tar").read()), flush=True)
sys.exit(7) if "--fail" in sys.argv else None
time.sleep(999) if "--linger" in sys.argv else None
"""


# Finds what else is in `rackrun` behind it on the path.
ALL_ELSE = "import pkgutil; __path__ = pkgutil.extend_path(__path__, __name__)\n"


def give_shards(folder: Path) -> Path:
    """Make what passes for shards, a folder to work in, and what stands in for training."""
    shards, package = folder / "shards", folder / "stand-in" / "rackrun" / "training"
    shards.mkdir()
    (folder / "code").mkdir()
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text(ALL_ELSE)
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(READER)
    (shards / "toy-train-000000.tar").write_bytes(bytes(10240))
    digest = hashlib.sha256(bytes(10240)).hexdigest()
    shard = Shard("toy-train-000000.tar", 1, 10240, digest)
    split = Split("train", 1, "toy-train.index.npy", digest, (shard,))
    (shards / "dataset.json").write_bytes(Manifest("toy", ("cat",), (split,)).serialize())
    return shards


def with_stand_in(shards: Path) -> dict[str, str]:
    """Return the variable with which `python -m rackrun.training` is the stand-in."""
    return {"PYTHONPATH": f"{shards.parent / 'stand-in'}:{ROOT}"}


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Return shards on the launcher's machine."""
    return give_shards(tmp_path)


def hosts_of(lab: Lab, shards: Path) -> str:
    """Write hosts.txt of cheap hosts with the stand-in as their code."""
    code, path = shards.parent / "code", with_stand_in(shards)["PYTHONPATH"]
    settings = f"python={lab.cheap_python()} workdir={code} env=PYTHONPATH={path}"
    return str(lab.write_hosts(settings))


def said_by_ranks(shards: Path) -> set[str]:
    """Return the lines that the ranks of the only run printed."""
    logs = (shards.parent / "code" / "runs").glob("2*/logs/*/*/rank-*.out")
    return {line for log in logs for line in log.read_text().splitlines()}


def test_other_machines_read_the_launchers_shards_by_themselves(pair, shards):
    """A folder here becomes a URL at the address on the way to the hosts, until the run ends."""
    args = (hosts_of(pair, shards), "catdog", "--data", str(shards))
    in_code = {"cwd": shards.parent / "code", "env": with_stand_in(shards)}
    code, out, err = pair.result_of("--serve-native", *args, **in_code)
    assert code == 0, err
    assert "rackrun: serving" in err
    (line,) = said_by_ranks(shards)
    assert line.startswith("http://10.77.0.1:")
    assert line.endswith("/ 10240")
    assert nginx_of(shards) == []


@pytest.mark.parametrize("task", ["tasks/flowers.py", "tasks.flowers"])
def test_an_own_task_in_a_folder_reads_served_shards_under_its_own_name(start_lab, shards, task):
    """Ranks are started with the task as typed, although its data are elsewhere now."""
    lab, code = start_lab(1), shards.parent / "code"
    (code / "tasks").mkdir()
    (code / "tasks" / "flowers.py").write_text("TASK = None\n")
    args = (hosts_of(lab, shards), task, "--data", str(shards))
    options = ("--serve", "--serve-native")
    exit_code, _, err = lab.result_of(*options, *args, cwd=code, env=with_stand_in(shards))
    assert exit_code == 0, err
    logs = (code / "runs").glob("2*/logs/*/*/rank-*.err")
    assert {log.read_text() for log in logs} == {f"{task}\n"}


def test_a_host_that_cannot_read_the_shards_is_named_before_the_start(pair, shards):
    """A firewall between one host and the server ends the launch with 65 and that host's name."""
    pair.firewall(2, "-p", "tcp", "-s", "10.77.0.1", "--sport", "18080", "-j", "DROP")
    args = (hosts_of(pair, shards), "catdog", "--data", str(shards))
    in_code = {"cwd": shards.parent / "code", "env": with_stand_in(shards)}
    code, out, err = pair.result_of("--serve-native", "--serve-port", "18080", *args, **in_code)
    assert code == 65, err
    assert "node2: shards: http://10.77.0.1:18080/" in err
    assert "node1: shards" not in err
    assert said_by_ranks(shards) == set()
    assert nginx_of(shards) == []


def test_a_rank_that_cannot_read_ends_the_run_before_any_step(pair, tmp_path):
    """Real ranks on two hosts, one cut off from the data: its name, 65, and no step."""
    shards = drawn_shards(tmp_path)
    hosts = str(pair.write_hosts(f"python={pair.cheap_python(trains=True)} workdir={ROOT}"))
    pair.firewall(2, "-p", "tcp", "-s", "10.77.0.1", "--sport", "18081", "-j", "REJECT")
    task = ("catdog", "--recipe", "demo", "--data", str(shards), *QUICK)
    options = (
        "--serve-native",
        "--serve-port",
        "18081",
        "--ignore-check",
        "shards",
        "--ignore-check",
        "code",
    )
    code, out, err = pair.result_of(*options, "--runs", str(tmp_path / "runs"), hosts, *task)
    assert code == 65, err
    assert "rank 1 on node2" in err, err
    assert "http://10.77.0.1:18081/" in err
    (run,) = (tmp_path / "runs").glob("2*")
    ended = json.loads((run / "result.json").read_text())
    assert (ended["host"], ended["rank"], ended["exit_code"]) == ("node2", 1, 65)
    assert not (run / "metrics.jsonl").exists()


def test_a_detached_run_is_served_until_it_ends(start_lab, tmp_path):
    """--detach returns at the first step; the others read from the server, which ends with them."""
    lab, shards = start_lab(1), drawn_shards(tmp_path)
    python = lab.cheap_python(trains=True)
    hosts = str(lab.write_hosts(f"python={python} workdir={ROOT} slots=1"))
    task = ("catdog", "--recipe", "demo", "--data", str(shards), "--epochs", "9", *QUICK[2:])
    options = ("--serve", "--serve-native", "--detach", "--runs", str(tmp_path / "runs"))
    code, _, err = lab.result_of(*options, "--ignore-check", "code", hosts, *task)
    assert code == 0 and "detached; to see it" in err, err
    (run,) = (tmp_path / "runs").glob("2*")
    attached = lab.run_ssh("--plain", str(run), verb=("attach",))
    out, err = attached.communicate(timeout=120)
    assert attached.returncode == 0 and "epoch 9/9" in out, (out, err)
    until(lambda: nginx_of(shards) == [], "nginx is gone", 20)


QUICK = ("--epochs", "1", "--batch-size", "4", "--device", "cpu", "--no-tensorboard")


@pytest.mark.parametrize(
    ("wish", "sent", "code"),
    [("--fail", None, 7), ("--linger", signal.SIGINT, 130), ("--linger", signal.SIGKILL, -9)],
    ids=["a rank fails", "Ctrl-C", "kill -9"],
)
def test_the_server_ends_with_the_run(start_lab, shards, wish, sent, code):
    """However a run ends, no nginx is left, and its port is free. SSH-6: it never saw a secret."""
    lab = start_lab(2)
    args = (hosts_of(lab, shards), "catdog", "--data", str(shards), wish)
    options = ("--serve", "--serve-native", "--secret", "TOKEN")
    env = {**with_stand_in(shards), "TOKEN": "canary-bird"}
    process = lab.run_ssh(*options, *args, cwd=shards.parent / "code", env=env)
    if sent:
        until(lambda: said_by_ranks(shards) != set(), "the ranks read their shards", 60)
        homes = Path(tempfile.gettempdir()).glob("rackrun-nginx-*")
        kept = [path.read_bytes() for home in homes for path in home.rglob("*") if path.is_file()]
        assert kept and not any(b"canary-bird" in data for data in kept)
        process.send_signal(sent)
    _, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    until(lambda: nginx_of(shards) == [], "nginx is gone", 20)
    (url,) = {line.split()[0] for line in said_by_ranks(shards)}  # a rank may end within its line
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", urlsplit(url).port))


def test_a_look_at_the_hosts_reads_the_shards_too(start_lab, shards):
    """--check and --dry-run serve while they look; a server that exists is asked by every host."""
    lab = start_lab(2)
    args = (hosts_of(lab, shards), "catdog", "--data")
    code, out, err = lab.result_of("--check", "--serve", "--serve-native", *args, str(shards))
    assert (code, "shards all hosts toy" in " ".join(out.split())) == (0, True), out + err
    code, out, err = lab.result_of("--dry-run", "--serve", "--serve-native", *args, str(shards))
    assert (code, "--data http://127.0.0.1:" in out) == (0, True), out + err
    code, out, err = lab.result_of("--check", *args, "http://127.0.0.1:9/")
    refused = "127.0.0.1:9/dataset.json: byte 0: Connection refused"
    assert (code, "".join(out.split()).count("".join(refused.split()))) == (65, 1), out
    assert nginx_of(shards) == []


def test_hosts_show_who_they_are_before_the_start_as_well(start_lab, shards, keys):
    """A server that asks for a password over TLS, or for certificates, is read all the same."""
    lab, folder = start_lab(2), shards.parent / "code"
    (folder / "secret").write_text("reader:long and random\n")
    (folder / "users").write_text(hashed("reader:long and random\n"))
    trust = ("--env", f"RACKRUN_CA={keys.authority}")
    options = (f"RACKRUN_CERTIFICATE={keys.client_certificate}", f"RACKRUN_KEY={keys.client_key}")
    password = f"auth_basic shards;\nauth_basic_user_file {folder}/users;\n"
    client = f"ssl_client_certificate {keys.authority};\nssl_verify_client on;\n"
    for lines, ours in (
        (password, ("--env", "RACKRUN_CREDENTIALS=secret")),
        (client, ("--env", options[0], "--env", options[1])),
    ):
        with serving_tls(shards, keys, lines, folder / "users") as url:
            args = (hosts_of(lab, shards), "catdog", "--data", url)
            code, out, err = lab.result_of("--check", *trust, *ours, *args)
            assert (code, "shards all hosts toy" in " ".join(out.split())) == (0, True), out + err
            code, out, err = lab.result_of("--check", *trust, *args)
            assert (code, "status 40" in " ".join(out.split())) == (65, True), out + err
    with serving_tls(shards, keys) as url:
        args = (hosts_of(lab, shards), "catdog", "--data", url)
        code, out, err = lab.result_of("--check", *args)
        message = " ".join(out.split())  # the table folds long lines
        assert (code, "not to be trusted" in message) == (65, True), out + err
        assert "export RACKRUN_CA=FILE" in message


def test_run_local_serves_when_asked(start_lab, shards):
    """`./run-local --serve` reads its own shards over HTTP, below a path that only it knows."""
    python = start_lab(1).cheap_python()
    done = warm.run(
        *("-m", "rackrun", "./run-local", "--python", python, "--serve", "--serve-native"),
        *("--plain", "catdog", f"--data={shards}"),
        start=warm.Launcher,
        cwd=shards.parent / "code",
        env={**os.environ, **with_stand_in(shards)},
    )
    assert done.returncode == 0, done.stderr
    (line,) = said_by_ranks(shards)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{22}/ 10240", line)
    assert nginx_of(shards) == []


HERE, ELSEWHERE = ["127.0.0.2"], ["127.0.0.2", "192.0.2.1"]


@pytest.mark.parametrize(
    ("serving", "hosts", "data", "is_served"),
    [
        (Serving(), HERE, "{}", False),
        (Serving(), ELSEWHERE, "{}", True),
        (Serving(), [""], "{}", True),
        (Serving(serve=True), HERE, "{}", True),
        (Serving(no_serve=True), ELSEWHERE, "{}", False),
        (Serving(), ELSEWHERE, "{}@2", True),  # a version, as a part of its folder
        (Serving(), ELSEWHERE, "http://10.0.0.1:8080/", False),
        (Serving(), ELSEWHERE, "no/such/folder", False),  # only hosts have it
    ],
)
def test_when_a_folder_is_served(shards, serving, hosts, data, is_served):
    """For other machines by itself, else when asked to, and never with --no-serve."""
    work = TaskWork("catdog", ("--data", data.format(shards)))
    assert folder_to_serve(work, serving, hosts) == (shards if is_served else None)


def test_what_a_command_reads_is_not_served(shards):
    """Whatever it calls --data."""
    command = Command(("train.py", "--data", str(shards)))
    assert folder_to_serve(command, Serving(), ELSEWHERE) is None


def test_the_address_to_serve_at_is_the_one_on_the_way_to_the_hosts():
    """Loopback for hosts that are this machine; behind a gateway it must be given."""
    assert own_address(HERE) == "127.0.0.1"
    assert is_here("127.0.0.9")
    assert is_here("::1")
    assert not is_here("192.0.2.1")
    with pytest.raises(UsageError, match="--serve-address"):
        own_address(["127.0.0.1", ""])
