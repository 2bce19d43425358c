"""A rack of hosts with GPUs: real sshd on loopback, with simulated device nodes and nvidia-smi."""

import json
import stat
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.lab.hosts import Lab, wait_for_banner

SMI = """\
#!/bin/sh
for gpu in {folder}/gpu*.csv; do echo "$(cat $gpu), 580.65.06, 9.0"; done
"""
DRAIN = """\
cp -a /etc "$0" && mkdir -p "$0/rackrun" && printf '%s\\nmore\\n' "$1" > "$0/rackrun/drained" &&
mount --bind "$0" /etc && shift && exec "$@"
"""
"""Runs a command where root has drained the host, for it alone."""


SLEEP = ("--", sys.executable, "-c", "import time; print('here', flush=True); time.sleep(999)")
DEVICES = """\
mkdir "$0" && mount --rbind /dev "$0" && mount -t tmpfs none /dev && cd /dev || exit
for name in null zero full random urandom tty; do touch $name && mount --bind "$0/$name" $name; done
for name in pts shm; do mkdir $name && mount --rbind "$0/$name" $name; done
ln -s /proc/self/fd fd; ln -s pts/ptmx ptmx; touch nvidia0 nvidia1 nvidiactl
cd "$OLDPWD" && exec "$@"
"""
"""Runs a command where /dev has two GPUs, for it alone."""


HEALTHY = "NVIDIA H100 80GB HBM3, 81559, 4, 41, 0, 0x0000000000000001"


OLDER = "Tesla V100-SXM2-16GB, 16384, 0, 83, 2, 0x0000000000000008"


def with_path(folder: Path) -> str:
    """Return a line for sshd_config that puts a folder on PATH."""
    return f'ForceCommand PATH={folder}:$PATH; export PATH; eval "$SSH_ORIGINAL_COMMAND"\n'


def program(path: Path, text: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class SimulatedRack:
    """Hosts gpu01, gpu02, ... with some GPUs each, and a launcher's machine."""

    def __init__(
        self, lab: Lab, gpus: Sequence[int], extra: str = "", drained: str = "", why: str = ""
    ) -> None:
        """Start a host for each number of GPUs; one may be drained by root, with a reason."""
        self.drained, self.why = drained, why
        self.lab = lab
        self.names = [f"gpu{number:02}" for number, _ in enumerate(gpus, start=1)]
        for name, count in zip(self.names, gpus, strict=True):
            self._start(name, count, extra)
        for host in lab.hosts:
            wait_for_banner(host.address, host.port)
        lab.trust()
        pairs = zip(self.names, lab.hosts, strict=True)
        lab.configure(*(f"Host {n}\n  HostName {h.address}\n  Port {h.port}" for n, h in pairs))
        self.python = lab.cheap_python(torch="2.15.0+cu132", cuda="13.2")
        self.hosts = lab.folder / "hosts.txt"
        self.hosts.write_text(
            "".join(f"{name} python={self.python} workdir={lab.folder}\n" for name in self.names)
        )

    def _start(self, name: str, gpus: int, extra: str) -> None:
        folder = self.lab.folder / name
        smi = program(folder / "nvidia-smi", SMI.format(folder=folder))
        for number in range(gpus):
            self.set_gpu(name, number)
        nodes = " ".join(f"nvidia{number}" for number in range(gpus))
        devices = DEVICES.replace("nvidia0 nvidia1", nodes)
        command = ("unshare", "--mount", "sh", "-c", devices, str(folder / "dev")) if gpus else ()
        if name == self.drained:
            etc = ("unshare", "--mount", "sh", "-c", DRAIN, str(folder / "etc"), self.why)
            command = (*etc, *command)
        self.lab.start(command=command, extra=extra + with_path(smi.parent))

    def set_gpu(self, name: str, number: int, text: str = HEALTHY) -> None:
        """Let nvidia-smi of a host say this of one of its GPUs."""
        path = self.lab.folder / name / f"gpu{number:02}.csv"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def home_of(self, name: str) -> Path:
        """Return the home of the account on a host."""
        return self.lab.hosts[self.names.index(name)].folder

    def result_of(self, *args: str, verb: str = "ssh", **more: Any) -> tuple[int, str, str]:
        """Run a command of `rackrun` on the hosts; return exit code, output and errors."""
        arguments = () if verb == "ssh" else (verb,)
        process = self.lab.run_ssh(*args, verb=arguments, **more)
        out, err = process.communicate(timeout=300)
        assert "Traceback" not in err, err
        return process.returncode, out, err

    def inspect(self) -> dict[str, dict[str, Any]]:
        """Return what `rack --json` says of the hosts, by name."""
        code, out, err = self.result_of("--json", str(self.hosts), verb="rack")
        assert code == 0, err
        return {host["host"]: host for host in json.loads(out)}
