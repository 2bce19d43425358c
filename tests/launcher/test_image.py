"""Ranks in containers: a real Docker daemon, and an image that borrows this machine's programs."""

import io
import json
import os
import signal
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from launcher.errors import UsageError
from launcher.image import Image, image_of
from tests.launcher.lab import ROOT, Lab, wait_until
from tests.nginx.conftest import daemon, docker

Labs = Callable[[int], Lab]

__all__ = ["daemon"]

LINKS = {"bin": "usr/bin", "lib": "usr/lib", "lib64": "usr/lib64", "sbin": "usr/sbin"}
BORROWED = sorted({"/usr", sys.base_prefix, sys.prefix, str(ROOT)})
SHORT = ("--lease-seconds", "3", "--grace-seconds", "1", "--checkpoint-seconds", "2")
MARK = f"a rank of {os.getpid()}"
SLEEP = (sys.executable, "-c", f"import time; time.sleep(999) # {MARK}")


@pytest.fixture(scope="module")
def image(daemon: None) -> Iterator[str]:
    """An image with no file but links: the machine's own folders are mounted into it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for name, target in LINKS.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            tar.addfile(link)
    made = docker("import", "-", f"rackrun-test-ranks:{os.getpid()}", stdin=archive.getvalue())
    assert made.returncode == 0, made.stderr
    yield f"rackrun-test-ranks:{os.getpid()}"
    docker("image", "rm", "--force", f"rackrun-test-ranks:{os.getpid()}")


@pytest.fixture
def hosts(lab: Labs, image: str) -> tuple[Lab, tuple[str, ...]]:
    """Two hosts that find the Docker daemon, and the words that name the image."""
    one = lab(2)
    for host in one.hosts:
        bashrc = host.folder / ".bashrc"
        bashrc.write_text(f"export DOCKER_HOST='{os.environ.get('DOCKER_HOST', '')}'\n")
    volumes = [word for folder in BORROWED for word in ("--volume", f"{folder}:{folder}:ro")]
    path = one.write_hosts(f"python={one.cheap_python()}")
    return one, ("--image", image, *volumes, *SHORT, str(path))


def containers() -> list[str]:
    told = docker("ps", "--all", "--quiet", "--filter", "name=rackrun-")
    return told.stdout.decode().split()


def test_real_torchrun_makes_one_world_of_two_containers(
    hosts: tuple[Lab, tuple[str, ...]],
) -> None:
    """Gloo meets over the host's network; results, logs and codes are those of any run."""
    one, words = hosts
    script = one.folder / "reduce.py"
    script.write_text(
        "import os, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "total = torch.ones(1); dist.all_reduce(total)\n"
        "inside = os.path.exists('/.dockerenv')\n"
        "if dist.get_rank() == 0:\n"
        "    open(os.environ['RACKRUN_RUN_FOLDER'] + '/final.pt', 'w').write(str(total.item()))\n"
        "print('rank', dist.get_rank(), 'of', int(total), 'contained', inside, flush=True)\n"
        "dist.destroy_process_group(); os._exit(0)\n"
    )
    one.write_hosts(f"python={sys.executable}")
    code, out, err = one.said(*words, "--", "python", str(script))
    assert code == 0, err
    for rank in range(2):
        assert f"rank {rank} of 2 contained True" in out
    (folder,) = (one.folder / "runs").iterdir()
    assert (folder / "final.pt").read_text() == "2.0"
    assert containers() == []


def test_exit_codes_and_secrets_are_those_of_the_rank(hosts: tuple[Lab, tuple[str, ...]]) -> None:
    """The rank's own code comes through, and a secret is in no container's description."""
    one, words = hosts
    code = "import os, sys, time; time.sleep(3); sys.exit(len(os.environ['TOKEN']))"
    process = one.run_ssh(
        "--secret", "TOKEN", *words, "--", sys.executable, "-c", code, env={"TOKEN": "secret-of-9"}
    )
    wait_until(lambda: len(containers()) == 2, "two containers run", 60)
    described = docker("inspect", *containers()).stdout
    assert b"secret-of-9" not in described
    process.communicate(timeout=60)
    assert process.returncode == len("secret-of-9")
    assert containers() == []


@pytest.mark.parametrize("fault", ["Ctrl-C", "agent", "docker run", "launcher"])
def test_no_container_outlives_its_run(hosts: tuple[Lab, tuple[str, ...]], fault: str) -> None:
    """Whatever is killed, all processes of the run and its containers are gone."""
    one, words = hosts
    process = one.run_ssh(*words, "--", *SLEEP)
    wait_until(lambda: len(ranks()) == 2, "two ranks sleep", 60)
    if fault == "Ctrl-C":
        process.send_signal(signal.SIGINT)
    elif fault == "launcher":
        process.kill()
    elif fault == "agent":
        first = json.loads(docker("inspect", containers()[0]).stdout)[0]["State"]["Pid"]
        os.kill(first, signal.SIGKILL)
    else:
        os.kill(processes("docker\0run\0", str(one.folder))[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    codes = {"Ctrl-C": 130, "launcher": -signal.SIGKILL}
    assert process.returncode == codes.get(fault, 75), err
    wait_until(lambda: not containers() and not ranks(), "nothing is left", 20)
    plan = json.loads(next(one.folder.glob("runs/*/plan.json")).read_text())
    wait_until(lambda: not any(Path(host["scratch"]).exists() for host in plan["hosts"]), "swept")


def ranks() -> list[int]:
    return processes(f"# {MARK}\0")


def processes(*words: str) -> list[int]:
    """The processes with these words, but for launchers."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if all(word in line for word in words) and "-m\0launcher" not in line:
            found.append(int(entry.name))
    return found


def test_an_image_that_is_not_there_is_named_before_anything_starts(
    hosts: tuple[Lab, tuple[str, ...]],
) -> None:
    """Exit 78, and the line to type; docker pulls nothing behind our back."""
    one, words = hosts
    code, _, err = one.said("--image", "no/such:image", *words[2:], "--", "true")
    assert code == 78
    assert err.count("there is no image no/such:image") == 2
    assert "docker pull" in err


def test_the_plan_shows_the_container(hosts: tuple[Lab, tuple[str, ...]]) -> None:
    """--dry-run prints the docker line that runs, whole."""
    one, words = hosts
    code, out, err = one.said("--dry-run", *words, "--", "true")
    assert code == 0, err
    line = next(line for line in out.splitlines() if "container:" in line)
    assert "docker run --rm --interactive" in line
    assert "--network host --ipc host" in line


def test_what_docker_would_misread_is_refused() -> None:
    """An image that looks like an option, a volume without a path, a volume without an image."""
    for name, volumes in (("-v", ()), ("x", ("data:/data",)), ("", ("/data",))):
        with pytest.raises(UsageError):
            image_of(name, volumes)
    words = Image("x", ("/data",)).words(
        {"workdir": "/w", "gpus": 2, "user": {"uid": 5, "gid": 6, "name": "jo"}}, "/r/run", "n"
    )
    assert words[-3:] == ("--entrypoint", "", "x")
    assert {"/w:/w", "/r:/r", "/data:/data", "--gpus", "5:6"} <= set(words)
