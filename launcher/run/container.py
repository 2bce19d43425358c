"""The ranks of a host in a container: agent, torchrun and ranks all run in it.

The agent is the container's first process. So whatever kills it, the kernel ends all the others
with it, and the end of its standard input, or the lease, ends it when `docker run` is killed. The
plan reaches it as ever: no variable and no secret of a run is on docker's command line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from rackrun.errors import UsageError
from rackrun.shapes import Shape, between, matches

HOME = "/home/rackrun"  # the container's own: no other caches are read, and none is left


class HostUser(Shape, frozen=True):
    """The account of a host that we log in to, and that the ranks run as."""

    uid: Annotated[int, between(0, 2**32)]
    gid: Annotated[int, between(0, 2**32)]
    name: Annotated[str, matches(r"[^\0-\x1f]{1,255}")]


@dataclass(frozen=True)
class ContainerSpec:
    """Container that the user asks for."""

    name: str
    volumes: tuple[str, ...] = ()
    """FOLDER, FOLDER:THERE or FOLDER:THERE:ro, beside the working directory."""

    def __post_init__(self) -> None:
        """Refuse what docker would take for a name or for an option."""
        if self.name.startswith("-"):
            raise UsageError(f"--image {self.name}: an image name does not begin with a dash")
        for volume in self.volumes:
            if not volume.startswith("/"):
                raise UsageError(f"--volume {volume}: begin with the absolute path of a folder")

    def docker_run(
        self, user: HostUser, workdir: str, has_gpus: bool, folder: str = "", name: str = ""
    ) -> tuple[str, ...]:
        """Return `docker run`, up to the image, for an account of a host.

        `folder` is the run folder. /tmp is the host's: locks and the agent's folder are there.
        """
        volumes = {"/tmp": "/tmp", workdir: workdir}
        if folder and not folder.startswith(f"{workdir}/"):
            parent = folder.rpartition("/")[0]
            volumes[parent] = parent
        mounts = [f"{source}:{target}" for source, target in volumes.items()]
        mounts += [volume if ":" in volume else f"{volume}:{volume}" for volume in self.volumes]
        return (
            *("docker", "run", "--rm", "--interactive", "--log-driver", "none", "--pull", "never"),
            *(("--name", name) if name else ()),
            *("--network", "host", "--ipc", "host", "--pids-limit", "-1"),
            *("--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
            *(("--gpus", "all", "--ulimit", "memlock=-1") if has_gpus else ()),
            *("--user", f"{user.uid}:{user.gid}", "--workdir", "/"),
            *("--tmpfs", f"{HOME}:exec,mode=700,uid={user.uid},gid={user.gid}"),
            *("--env", f"USER={user.name}", "--env", f"HOME={HOME}"),
            *(arg for mount in mounts for arg in ("--volume", mount)),
            *("--entrypoint", "", self.name),
        )


def container_of(name: str, volumes: Sequence[str]) -> ContainerSpec | None:
    """Return the container that the options name, if they name one."""
    if not name and volumes:
        raise UsageError("--volume is for containers; name one with --image")
    return ContainerSpec(name, tuple(volumes)) if name else None
