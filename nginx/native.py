"""This machine's own nginx, with as few rights as a container would have."""

import os
import shutil
from pathlib import Path

INSTALL = "sudo apt-get install nginx-light"
PATHS = f"{os.environ.get('PATH', os.defpath)}:/usr/local/sbin:/usr/sbin:/sbin"


def missing() -> str:
    """Return why no nginx can be run here; empty if it can."""
    return "" if shutil.which("nginx", path=PATHS) else "no nginx on this machine"


def command(home: Path, uid: int, gid: int) -> list[str]:
    """Return the arguments that start nginx in the foreground; it runs in the folder of shards.

    setpriv takes away every capability and any way to gain one, and asks the kernel to end nginx
    with us, however we end.
    """
    rights = [
        *("--reuid", str(uid), "--regid", str(gid), "--clear-groups"),
        *("--inh-caps", "-all", "--bounding-set", "-all"),
    ]
    return [
        *("setpriv", "--no-new-privs", "--pdeathsig", "TERM"),
        *(rights if os.getuid() == 0 else []),
        shutil.which("nginx", path=PATHS) or "nginx",
        *arguments(str(home / "etc")),
    ]


def arguments(etc: str) -> list[str]:
    """Return nginx's options, in a container or not: its configuration, and no daemon."""
    return ["-p", "./", "-e", "stderr", "-c", f"{etc}/nginx.conf", "-g", "daemon off;"]
