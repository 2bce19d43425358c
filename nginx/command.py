"""The command that runs nginx over a folder: in a container, or this machine's own."""

import contextlib
import csv
import io
import os
import shutil
import subprocess
from pathlib import Path

# The official image at the version of the digest; what was tested is what runs.
IMAGE = (
    "nginx:1.30.2-alpine@sha256:5f979dcfed4ce6461873f087e8c980d6e29b084b9e8776d9704a7e989b5f4898"
)
PATHS = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"
ANSWER_SECONDS, PULL_SECONDS = 60.0, 300.0
ENDS_WITH_US = ("setpriv", "--pdeathsig", "TERM")  # however we end


def contained(image: str, folder: Path, home: Path, uid: int, gid: int) -> list[str]:
    """Return the arguments that run nginx in a container named like `home`.

    It can read the folder and its configuration, listen at one port, and do nothing else. The
    host's network, because a published port would bypass the host's firewall, hide the readers'
    addresses, and copy every byte once more on loopback.
    """
    return [
        *ENDS_WITH_US,
        *("docker", "run", "--rm", "--log-driver", "none", "--name", home.name),
        *("--network", "host", "--user", f"{uid}:{gid}", "--read-only", "--cap-drop", "ALL"),
        *("--security-opt", "no-new-privileges", "--pids-limit", "64"),
        *("--tmpfs", "/tmp:rw,noexec,nosuid,nodev,size=1m,mode=1777"),
        *("--mount", _mount(folder, "/data"), "--mount", _mount(home, "/etc/rackrun")),
        *("--workdir", "/data", "--pull", "never", "--entrypoint", "nginx", image),
        *_options("/etc/rackrun"),
    ]


def native(home: Path, uid: int, gid: int) -> list[str]:
    """Return the arguments that run this machine's nginx in the folder, without privileges."""
    user = ("--reuid", str(uid), "--regid", str(gid), "--clear-groups")
    capabilities = ("--inh-caps", "-all", "--bounding-set", "-all")
    return [
        *(*ENDS_WITH_US, "--no-new-privs"),
        *((*user, *capabilities) if os.getuid() == 0 else ()),
        nginx() or "nginx",
        *_options(str(home)),
    ]


def _options(home: str) -> list[str]:
    return ["-p", "./", "-e", "stderr", "-c", f"{home}/nginx.conf", "-g", "daemon off;"]


def _mount(source: Path, target: str) -> str:
    """Return a read-only bind mount; quoted as CSV, because paths may hold commas and quotes."""
    line = io.StringIO()
    csv.writer(line, lineterminator="").writerow(
        ["type=bind", f"source={source}", f"target={target}", "readonly"]
    )
    return line.getvalue()


def nginx() -> str | None:
    """Return the path of this machine's nginx, if it has one."""
    return shutil.which("nginx", path=PATHS)


def why_not_contained(image: str) -> str:
    """Return why no container of the image can run here, which may be fetched; empty if one can."""
    try:
        if _docker("image", "inspect", image).returncode == 0:
            return ""
        pulled = _docker("pull", "--quiet", image, seconds=PULL_SECONDS)
    except OSError:
        return "no docker on this machine"
    except subprocess.TimeoutExpired as error:
        return f"docker {error.cmd[1]} does not answer within {error.timeout:g} s"
    if pulled.returncode == 0:
        return ""
    reason = (pulled.stderr.strip() or "no reason given").splitlines()[-1]
    name = image.partition("@")[0]  # a digest would fill the line
    return f"the image {name} cannot be pulled ({reason.strip()})"


def remove_container(name: str) -> None:
    """End and remove the container, if there is one of this name."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it cannot be asked
        _docker("rm", "--force", name)


def _docker(*words: str, seconds: float | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["docker", *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=seconds or ANSWER_SECONDS,
        check=False,
    )
