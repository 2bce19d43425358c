"""nginx in a container that can read one folder, listen at one port, and nothing else."""

import csv
import io
import os
import subprocess
from pathlib import Path

from rackrun.errors import Problem
from rackrun.nginx.account import Account
from rackrun.nginx.native import arguments
from rackrun.nginx.site import ServeRefused, Site

# The official image at the version of the digest; what was tested is what runs.
IMAGE = (
    "nginx:1.30.2-alpine@sha256:5f979dcfed4ce6461873f087e8c980d6e29b084b9e8776d9704a7e989b5f4898"
)
INSTALL = "sudo apt-get install docker.io"
LABEL = "rackrun.server"
ANSWER_SECONDS = 60.0
PULL_SECONDS = 300.0
CPU_PERIOD = 100_000  # microseconds


def missing() -> str:
    """Return why no container can be run here; empty if one can."""
    try:
        completed = _docker("version", "--format", "{{.Server.Version}}")
    except Problem as error:
        return str(error)
    return (
        ""
        if completed.returncode == 0
        else f"docker does not answer ({_last_line(completed.stderr)})"
    )


def fetch(image: str) -> str:
    """Make sure that the image is here; return why it cannot be had, empty if it can."""
    if _docker("image", "inspect", image).returncode == 0:
        return ""
    try:
        completed = _docker("pull", "--quiet", image, seconds=PULL_SECONDS)
    except Problem as error:
        return f"the image {image} cannot be pulled ({error})"
    if completed.returncode == 0:
        return ""
    return f"the image {image} cannot be pulled ({_last_line(completed.stderr)})"


def command(site: Site, name: str, home: Path, account: Account, detach: bool) -> list[str]:
    """Return the arguments that run nginx in a container of this name.

    The host's network, because a published port would bypass the host's firewall, hide the
    readers' addresses from the log, and copy every byte once more on loopback. nginx itself
    listens at the one address. No health check: nothing would act upon it (`docker run` restarts
    nothing, readers ask again, a run restarts its server), and an image may hold nginx alone.
    """
    # The limit counts the page cache of what the container reads: half of the memory is for shards.
    half = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 // 1024**2
    memory = f"{site.memory or half}m"
    attached = ["setpriv", "--pdeathsig", "TERM", "docker", "run", "--rm", "--log-driver", "none"]
    return [
        *(["docker", "run", "--detach", "--log-driver", "local"] if detach else attached),
        "--name", name,
        "--label", f"{LABEL}={name}",
        "--network", "host",
        "--user", f"{account.uid}:{account.gid}",
        "--read-only",
        "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--pids-limit", "64",
        "--cpu-quota", str(site.workers * CPU_PERIOD), "--cpu-period", str(CPU_PERIOD),
        "--memory", memory,
        "--memory-swap", memory,
        "--tmpfs", "/tmp:rw,noexec,nosuid,nodev,size=1m,mode=1777",
        "--mount", _mount(site.folder, "/data"),
        "--mount", _mount(home / "etc", "/etc/rackrun"),
        "--workdir", "/data",
        "--pull", "never",
        "--entrypoint", "nginx",
        site.image or IMAGE,
        *arguments("/etc/rackrun"),
    ]  # fmt: skip


def _mount(source: Path, target: str) -> str:
    """Return a read-only bind mount; quoted as CSV, because paths may hold commas and quotes."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        ["type=bind", f"source={source}", f"target={target}", "readonly"]
    )
    return line.getvalue()


def pid(name: str) -> int:
    """Return the process number of the container's nginx; 0 if no such container runs."""
    if _label(name) != name:
        return 0
    return int(_docker("inspect", "--format", "{{.State.Pid}}", name).stdout or 0)


def remove(name: str) -> None:
    """End and remove the container, if this package started it; Problem if Docker is silent."""
    if _label(name) == name:
        _docker("rm", "--force", name)


def refuse_foreign(name: str) -> None:
    """Raise ServeRefused where a container that we did not make has our name."""
    label = _label(name)
    if label is not None and label != name:
        raise ServeRefused(
            f"a container named {name} exists that rackrun has not started; type: docker ps -a"
        )


def _label(name: str) -> str | None:
    """Return the label that marks our containers; None without a container of this name."""
    named = ("--filter", f"name=^{name}$", "--format", f'{{{{.Label "{LABEL}"}}}}')
    completed = _docker("ps", "--all", *named)
    if completed.returncode:
        raise Problem(f"docker does not answer ({_last_line(completed.stderr)})")
    return completed.stdout.strip() if completed.stdout else None


def log_of(name: str) -> str:
    """Return the log of the nginx of a detached container."""
    completed = _docker("logs", "--tail", "20", name)
    return completed.stderr if completed.returncode == 0 else ""


def _docker(*args: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run docker to its end; raise Problem if it is missing, or takes too long."""
    limit = seconds or ANSWER_SECONDS
    try:
        return subprocess.run(
            ["docker", *args],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
    except OSError:
        raise Problem("no docker on this machine") from None
    except subprocess.TimeoutExpired:
        raise Problem(f"docker {args[0]} does not answer within {limit:g} s") from None


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"
