"""Clusters of tests: a real Slurm with nodes n1, n2, ..., and a real Ray, on this machine."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.lab.hosts import children, processes_with, with_signal
from tests.lab.waiting import until

NODES = 3

CONFIGURATION = """\
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
ReturnToService=2
InactiveLimit=0
KillWait=10
NodeName=n[1-{nodes}] NodeHostname={host} NodeAddr=127.0.0.[2-{last}] Port=[{first}-{final}] \
CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE OverSubscribe=NO State=UP
"""
# cred_expire: a job that is queued again waits for so long, by default for two minutes.


class SlurmLab:
    """The daemons, and the commands of a user."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.configuration = folder / "slurm.conf"
        self.environment = {
            **os.environ,
            "SLURM_CONF": str(self.configuration),
            "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start the daemons, and wait until every node is idle."""
        for name in ("munge", "state"):
            (self.folder / name).mkdir(mode=0o700)
        first = free_ports(NODES + 1)
        host = socket.gethostname().split(".")[0]
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout
        self.configuration.write_text(
            CONFIGURATION.format(
                host=host,
                port=first + NODES,
                user=user.strip(),
                folder=self.folder,
                nodes=NODES,
                last=NODES + 1,
                first=first,
                final=first + NODES - 1,
            )
        )
        self.start_munge()
        self.daemon("slurmctld", "-D", "-f", str(self.configuration))
        for number in range(1, NODES + 1):
            self.start_node(f"n{number}")
        until(lambda: self.idle() == NODES)

    def start_munge(self) -> None:
        """Start munged, which authenticates users, with a key of its own."""
        munge = self.folder / "munge"
        key = munge / "key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        files = [f"--{name}-file={munge / name}" for name in ("key", "pid", "log", "seed")]
        # --force: only we have to reach its socket, in a folder that is closed to others
        self.daemon("munged", *files, f"--socket={munge / 'socket'}", "--foreground", "--force")
        until((munge / "socket").exists)

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node, also of one that died."""
        self.daemon(name, "-D", "-f", str(self.configuration), "-N", name, program="slurmd")

    def daemon(self, name: str, *options: str, program: str = "") -> None:
        """Start a daemon; what it says is in its own log."""
        path = shutil.which(program or name, path=self.environment["PATH"])
        assert path, f"no {program or name}; ./run-tests installs it"
        with (self.folder / f"{name}.out").open("wb") as out:
            self.daemons[name] = subprocess.Popen(
                [path, *options], env=self.environment, stdout=out, stderr=out
            )

    def stop(self) -> None:
        """End all jobs, and then the daemons."""
        if self.idle() is not None:
            self.cancel_all()
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait()

    def cancel_all(self) -> None:
        """End every job, and wait until they are gone."""
        self.run("scancel", f"--user={os.getuid()}")
        until(lambda: not self.run("squeue", "--noheader"))

    def kill_node(self, name: str) -> None:
        """Kill everything on a node at once, as a power failure does."""
        self.daemons[name].kill()
        self.daemons[name].wait()
        for pid in processes_with(f"SLURMD_NODENAME={name}"):
            for process in [pid, *children(pid)]:
                with_signal(process, signal.SIGKILL)
        self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=power")

    def run(self, *command: str, folder: Path | None = None) -> str:
        """Run one of Slurm's commands; return its output when it exits with 0."""
        done = subprocess.run(
            command, env=self.environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def idle(self) -> int | None:
        """Return the number of idle nodes; None when Slurm does not answer."""
        done = subprocess.run(
            ["sinfo", "--noheader", "--states=idle", "--format=%D"],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        return None if done.returncode else sum(map(int, done.stdout.split()))

    def submit(self, folder: Path, *args: str, **variables: str) -> str:
        """Submit a job from a folder; return its number."""
        given = [f"{name}={value}" for name, value in variables.items()]
        exported = ",".join(["ALL", *given])
        output = self.run("sbatch", "--parsable", f"--export={exported}", *args, folder=folder)
        return output.split(";")[0]

    def job(self, number: str) -> Mapping[str, str]:
        """Return what Slurm reports about a job."""
        output = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0]
        return dict(arg.partition("=")[::2] for arg in output.split())

    def ended(self, number: str) -> Mapping[str, str]:
        """Wait for the job's end; return what Slurm reports about it."""
        running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED", "SUSPENDED")
        return until(lambda: (job := self.job(number))["JobState"] not in running and job)


def free_ports(count: int) -> int:
    """Return the first of this many free ports in a row."""
    for first in range(17000, 32000, count):
        try:
            for port in range(first, first + count):
                with socket.socket() as probe:
                    probe.bind(("", port))
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


RAY = """
import sys
from ray.cluster_utils import Cluster
def node(address, **options):  # several hosts on one machine, as behind several sshd
    return options | {"env_vars": {"SSH_CONNECTION": f"127.0.0.1 1 {address} 22"}, "num_cpus": 2}
cluster = Cluster(initialize_head=True, head_node_args=node("127.0.0.2", include_dashboard=False))
cluster.add_node(**node("127.0.0.3"))
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@contextmanager
def ray_cluster() -> Iterator[str]:
    """Yield the address of a Ray head with one more node; they are ended by process id."""
    command = [sys.executable, "-W", "ignore", "-c", RAY]
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": ""}
    # Workers kept ready, 2 s of a core each, are of no use: our actors' environment is another.
    variables |= {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
    for _ in range(3):  # Ray gives its own processes 30 s, which a busy machine may not keep
        with subprocess.Popen(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdin and process.stdout
            if actual := process.stdout.readline().strip():
                yield actual
                return
    raise AssertionError("Ray does not start")
