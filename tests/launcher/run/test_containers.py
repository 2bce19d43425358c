"""Ranks in containers: a real Docker daemon, and an image that borrows this machine's programs."""

import grp
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.lab.detached import writers_of
from tests.lab.hosts import Lab, root, user
from tests.lab.refusal import Refusal
from tests.lab.run import run
from tests.lab.servers import BORROWED, docker, rank_image
from tests.lab.waiting import until

Labs = Callable[[int], Lab]

SHORT = ("--lease-seconds", "3", "--checkpoint-seconds", "2")
MARK = f"a rank of {os.getpid()}"
AT_ONCE = ("--detach-seconds", "0")
SLEEP = (sys.executable, "-c", f"import time; time.sleep(999) # {MARK}")


@pytest.fixture(scope="module")
def image(daemon: None) -> Iterator[str]:
    """Yield an image that holds links only: this machine's folders are mounted into it."""
    with rank_image() as name:
        yield name


@pytest.fixture
def hosts(start_lab: Labs, image: str) -> tuple[Lab, tuple[str, ...]]:
    """Return two hosts that find the Docker daemon, and the options that name the image."""
    lab = start_lab(2)
    for host in lab.hosts:
        bashrc = host.folder / ".bashrc"
        bashrc.write_text(f"export DOCKER_HOST='{os.environ.get('DOCKER_HOST', '')}'\n")
    volumes = [arg for folder in BORROWED for arg in ("--volume", f"{folder}:{folder}:ro")]
    path = lab.write_hosts(f"python={lab.cheap_python()}")
    return lab, ("--image", image, *volumes, *SHORT, str(path))


def containers() -> list[str]:
    output = docker("ps", "--all", "--quiet", "--filter", "name=rackrun-")
    return output.stdout.decode().split()


def test_real_torchrun_makes_one_world_of_two_containers(hosts):
    """Gloo meets over the host's network; results, logs and codes are those of any run.

    Each container has a home of its own, empty at first.
    """
    lab, args = hosts
    script = lab.folder / "reduce.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "inside = os.path.exists('/.dockerenv') and not os.listdir(os.path.expanduser('~'))\n"
        "open(os.path.expanduser('~/cache-' + os.environ['RANK']), 'w').close()\n"
        "if dist.get_rank() == 0:\n"
        "    open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write(str(total.item()))\n"
        "print('rank', dist.get_rank(), 'of', int(total), 'contained', inside, flush=True)\n"
        "dist.destroy_process_group(); os._exit(0)\n"
    )
    lab.write_hosts(f"python={sys.executable}")
    code, out, err = lab.result_of(*args, "--", "python", str(script))
    assert code == 0, err
    for rank in range(2):
        assert f"rank {rank} of 2 contained True" in out
    (folder,) = (lab.folder / "runs").glob("2*")
    assert (folder / "final.pt").read_text() == "2.0"
    assert containers() == []


@pytest.mark.security("RUN-1")
def test_exit_codes_and_secrets_are_those_of_the_rank(hosts):
    """The rank's own code comes through; no container has its secret in its words, nor a right."""
    lab, args = hosts
    code = "import os, sys, time; time.sleep(3); sys.exit(len(os.environ['TOKEN']))"
    process = lab.run_ssh(
        "--secret", "TOKEN", *args, "--", sys.executable, "-c", code, env={"TOKEN": "secret-of-9"}
    )
    until(lambda: len(containers()) == 2, "two containers run", 60)
    described = docker("inspect", *containers()).stdout
    assert b"secret-of-9" not in described
    for each in json.loads(described):
        assert each["HostConfig"]["CapDrop"] == ["ALL"]
        assert "no-new-privileges" in each["HostConfig"]["SecurityOpt"]
    process.communicate(timeout=60)
    assert process.returncode == len("secret-of-9")
    assert containers() == []


LONG = [pytest.param(fault, marks=pytest.mark.long) for fault in ("docker run", "launcher")]


@pytest.mark.parametrize("fault", ["Ctrl-C", "agent", *LONG])
def test_no_container_outlives_its_run(hosts, fault):
    """Whatever is killed, all processes of the run and its containers are gone."""
    lab, args = hosts
    process = lab.run_ssh(*args, "--", *SLEEP)
    until(lambda: len(ranks()) == 2, "two ranks sleep", 60)
    if fault == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    elif fault == "launcher":
        process.kill()
    elif fault == "agent":
        first = json.loads(docker("inspect", containers()[0]).stdout)[0]["State"]["Pid"]
        os.kill(first, signal.SIGKILL)
    else:
        os.kill(processes("docker\0run\0", str(lab.folder))[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    codes = {"Ctrl-C": 130, "launcher": -signal.SIGKILL}
    assert process.returncode == codes.get(fault, 75), err
    until(lambda: not containers() and not ranks(), "nothing is left", 20)
    plan = json.loads(next(lab.folder.glob("runs/2*/plan.json")).read_text())
    until(lambda: not any(Path(host["scratch"]).exists() for host in plan["hosts"]), "swept", 20)


def ranks() -> list[int]:
    return processes(f"# {MARK}\0")


def processes(*args: str) -> list[int]:
    """Return the processes with these words, without launchers."""
    result = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(arg in line for arg in args) and "-m\0launcher" not in line:
            result.append(int(entry.name))
    return result


def test_no_container_outlives_a_detached_run(hosts):
    """Without its controller: containers, ranks and folders are gone, and `stop` says so."""
    lab, args = hosts
    home = {"HOME": str(lab.folder / "home")}
    code, run, err = lab.result_of("--detach", *AT_ONCE, *args, "--", *SLEEP, env=home)
    assert code == 0, err
    until(lambda: len(ranks()) == 2, "two ranks sleep", 60)
    (events,) = lab.folder.glob("runs/2*/events.jsonl")
    os.kill(writers_of(events)[0], signal.SIGKILL)
    until(lambda: not containers() and not ranks(), "nothing is left", 20)
    code, _, err = lab.result_of(run.strip(), verb=("stop",), env=home)
    assert code == 0, err
    assert "2 of 2 hosts clean" in err


def test_an_account_of_no_rights_has_its_containers(account, image):
    """Not root, but let in by Docker: ranks are that account, and so is what they write."""
    lab, args = account, hosts_of(account, image)
    code = (
        "import os; print('uid', os.getuid(), os.environ['USER'], flush=True)\n"
        "open('made', 'w').close()\n"
        "open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write('weights')\n"
    )
    ended, out, err = lab.result_of(*args, "--", sys.executable, "-c", code)
    assert ended == 0, err
    made = lab.hosts[1].folder / "work" / "made"
    assert made.owner() == user()
    assert f"uid {made.stat().st_uid} {user()}" in out
    assert next(lab.folder.glob("runs/2*/final.pt")).read_text() == "weights"
    process = lab.run_ssh(*args, "--", *SLEEP)
    until(lambda: len(ranks()) == 2, "two ranks sleep", 60)
    process.kill()
    process.communicate()
    until(lambda: not containers() and not ranks(), "nothing is left", 20)


def test_an_account_that_docker_does_not_know_is_named(account, image):
    """No right to ask the daemon: 78 with that, for each host."""
    lab, args = account, hosts_of(account, image)
    root("usermod", "--groups", "", user())
    code, _, err = lab.result_of(*args, "--", "true")
    assert code == 78
    assert "127.0.0.2, 127.0.0.3: image: docker does not answer" in err
    assert "Traceback" not in err


def hosts_of(lab: Lab, image: str) -> tuple[str, ...]:
    """Return the options of a launch on two hosts whose account may use Docker."""
    name = os.environ.get("DOCKER_HOST", "").removeprefix("unix://") or "/var/run/docker.sock"
    socket = Path(name)
    root("usermod", "--groups", grp.getgrgid(socket.stat().st_gid).gr_name, user())
    if "rackrun-docker-" in socket.parent.name:
        socket.parent.chmod(0o711)  # the daemon of these tests
    for host in lab.ready(2).hosts:
        (host.folder / ".bashrc").write_text(f"export DOCKER_HOST='unix://{socket}'\n")
        (host.folder / "work").mkdir()
        shutil.chown(host.folder / "work", user())
    settings = f"python={lab.cheap_python()} workdir=work"
    lines = [f"{user()}@{host.address}:{host.port} {settings}\n" for host in lab.hosts]
    (lab.folder / "hosts.txt").write_text("".join(lines))
    folders = [*BORROWED, str(lab.folder)]
    volumes = [arg for folder in folders for arg in ("--volume", f"{folder}:{folder}:ro")]
    return ("--image", image, *volumes, *SHORT, str(lab.folder / "hosts.txt"))


def borrowing(image: str) -> tuple[str, ...]:
    """Return the options that name the image, and the Python that it borrows."""
    volumes = [arg for folder in BORROWED for arg in ("--volume", f"{folder}:{folder}:ro")]
    return ("--image", image, "--python", sys.executable, *volumes, *SHORT[:4])


def test_a_container_on_this_machine(image, tmp_path):
    """./run-local --image: two ranks in a container, true codes, logs and results here."""
    code = (
        "import os, sys, time; print('contained', os.path.exists('/.dockerenv'), flush=True)\n"
        "rank, said = int(os.environ['RANK']), os.environ['RACKRUN_RUN_FOLDER'] + '/said'\n"
        "rank or open(said, 'w').close()\n"
        "while not os.path.exists(said): time.sleep(0.02)\n"  # or its end is that of rank 0
        "sys.exit(9 * rank)\n"
    )
    args = (*borrowing(image), "--nproc", "2", "--", sys.executable, "-c", code)
    ended = run(["./run-local", *args], tmp_path)
    assert ended.code == 9, ended
    assert "contained True" in ended.out
    assert "rank 1 on localhost: exit code 9" in ended.err
    (folder,) = (tmp_path / "runs").glob("2*")
    assert (folder / "logs" / "localhost" / "1" / "rank-0.out").read_text() == "contained True\n"
    shown = run(["./run-local", "--dry-run", *args], tmp_path)
    assert shown.code == 0, shown
    assert "container: docker run --rm --interactive" in shown.out
    assert "--network host --ipc host" in shown.out
    assert containers() == []


def test_an_image_that_this_machine_has_not_is_named(image, tmp_path):
    """./run-local --image: 78 and what to type, before anything is made."""
    refusal = Refusal("./run-local --image no/such:image -- true", 78, "no image no/such:image")
    refusal.check(tmp_path)
