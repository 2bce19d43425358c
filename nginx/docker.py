"""nginx in a container that can read one folder, listen at one port, and nothing else."""

import contextlib
import csv
import io
import subprocess
from pathlib import Path

from rackrun.errors import Problem
from rackrun.nginx.native import arguments
from rackrun.nginx.site import Site

# The official image at the version of the digest; what was tested is what runs.
IMAGE = (
    "nginx:1.30.2-alpine@sha256:5f979dcfed4ce6461873f087e8c980d6e29b084b9e8776d9704a7e989b5f4898"
)
INSTALL = "sudo apt-get install docker.io"
ANSWER_SECONDS = 60.0
PULL_SECONDS = 300.0


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


def command(site: Site, home: Path, uid: int, gid: int) -> list[str]:
    """Return the arguments that run nginx in a container with the name of its folder `home`.

    The host's network, because a published port would bypass the host's firewall, hide the
    readers' addresses, and copy every byte once more on loopback. nginx itself listens at the one
    address. No health check: nothing would act upon it (`docker run` restarts nothing, readers ask
    again, a run restarts its server), and an image may hold nginx alone.
    """
    return [
        "setpriv", "--pdeathsig", "TERM",
        "docker", "run", "--rm", "--log-driver", "none",
        "--name", home.name,
        "--network", "host",
        "--user", f"{uid}:{gid}",
        "--read-only",
        "--cap-drop", "ALL",
        "--security-opt", "no-new-privileges",
        "--pids-limit", "64",
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


def remove(name: str) -> None:
    """End and remove the container, if there is one of this name."""
    with contextlib.suppress(Problem):  # what does not answer cannot be asked to end anything
        _docker("rm", "--force", name)


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
