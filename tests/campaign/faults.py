"""The faults of a campaign and their required outcomes, as a table."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.lab.hosts import children, command_line, with_signal

if TYPE_CHECKING:
    from tests.campaign.hosts import Hosts

LEASE_SECONDS, HANG_SECONDS, CHECKPOINT_SECONDS = 3.0, 3.0, 2.0
LIMITS = (
    *("--lease-seconds", str(LEASE_SECONDS), "--hang-seconds", str(HANG_SECONDS)),
    *("--checkpoint-seconds", str(CHECKPOINT_SECONDS)),
)
SOON, LOST, STOP, HANG = 9.0, LEASE_SECONDS + 9.0, CHECKPOINT_SECONDS + 5.0, HANG_SECONDS + 17.0


class Scene:
    """A run in progress: the launcher, the hosts, and the host of the fault."""

    def __init__(self, hosts: Hosts, launcher: int, chance: random.Random) -> None:
        self.hosts, self.launcher, self.chance = hosts, launcher, chance
        self.number = chance.randint(1, len(hosts.hosts))
        self.hit = False

    @property
    def victim(self) -> str:
        """Return the name of the host of the fault."""
        return f"node{self.number}"

    def processes(self, kind: str) -> list[int]:
        """Return the processes of one kind on the host of the fault."""
        return [pid for pid, line in self.all().items() if kind_of(pid, line) == kind]

    def all(self) -> dict[int, str]:
        """Return all processes of the run on the host of the fault."""
        processes = self.hosts.hosts[self.number - 1].processes()
        return {pid: line for pid, line in processes.items() if kind_of(pid, line) != "daemon"}

    def send(self, kind: str, number: int) -> None:
        """Send a signal to one process of a kind."""
        processes = self.processes(kind)
        if processes:
            with_signal(self.chance.choice(processes), signal.Signals(number))
            self.hit = True

    def send_all(self, pids: Iterable[int], number: int) -> None:
        """Send a signal to all of them."""
        for pid in pids:
            with_signal(pid, signal.Signals(number))


KINDS = {
    "fake_torchrun.py": "torchrun",
    "rackrun.launcher.detached": "controller",
    "rackrun.shards.peers.server": "cache",
    "/agent.zip": "shim",
    "campaign/rank.py": "rank",
    "-m\0catdog": "rank",
}
"""Kinds of processes of a host, by a part of the command line."""


def kind_of(pid: int, line: str) -> str:
    """Return what a process of a host is: one of KINDS, or agent, guard, session, daemon"""
    args = line.split("\0")
    if line.startswith("unshare\0") or "sshd_config" in line:
        return "daemon"
    if line.startswith("sshd: "):
        return "session"
    if args[0] == "sleep":
        return "loader"
    for part, kind in KINDS.items():
        if part in line:
            return kind
    if 'memfd_create("rackrun")' in line:
        parent = Path(f"/proc/{pid}/stat")
        try:
            above = int(parent.read_text().rpartition(")")[2].split()[1])
        except OSError:
            return "gone"
        return "agent" if 'memfd_create("rackrun")' in command_line(above) else "guard"
    return "other"


@dataclass(frozen=True)
class Fault:
    """One fault, and its required outcome."""

    name: str
    codes: tuple[int, ...]
    """Exit codes of the launcher that are true."""

    seconds: float
    """Promised from the fault to the launcher's end."""

    hurt: Callable[[Scene], None] = lambda scene: None
    heal: Callable[[Scene], None] = lambda scene: None
    misdeed: str = ""
    """What a rank does by itself, see rank.py."""

    rank_seconds: float = 60.0
    options: tuple[str, ...] = ()
    early: bool = False
    """At a moment of the start, rather than in mid-training."""

    names: str = ""
    """Words that the launcher's last line holds; {victim} is the host's name."""

    kills_launcher: bool = False
    kind: str = "attached"
    verb: str = ""
    """Of a detached run: what is typed meanwhile."""

    @property
    def promised_seconds(self) -> float:
        """Return the time promised from the fault to the end, with what ranks still have to do."""
        return self.seconds + (0.0 if self.rank_seconds > 30 else self.rank_seconds)

    weight: int = field(default=1, compare=False)


def signalled(kind: str, names: str, codes: tuple[int, ...], seconds: float = SOON) -> list[Fault]:
    """Return a fault for each signal to a process of a kind; no codes: those of the signal."""
    faults = []
    for name in names.split():
        number = signal.Signals[f"SIG{name}"]
        faults.append(
            Fault(
                f"{kind}-{name}",
                codes or (128 + number,),
                seconds,
                lambda scene, number=number: scene.send(kind, number),
                rank_seconds=3.0 if codes == (0,) else 60.0,
            )
        )
    return faults


def to_launcher(*names: str) -> Callable[[Scene], None]:
    """Return what sends the launcher these signals, some time apart."""

    def hurt(scene: Scene) -> None:
        for name in names:
            with_signal(scene.launcher, signal.Signals[f"SIG{name}"])
            time.sleep(scene.chance.uniform(0.05, 0.3))

    return hurt


def pause(kind: str, seconds: float) -> Callable[[Scene], None]:
    """Return what stops the launcher, or all of a host, for so long."""

    def hurt(scene: Scene) -> None:
        pids = [scene.launcher] if kind == "launcher" else list(scene.all())
        scene.send_all(pids, signal.SIGSTOP)
        time.sleep(seconds)
        scene.send_all(pids, signal.SIGCONT)

    return hurt


def flap(scene: Scene) -> None:
    """Pull a cable for less than the lease."""
    scene.hosts.pull_cable(scene.number)
    time.sleep(LEASE_SECONDS / 3)
    scene.hosts.plug_cable(scene.number)


def drop(*rule: str) -> Callable[[Scene], None]:
    """Return what drops the packets that a rule names at the host."""
    return lambda scene: scene.hosts.firewall(scene.number, *rule)


def unblock(scene: Scene) -> None:
    """Take the rules away again."""
    scene.hosts._in(scene.hosts.names[scene.number - 1], "iptables", "-F", "INPUT")


def reset(scene: Scene) -> None:
    """Answer the packets of the session with a reset."""
    scene.hosts.firewall(scene.number, "-p", "tcp", "-s", "10.77.0.1", *RESET)


RESET = ("-j", "REJECT", "--reject-with", "tcp-reset")


def reboot(scene: Scene) -> None:
    """Take the power away and give it back."""
    scene.hosts.cut_power(scene.number)
    scene.hosts.boot(scene.number)


def fill_tmp(scene: Scene) -> None:
    """Leave no byte in the /tmp of the host."""
    with (scene.hosts.tmp(scene.number) / "full").open("wb") as file:
        try:
            while True:
                os.write(file.fileno(), bytes(1 << 20))
        except OSError:
            return


def empty_tmp(scene: Scene) -> None:
    """Remove what fill_tmp wrote."""
    (scene.hosts.tmp(scene.number) / "full").unlink(missing_ok=True)


def kill_pythons(scene: Scene) -> None:
    """Do what `killall -9 python3` does."""
    scene.send_all((pid for pid, line in scene.all().items() if "python" in line), signal.SIGKILL)


def kill_any(scene: Scene) -> None:
    """Kill any one process of the run there."""
    result = list(scene.all())
    scene.send_all([scene.chance.choice(result)] if result else [], signal.SIGKILL)


def stop_daemon(scene: Scene) -> None:
    """Pull and plug back in for good: what heals a pulled cable."""
    scene.hosts.plug_cable(scene.number)


def misdeeds(codes: tuple[int, ...], seconds: float, *names: str) -> list[Fault]:
    """Return faults that a rank does by itself."""
    lives = 3.0 if codes == (0,) else 60.0
    return [Fault(f"rank-does-{n}", codes, seconds, misdeed=n, rank_seconds=lives) for n in names]


RETRY = ("--max-restarts", "1")
ATTACHED = [
    *signalled("rank", "KILL SEGV ABRT BUS USR2 ALRM", ()),
    *signalled("rank", "TERM INT", ()),
    *signalled("rank", "STOP", (75,), HANG),
    *signalled("loader", "KILL TERM INT SEGV", (0,), 12.0),
    *signalled("shim", "KILL TERM INT HUP SEGV ABRT", (75, 137)),
    *signalled("torchrun", "KILL TERM INT SEGV ABRT", (75, 137, 143, 130)),
    *signalled("agent", "KILL TERM SEGV ABRT HUP", (75,), LOST),
    *signalled("agent", "STOP", (75,), LOST),
    *signalled("guard", "KILL", (75,), LOST),
    *signalled("guard", "TERM INT HUP", (0,), 12.0),
    *signalled("session", "KILL TERM HUP", (75,)),
    *misdeeds((7,), SOON, "exit-7"),
    *misdeeds((255,), SOON, "exit-255"),
    *misdeeds((1,), SOON, "raise"),
    *misdeeds((134,), SOON, "abort"),
    *misdeeds((139,), SOON, "segv"),
    *misdeeds((137,), SOON, "kill-itself", "kill-group"),
    *misdeeds((75,), HANG, "hang", "stop-itself"),
    *misdeeds((1,), HANG, "exit-0"),
    *misdeeds((0,), 15.0, "fork-chain", "reports", "flood", "noise", "long-line", "escapes"),
    Fault("launcher-INT", (130,), STOP, to_launcher("INT"), weight=3),
    Fault("launcher-INT-INT", (130,), SOON, to_launcher("INT", "INT"), weight=3),
    Fault("launcher-INT-TERM-INT", (130, 143), SOON, to_launcher("INT", "TERM", "INT")),
    Fault("launcher-TERM", (143,), STOP, to_launcher("TERM"), weight=2),
    Fault("launcher-HUP", (129,), STOP, to_launcher("HUP"), weight=2),
    Fault("launcher-KILL", (-9,), SOON, to_launcher("KILL"), kills_launcher=True, weight=3),
    Fault("launcher-QUIT", (-3,), SOON, to_launcher("QUIT"), kills_launcher=True),
    Fault("launcher-stopped-long", (75,), SOON, pause("launcher", LEASE_SECONDS * 2)),
    Fault("launcher-stopped-short", (0,), 12.0, pause("launcher", 1.0), rank_seconds=3.0),
    Fault("launcher-TSTP", (0,), 12.0, to_launcher("TSTP", "CONT"), rank_seconds=3.0),
    Fault("host-stopped-short", (0,), 12.0, pause("host", 1.0), rank_seconds=3.0),
    Fault("host-stopped-long", (75,), LOST, pause("host", LEASE_SECONDS * 2), weight=2),
    Fault("link-down", (75,), LOST, lambda s: s.hosts.pull_cable(s.number), stop_daemon, weight=3),
    Fault("link-flaps", (0,), 15.0, flap, rank_seconds=3.0, weight=2),
    Fault("one-way-in", (75,), LOST, drop("-s", "10.77.0.1", "-j", "DROP"), unblock),
    Fault("session-reset", (75,), LOST, reset, unblock),
    Fault(
        "power-off",
        (75,),
        LOST,
        lambda s: s.hosts.cut_power(s.number),
        lambda s: s.hosts.boot(s.number),
        names="{victim}",
        weight=3,
    ),
    Fault("reboot", (75,), LOST, reboot, weight=2),
    Fault("pythons-killed", (75, 137), LOST, kill_pythons),
    Fault("any-killed", (0, 75, 137), 12.0, kill_any, rank_seconds=3.0, weight=4),
    Fault("tmp-full", (0,), 12.0, fill_tmp, empty_tmp, rank_seconds=3.0),
    Fault(
        "restart-rank-KILL",
        (0,),
        25.0,
        lambda s: s.send("rank", signal.SIGKILL),
        rank_seconds=3.0,
        options=RETRY,
        weight=2,
    ),
    Fault(
        "restart-agent-KILL",
        (0,),
        25.0,
        lambda s: s.send("agent", signal.SIGKILL),
        rank_seconds=3.0,
        options=RETRY,
    ),
    Fault(
        "spare-takes-over",
        (0,),
        45.0,
        lambda s: s.hosts.cut_power(s.number),
        lambda s: s.hosts.boot(s.number),
        rank_seconds=3.0,
        options=(*RETRY, "--min-hosts", "1"),
        weight=2,
    ),
]
BEFORE_PYTHON = {"INT": (-2, 1), "TERM": (-15,), "HUP": (-1,)}
"""How Python itself ends at a signal before it runs our code; 1: with its own traceback."""
START = [
    *(
        Fault(
            f"start-{name}",
            (code, *BEFORE_PYTHON[name]),
            CHECKPOINT_SECONDS + 8.0,
            to_launcher(name),
            early=True,
        )
        for name, code in (("INT", 130), ("TERM", 143), ("HUP", 129))
        for _ in range(2)
    ),
    Fault(
        "start-INT-INT",
        (130, *BEFORE_PYTHON["INT"]),
        8.0,
        to_launcher("INT", "INT"),
        early=True,
        weight=2,
    ),
    Fault("start-KILL", (-9,), 8.0, to_launcher("KILL"), early=True, kills_launcher=True, weight=2),
    Fault(
        "start-any-killed",
        (0, 69, 75, 77, 78, 137),
        40.0,
        kill_any,
        early=True,
        rank_seconds=1.0,
        weight=3,
    ),
    Fault(
        "start-link-down",
        (0, 69, 75),
        45.0,
        lambda s: s.hosts.pull_cable(s.number),
        stop_daemon,
        early=True,
        rank_seconds=1.0,
        weight=2,
    ),
    Fault("start-reboot", (0, 69, 75), 45.0, reboot, early=True, rank_seconds=1.0, weight=2),
]


def controller(name: str) -> Callable[[Scene], None]:
    """Return what sends a signal to the controller of a detached run, on the first host."""

    def hurt(scene: Scene) -> None:
        scene.number = 1
        scene.send("controller", signal.Signals[f"SIG{name}"])

    return hurt


def on_host(number: int, hurt: Callable[[Scene], None]) -> Callable[[Scene], None]:
    """Return the same for a host that is not drawn."""

    def there(scene: Scene) -> None:
        scene.number = number
        hurt(scene)

    return there


def _detached(name: str, codes: tuple[int, ...], seconds: float, *rest: Any, **more: Any) -> Fault:
    return Fault(f"detached-{name}", codes, seconds, *rest, kind="detached", **more)


DETACHED = [
    _detached("nothing", (0,), 12.0, rank_seconds=3.0),
    _detached("controller-KILL", (75,), LOST + 5, controller("KILL")),
    _detached("controller-TERM", (143,), STOP + 5, controller("TERM")),
    _detached("controller-HUP", (129,), STOP + 5, controller("HUP")),
    _detached("stop", (130,), STOP + 10, verb="stop", weight=2),
    _detached("rank-KILL", (137,), LOST, lambda s: s.send("rank", signal.SIGKILL), weight=2),
    _detached("agent-KILL", (75,), LOST + 5, lambda s: s.send("agent", signal.SIGKILL)),
    _detached("attach-INT", (130,), SOON, to_launcher("INT"), rank_seconds=3.0),
    _detached(
        "other-power-off",
        (75,),
        LOST + 5,
        on_host(2, lambda s: s.hosts.cut_power(2)),
        on_host(2, lambda s: s.hosts.boot(2)),
        weight=2,
    ),
    _detached(
        "first-power-off",
        (69, 75),
        45.0,
        on_host(1, lambda s: s.hosts.cut_power(1)),
        on_host(1, lambda s: s.hosts.boot(1)),
    ),
    _detached(
        "other-cable",
        (75,),
        LOST + 8,
        on_host(3, lambda s: s.hosts.pull_cable(3)),
        on_host(3, stop_daemon),
        weight=2,
    ),
    _detached("any-killed", (0, 75, 137, 143), 40.0, kill_any, rank_seconds=3.0, weight=2),
]


def nginx(name: str, back_seconds: float = 0.0) -> Callable[[Scene], None]:
    """Return what sends a signal to the shard server of the run, and SIGCONT later."""

    def hurt(scene: Scene) -> None:
        pids = [p for p in children(scene.launcher) if "nginx" in command_line(p)]
        processes = pids[:1] if name == "KILL" else pids
        scene.send_all(processes, signal.Signals[f"SIG{name}"])
        if back_seconds:
            time.sleep(back_seconds)
            scene.send_all(processes, signal.SIGCONT)

    return hurt


def _served(name: str, hurt: Callable[[Scene], None], *options: str) -> Fault:
    return Fault(
        f"served-{name}", (0,), 90.0, hurt, kind="served", rank_seconds=30.0, options=options
    )


SERVED = [
    _served("nothing", lambda scene: None),
    _served("nginx-KILL", nginx("KILL")),
    _served("nginx-STOP", nginx("STOP", 5.0)),
    _served("rank-KILL", lambda s: s.send("rank", signal.SIGKILL), *RETRY),
    _served("link-flaps", flap),
]


def spoil_blocks(scene: Scene) -> None:
    """Change a byte in the middle of every block that the host keeps."""
    for path in scene.hosts.tmp(scene.number).glob("cache/*/??/*-*"):
        with suppress(FileNotFoundError), path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
            scene.hit = True


def _peers(
    name: str,
    hurt: Callable[[Scene], None],
    heal: Callable[[Scene], None] = lambda scene: None,
) -> Fault:
    return Fault(f"peers-{name}", (0,), 90.0, hurt, heal, kind="peers", rank_seconds=30.0)


PEERS = [
    _peers("nothing", lambda scene: None),
    _peers("server-KILL", lambda s: s.send("cache", signal.SIGKILL)),
    _peers("server-STOP", lambda s: s.send("cache", signal.SIGSTOP)),
    _peers("wrong-bytes", spoil_blocks),
    _peers("disk-full", fill_tmp, empty_tmp),
    _peers("link-flaps", flap),
]


def _slurm(name: str, codes: tuple[int, ...], rank_seconds: float = 60.0) -> Fault:
    return Fault(f"slurm-{name}", codes, 60.0, kind="slurm", rank_seconds=rank_seconds)


SLURM = [
    _slurm("nothing", (0,), 3.0),
    _slurm("rank-KILL", (137,)),
    _slurm("launcher-KILL", (137,)),
    _slurm("scancel", (0, 143)),
    _slurm("node-power", (0,), 6.0),  # Slurm queues the job again
]


def _container(name: str, codes: tuple[int, ...], rank_seconds: float = 60.0) -> Fault:
    return Fault(f"container-{name}", codes, 20.0, kind="container", rank_seconds=rank_seconds)


CONTAINER = [
    _container("nothing", (0,), 3.0),
    _container("rank-KILL", (137,)),
    _container("kill", (75,)),
    _container("pause", (75,)),
    _container("docker-run-KILL", (75,)),
    _container("launcher-INT", (130,)),
    _container("launcher-KILL", (-9,)),
]
