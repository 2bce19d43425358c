"""What the container may do, seen from inside and from the daemon."""

import errno
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rackrun.nginx.serve import NOBODY, NginxServer, serving
from rackrun.nginx.site import Site


@pytest.fixture
def server(folder: Path, image: str) -> Iterator[NginxServer]:
    with serving(Site(folder, port=0, image=image)) as server:
        yield server


@pytest.mark.security("WEB-1")
def test_the_daemon_holds_the_container_to_exactly_this_policy(server):
    """Read-only root, no capability, no way to new ones, limits, two read-only mounts, no more."""
    args = ["docker", "container", "inspect", server.home.name]
    observed = json.loads(subprocess.run(args, capture_output=True, check=True).stdout)[0]
    host = observed["HostConfig"]
    assert {key: host[key] for key in POLICY} == POLICY
    assert observed["Config"]["User"] == f"{NOBODY}:{NOBODY}"
    assert {
        mount["Destination"]: (mount["Source"], mount["RW"]) for mount in observed["Mounts"]
    } == {
        "/data": (str(server.site.folder), False),
        "/etc/rackrun": (str(server.home), False),
    }


POLICY = {
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "CapAdd": None,
    "SecurityOpt": ["no-new-privileges"],
    "Privileged": False,
    "PidsLimit": 64,
    "NetworkMode": "host",
    "PidMode": "",
    "IpcMode": "private",
    "UsernsMode": "",
    "PortBindings": {},
    "Devices": [],
    "Binds": None,
    "Tmpfs": {"/tmp": "rw,noexec,nosuid,nodev,size=1m,mode=1777"},
    "AutoRemove": True,
    "RestartPolicy": {"Name": "no", "MaximumRetryCount": 0},
}


@pytest.mark.security("WEB-1")
def test_inside_there_is_no_right_and_nothing_to_write_to(server):
    """Every process: not root, no capability, no new privilege, filtered calls, read-only files."""
    for pid in inside(server):
        status = dict(
            line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        assert set(status["Uid"].split()) == {str(NOBODY)}
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
        for kind in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
            assert int(status[kind], 16) == 0
    root = Path(f"/proc/{inside(server)[0]}/root")
    assert [
        write_error(root / position / "planted") for position in ("", "data", "etc/rackrun")
    ] == ([errno.EROFS] * 3)
    assert write_error(root / "tmp" / "scratch") == 0
    assert not list(root.rglob("docker.sock"))


@pytest.mark.security("WEB-2")
def test_the_server_listens_at_the_one_address_and_nowhere_else(server):
    """No other socket of any kind listens, and another address of this machine is refused."""
    table = subprocess.run(["ss", "-Hnlp"], capture_output=True, text=True, check=True).stdout
    pids = {str(pid) for pid in inside(server)}
    ours = [line.split() for line in table.splitlines() if set(PID.findall(line)) & pids]
    assert {(row[0], row[4]) for row in ours} == {("tcp", f"127.0.0.1:{server.site.port}")}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.site.port), 5)


PID = re.compile(r"pid=(\d+)")


def inside(server: NginxServer) -> list[int]:
    """Return the processes of the container, by their ids outside."""
    args = ["docker", "inspect", "--format", "{{.State.Pid}}", server.home.name]
    master = int(subprocess.run(args, capture_output=True, check=True).stdout)
    children = Path(f"/proc/{master}/task/{master}/children").read_text().split()
    return [master, *map(int, children)]


def write_error(path: Path) -> int:
    """Return the error number of writing a file there as root; 0 if it works."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
    except OSError as error:
        return error.errno or -1
    path.unlink()
    return 0
