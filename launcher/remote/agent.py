"""The program that runs on each host: starts torchrun, relays what happens, leaves nothing behind.

    launcher ──orders──▶ agent ──▶ torchrun ──▶ shim, one per rank ──▶ the rank's command
             ◀──frames──

It arrives over standard input and needs only the standard library of Python 3.8. Six things keep
a run from outliving its launcher, and each of them was needed:

1. Standard input is a lease: its end, or silence for too long, ends the run.
2. The agent is a child subreaper: whatever a rank starts and forgets becomes the agent's child,
   and is ended by walking /proc down from the agent, by pid and start time.
3. The kernel kills torchrun when the agent dies, and a rank's command when its shim dies.
4. Output comes over pipes of the agent's own, so no orphan holds the launcher's.
5. A shim ends its rank when the agent's socket closes or torchrun is gone.
6. The agent has a guard for a parent, which does nothing but end what a killed agent leaves: also
   daemons of a rank whose shim was killed as well, and which no variable marks as ours.

The shim is this same file: torchrun starts it in place of the command, which it reads from the
agent's private folder. So the command's words, its output and its true exit code pass torchrun by.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import json
import os
import selectors
import signal
import socket
import stat
import struct
import sys
import time

TYPE_CHECKING = False  # hosts and ranks start sooner without typing
if TYPE_CHECKING:
    import io
    from collections.abc import Iterator
    from typing import Any, NoReturn

MARKER = b"\nrackrun agent 1\n"
"""Comes before the first frame: what a login shell prints before it is noise."""

HEADER = struct.Struct(">BHI")
"""A frame's kind, local rank and payload length."""

EVENT, OUT, ERR, REPORT = 0, 1, 2, 3
"""Kinds of frames: our JSON, bytes of standard output and error, and a rank's JSON as it came."""

NOBODY = 0xFFFF
"""The local rank of a frame that belongs to no rank: torchrun's output, the host's events."""

READ_BYTES = 1 << 16
BACKLOG_BYTES = 1 << 20  # output that waits for the launcher; more stays in the ranks' pipes
REPORT_BYTES = 1 << 14  # what is longer is no report
REPORT_FIELDS = 64  # likewise, when several are kept for later
REPORTS_PER_TURN = 256  # a rank that reports in a tight loop gets no more of the agent's time
JOIN_SECONDS = 3.0  # torchrun takes that long to begin, and to look for it is not cheap
USAGE_SECONDS = 3.0  # or a third of a short lease: it is also our sign of life
ORPHAN_GRACE_SECONDS = 3.0  # the launcher is gone: ranks may save, but not for long
CALLS = 256  # to other hosts at a time
SPARE_DESCRIPTORS = 32  # for all else that we open
ABANDONED_SECONDS = 1.0  # for our last words, when nobody may hear them
STRAY_GRACE_SECONDS = 1.0  # what ranks left behind, between SIGTERM and SIGKILL
SHIM_GRACE_SECONDS = 1.0  # a shim that is alive tells within milliseconds
LOCK_SECONDS = 3.0  # a launch that only looks at the host holds its lock for less
IDENTITY_BYTES = 1 << 12  # more than any agent writes down of itself
KILL_SECONDS = 10.0  # after that, what SIGKILL does not end is named as a survivor

ESTABLISHED = "01"  # in /proc/net/tcp
SCRATCH = "/tmp/rackrun-"  # what the private folder of every agent begins with
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
F_SETPIPE_SZ = 1031

HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD)
"""Signals that wake agent and shim by way of a pipe."""

FOREIGN_PREFIXES = ("PET_", "RACKRUN_", "SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_")
FOREIGN_NAMES = frozenset(
    ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "MASTER_ADDR")
    + ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_PORT")
)


def serve(source: bytes) -> None:
    """Take the first order from standard input and carry it out; `source` is this file."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, lambda number, frame: None)  # they arrive through the wakeup pipe
    launcher = Launcher()
    launcher.announce()
    order = launcher.first_order()
    if order is None:
        return
    if order["do"] == "sweep":
        survivors = sweep(order["scratch"])
        remove_free_locks(order.get("locks", []))
    else:
        guard = begin_guarded(order["scratch"], order["locks"])
        survivors = Agent(order, launcher, guard).run(source)
        if os.getppid() == guard:
            send_signal(guard, signal.SIGCONT)  # somebody may have stopped it, and it ends with us
    launcher.tell(event="closed", survivors=survivors)
    launcher.flush_all()


def begin_guarded(scratch: str, locks: list[tuple[str, bool]]) -> int:
    """Go on as the child of a guard, whose process id this is: it ends and removes what we leave.

    It hears no signal, holds none of our streams, and inherits every orphan when we are killed.
    """
    guard = os.getpid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    agent = os.fork()
    if agent == 0:
        prctl(PR_SET_PDEATHSIG, signal.SIGCHLD)  # wakes us; without it we do not go on
        return guard
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with open_null() as null:
        for stream in range(3):
            os.dup2(null, stream)
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, 0)[0] != agent:
            pass
        os.waitpid(-1, os.WNOHANG)  # raises when there is nothing to end
        kill_descendants()
    if identities_in(scratch)[1] == identity(guard):
        remove_folder(scratch)
        remove_free_locks(locks)
    os._exit(0)


class Agent:
    """One run on this host, from the order to the moment when nothing of it is left."""

    def __init__(self, order: dict[str, Any], launcher: Launcher, guard: int) -> None:
        """The order is the plan of this host and the limits; `guard` is our parent's process id."""
        self.order = order
        self.launcher = launcher
        self.guard = guard
        self.selector = selectors.DefaultSelector()
        self.locks: dict[str, int] = {}  # path -> descriptor, held as long as this process lives
        self.ranks: dict[int, LocalRank] = {}  # by local rank, as soon as its shim has called
        self.pipes: dict[int, tuple[int, int]] = {}  # descriptor -> kind, local rank
        self.flushing = False  # something waits for the launcher
        self.paused = False  # the launcher does not keep up: the ranks' pipes are left alone
        self.late: dict[int, dict[str, Any]] = {}  # local rank -> what it has reported since
        self.torchrun = 0
        self.torchrun_alive = False
        self.joined = False  # torchrun speaks with the one on the first host, or is done with that
        self.look_for_it_at = float("inf")
        self.door = socket.socket()  # for calls of other hosts: nobody listens there
        self.doors: list[tuple[str, int]] = []  # of hosts to call
        self.calls: dict[str, socket.socket] = {}  # to other hosts, which have not answered yet
        self.most_calls = 0
        self.call_until = 0.0
        self.reach_until: float | None = None
        self.kill_at: float | None = None  # set by the first reason to stop
        self.last_signal = 0  # that ranks got, and late ones are to get
        self.strays_asked_at: float | None = None
        self.killing_since: float | None = None
        self.done = False
        self.survivors: list[str] = []
        self.usage = UsageMeter(min(USAGE_SECONDS, order["lease_seconds"] / 3))
        self.frozen: list[str] = []
        self.oom_kills = oom_kills()

    def run(self, source: bytes) -> list[str]:
        """Start, relay until told to stop, stop; the names of what could not be ended."""
        try:
            self.prepare(source)
        except OSError as error:
            path = os.fsencode(error.filename or "").decode("utf-8", "replace")
            words = f"{path}: {error.strerror or error}".lstrip(": ")
            self.launcher.tell(event="refused", reason=f"cannot prepare the run: {words}")
        else:
            self.relay_all()
        finally:
            for path, descriptor in self.locks.items():
                remove_lock(path, descriptor)
        return self.survivors

    def relay_all(self) -> None:
        """From the start of torchrun to the last byte of the last rank."""
        try:
            self.start()
            while not self.done:
                self.turn()
            self.drain()
        finally:
            remove_folder(self.order["scratch"])

    def turn(self) -> None:
        """Wait for something to happen, pass it on, and see which time is up."""
        ready = self.selector.select(self.patience_seconds())
        for key, _ in sorted(ready, key=lambda pair: pair[0].fd == self.signals):
            key.data(key.fd)  # signals come last: shims speak before torchrun's end is told
        now = time.monotonic()
        self.watch_lease(now)
        self.look_around(now)
        self.tell_who_is_silent(now)
        if self.kill_at is not None:
            self.end_everything(now)
        self.flush_later()
        self.hold_back()

    def patience_seconds(self) -> float:
        """How long nothing may happen before the time is looked at again."""
        if self.kill_at is None:
            return 0.5
        return 0.02 if self.killing_since is not None else 0.05

    # -- the beginning

    def prepare(self, source: bytes) -> None:
        """Make the private folder with all that ranks need in it; refuse one that exists."""
        scratch = self.order["scratch"]
        for path, shared in self.order["locks"]:
            self.locks[path] = lock(path, shared)
        if not os.path.isdir(self.order["workdir"]):
            raise FileNotFoundError(f"no folder {self.order['workdir']} on this host")
        mode = 0o777 if self.order["share"] else 0o700  # of the last one: others, by the umask
        os.makedirs(self.order["folder"], mode, exist_ok=True)
        os.mkdir(scratch, 0o700)
        try:
            self.furnish(scratch, source)
        except OSError as error:
            remove_folder(scratch)
            error.filename = error.filename or scratch  # who writes to a full disk says no name
            raise

    def furnish(self, scratch: str, source: bytes) -> None:
        """Put into the private folder what others read there."""
        space = os.readlink("/proc/self/ns/pid")  # of a container: ids are of use only with it
        identities = [*identity(os.getpid()), *identity(self.guard), space]
        write_file(f"{scratch}/agent.pid", json.dumps(identities).encode())
        write_file(f"{scratch}/agent.py", source)
        if self.order["container"]:
            write_file(f"{scratch}/container", b"")  # for whoever has to sweep
        command = {name: self.order[name] for name in ("command", "workdir", "lease_seconds")}
        write_file(f"{scratch}/command.json", json.dumps(command).encode())

    def start(self) -> None:
        """Open all the ears, then start torchrun."""
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        if self.order["signalled_together"]:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # here, and in all that we start
        self.watch_signals()
        self.selector.register(0, selectors.EVENT_READ, self.hear_launcher)
        self.open_sockets()
        for local in range(self.order["processes"]):
            self.open_fifo(OUT, local, "out")
            self.open_fifo(ERR, local, "err")
        environment = self.environment()
        with open_null() as null:
            out, err = self.open_pipe(OUT), self.open_pipe(ERR)
            self.torchrun = spawn(
                self.order["torchrun"], environment, "/", (null, out, err), signal.SIGKILL
            )
            os.close(out)
            os.close(err)
        self.torchrun_alive = True
        self.look_for_it_at = time.monotonic() + JOIN_SECONDS
        self.watch_gpus()
        self.launcher.tell(event="opened", door=self.door.getsockname()[1])
        self.hear_launcher(0)  # an order may have come along with the first one

    def environment(self) -> dict[str, str]:
        """The host's own variables, without those of another launcher, and then the plan's."""
        mine = {
            name: value
            for name, value in os.environ.items()
            if name not in FOREIGN_NAMES and not name.startswith(FOREIGN_PREFIXES)
        }
        return {**dict(self.order["defaults"]), **mine, **dict(self.order["environment"])}

    def watch_signals(self) -> None:
        """Turn signals into bytes on a pipe, so that one loop waits for everything."""
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        os.set_blocking(writing, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self.signals = reading
        self.selector.register(reading, selectors.EVENT_READ, self.hear_signals)

    def open_sockets(self) -> None:
        """The socket that shims call, the one that ranks report to, and one that stays shut."""
        scratch = self.order["scratch"]
        self.control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.bind(f"{scratch}/control")
        self.control.listen(self.order["processes"])
        self.control.setblocking(False)
        self.selector.register(self.control, selectors.EVENT_READ, self.hear_new_shim)
        self.reports = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reports.bind(f"{scratch}/reports")
        self.reports.setblocking(False)
        self.selector.register(self.reports, selectors.EVENT_READ, self.hear_reports)
        self.door.bind(("", 0))  # a port as gloo and NCCL get theirs, past the same firewalls

    def open_fifo(self, kind: int, local: int, name: str) -> None:
        """A pipe with a name, which a shim opens as its command's output.

        Opened for writing as well, it never comes to an end while writers come and go.
        """
        path = f"{self.order['scratch']}/{local}.{name}"
        os.mkfifo(path, 0o600)
        self.relay(os.open(path, os.O_RDWR), kind, local)

    def open_pipe(self, kind: int) -> int:
        """A pipe for torchrun's own output; returns the end that torchrun writes to."""
        reading, writing = os.pipe()
        self.relay(reading, kind, NOBODY)
        return writing

    def relay(self, descriptor: int, kind: int, local: int) -> None:
        """Pass on what comes out of a pipe from now on."""
        os.set_blocking(descriptor, False)
        with contextlib.suppress(OSError):  # a wish: the user's share of pipe memory may be used up
            fcntl.fcntl(descriptor, F_SETPIPE_SZ, 1 << 20)
        self.pipes[descriptor] = (kind, local)
        self.selector.register(descriptor, selectors.EVENT_READ, self.hear_output)

    # -- what comes in

    def hear_launcher(self, descriptor: int) -> None:
        """Orders after the first: heartbeats, which only have to be heard, and stops."""
        for order in self.launcher.orders():
            if order["do"] == "stop":
                self.stop(order["signal"], order["grace_seconds"])
            elif order["do"] == "reach":
                self.reach(order["doors"], order["seconds"])
        if self.launcher.gone:
            self.selector.unregister(descriptor)  # an end is an event for ever

    def hear_signals(self, descriptor: int) -> None:
        """A child ended, or somebody wants the agent to end."""
        for number in os.read(descriptor, 4096):
            if number == signal.SIGCHLD:
                self.reap()
            elif not self.order["signalled_together"]:  # else the launcher has got it as well
                self.abandon(f"the agent got {signal.Signals(number).name}")

    def hear_output(self, descriptor: int) -> None:
        """Pass on what a rank or torchrun wrote, as it is."""
        kind, local = self.pipes[descriptor]
        data = read_some(descriptor)
        if data:
            self.launcher.send(kind, local, data)
        elif data == b"":  # torchrun's pipe: no writer is left
            self.selector.unregister(descriptor)
            self.pipes.pop(descriptor)
            os.close(descriptor)

    def hear_reports(self, descriptor: int) -> None:
        """Pass on what ranks say about their progress; what is no report is dropped."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(REPORTS_PER_TURN):
                self.take_report(self.reports.recv(READ_BYTES))

    def take_report(self, data: bytes) -> None:
        """Pass on a report of a rank of ours; a launcher that is behind gets the newest, later."""
        report = report_in(data)
        local = report.get("rank", -1) - self.order["first_rank"]
        if not 0 <= local < self.order["processes"]:
            return
        if self.paused:
            known = {**self.late.get(local, {}), **report}
            self.late[local] = known if len(known) <= REPORT_FIELDS else report
        else:
            self.launcher.send(REPORT, local, data)

    def tell_late_reports(self) -> None:
        """Tell the launcher, which keeps up again, what it has missed."""
        while self.late:
            local, report = self.late.popitem()
            self.launcher.send(REPORT, local, json.dumps(report).encode())

    def hear_new_shim(self, descriptor: int) -> None:
        """Shims call: listen to them as well, and to what they have said already."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self.control.accept()
                connection.setblocking(False)
                hear = functools.partial(self.hear_shim, connection)
                self.selector.register(connection, selectors.EVENT_READ, hear)
                hear(connection.fileno())

    def hear_shim(self, connection: socket.socket, descriptor: int) -> None:
        """A shim says that its command started or ended; or it is gone."""
        data = receive(connection)
        while data:
            self.take_word(connection, json.loads(data))
            data = receive(connection)
        if data == b"":
            self.selector.unregister(connection)
            connection.close()
            self.lose_shim(connection)

    def take_word(self, connection: socket.socket, message: dict[str, Any]) -> None:
        """Remember what a shim says, and pass it on."""
        local = message.pop("local")
        if message["event"] == "asked-to-stop" and self.order["signalled_together"]:
            return
        if message["event"] == "started":
            self.ranks[local] = LocalRank(connection, message.pop("shim"), message["pid"])
            self.ranks[local].tell(self.last_signal)
        if message["event"] == "ended":
            message["told"] = self.has_told(self.ranks[local])
            self.ranks[local].ended = True
            message["oom"] = message["signal"] == signal.SIGKILL and oom_kills() > self.oom_kills
        self.launcher.tell(local, **message)

    def lose_shim(self, connection: socket.socket) -> None:
        """A shim that goes without a word took its command along: the kernel saw to that."""
        for local, rank in self.ranks.items():
            if rank.connection is connection and not rank.ended:
                rank.ended = True
                killed = {"code": 0, "signal": int(signal.SIGKILL), "told": self.has_told(rank)}
                self.launcher.tell(local, event="ended", **killed)

    def has_told(self, rank: LocalRank) -> bool:
        """Whether we had a hand in the end of a rank."""
        return rank.told or self.killing_since is not None

    def reap(self) -> None:
        """Take the exit status of torchrun, and of the orphans that came to us."""
        for pid, status in reaped():
            if pid == self.torchrun:
                self.torchrun_alive = False
                code, by = exit_status(status)
                told = self.kill_at is not None
                self.launcher.tell(event="torchrun-ended", code=code, signal=by, told=told)

    # -- the time

    def watch_lease(self, now: float) -> None:
        """The launcher is gone when its stream ends, or when no heartbeat comes."""
        if os.getppid() != self.guard:
            self.abandon("the guard of the agent was killed")
        elif self.launcher.gone:
            self.abandon("the launcher is gone")
        elif now - self.launcher.heard_at > self.order["lease_seconds"]:
            self.abandon(f"no word from the launcher for {self.order['lease_seconds']:g} s")

    def look_around(self, now: float) -> None:
        """Every few seconds: how busy the host is, who is stopped, whether torchrun has joined."""
        if not self.usage.due(now):
            return
        self.launcher.tell(event="usage", **self.usage.measure(now))
        self.show_lease(now)
        self.look_for_frozen()
        if not self.joined and self.torchrun_alive and now > self.look_for_it_at:
            self.joined = bool(self.ranks) or is_connected(self.torchrun, self.port)
            if self.joined:
                self.launcher.tell(event="joined")

    def look_for_frozen(self) -> None:
        """Tell when somebody has stopped a process, or let it go on."""
        frozen = [name for name, pid in self.processes() if state_of(pid) == "T"]
        if frozen != self.frozen:
            self.frozen = frozen
            self.launcher.tell(event="frozen", names=frozen)

    @property
    def port(self) -> int:
        """Where the torchruns of all hosts meet."""
        words = [word.partition("=") for word in self.order["torchrun"]]
        return next(int(value) for name, _, value in words if name == "--master-port")

    def show_lease(self, now: float) -> None:
        """Let a file's age say when the launcher was last heard, for whoever asks this host."""
        heard = time.time() - (now - self.launcher.heard_at)
        with contextlib.suppress(OSError):
            os.utime(f"{self.order['scratch']}/agent.pid", (heard, heard))
        for descriptor in self.locks.values():  # whoever cleans /tmp takes what is old
            with contextlib.suppress(OSError):  # of another user's file only its owner may say so
                os.utime(descriptor)

    def processes(self) -> Iterator[tuple[str, int]]:
        """The processes that we know by name."""
        if self.torchrun_alive:
            yield "torchrun", self.torchrun
        for local, rank in sorted(self.ranks.items()):
            if not rank.ended:
                yield f"rank {self.order['first_rank'] + local}", rank.pid
                yield f"the shim of rank {self.order['first_rank'] + local}", rank.shim

    def watch_gpus(self) -> None:
        """Let one nvidia-smi print a line per GPU every few seconds, if there is one."""
        paths = [os.path.join(folder, "nvidia-smi") for folder in os.get_exec_path()]
        program = next((path for path in paths if os.access(path, os.X_OK)), None)
        if program is None:
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        argv = [program, "--query-gpu=index,utilization.gpu,memory.used,memory.total"]
        argv += ["--format=csv,noheader,nounits", "--loop-ms=3000"]
        with open_null() as null:
            spawn(argv, dict(os.environ), "/", (null, writing, null), signal.SIGKILL)
        os.close(writing)
        self.selector.register(reading, selectors.EVENT_READ, self.hear_gpus)

    def hear_gpus(self, descriptor: int) -> None:
        """Take what nvidia-smi prints; it may also end, without harm."""
        data = read_some(descriptor)
        if data == b"":
            self.selector.unregister(descriptor)
            os.close(descriptor)
        elif data:
            self.usage.take_gpus(data)

    def reach(self, doors: list[tuple[str, int]], seconds: float) -> None:
        """Call other hosts at their ports where nobody listens: a refusal is an answer too.

        Whoever asks this wonders why nobody moves: it must not have to wait for our next look.
        """
        self.look_for_frozen()
        for address in list(self.calls):
            self.hang_up(address)
        now = time.monotonic()
        self.call_until, self.reach_until = now + seconds / 2, now + seconds
        self.most_calls = min(CALLS, free_descriptors() - SPARE_DESCRIPTORS)
        self.doors = doors[::-1]
        self.call_some(now)

    def call_some(self, now: float) -> None:
        """Call hosts that were not called yet; each has half of the time, or is not judged."""
        while self.doors and len(self.calls) < self.most_calls and now < self.call_until:
            address, port = self.doors.pop()
            call = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
            call.setblocking(False)
            self.calls[address] = call
            with contextlib.suppress(OSError):  # a name that means nothing here stays unanswered
                self.hear_answer(address, call.connect_ex((address, port)))

    def hear_answer(self, address: str, problem: int) -> None:
        """A host has answered, or the kernel says that nobody can, or nothing is known yet."""
        call = self.calls[address]
        if problem in (0, errno.ECONNREFUSED):
            self.hang_up(address)
        elif problem == errno.EINPROGRESS:
            hear = functools.partial(self.hear_call, address)
            self.selector.register(call, selectors.EVENT_WRITE, hear)

    def hear_call(self, address: str, descriptor: int) -> None:
        """A call has come to something; without an answer it stays among the calls."""
        self.selector.unregister(descriptor)
        problem = self.calls[address].getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.hear_answer(address, problem)

    def hang_up(self, address: str) -> None:
        """Be done with a call."""
        call = self.calls.pop(address)
        with contextlib.suppress(KeyError):
            self.selector.unregister(call)
        call.close()

    def tell_who_is_silent(self, now: float) -> None:
        """After all answers, or when their time is up: who was called and did not answer."""
        if self.reach_until is None:
            return
        self.call_some(now)
        if not self.calls or now > self.reach_until:
            self.reach_until = None
            silent = sorted(self.calls)
            for address in silent:
                self.hang_up(address)
            self.launcher.tell(event="unreached", addresses=silent)

    def flush_later(self) -> None:
        """Wake up when the launcher takes more, as long as something waits for it."""
        if bool(self.launcher.waiting) != self.flushing:
            self.flushing = not self.flushing
            if self.flushing:
                self.selector.register(1, selectors.EVENT_WRITE, lambda fd: self.launcher.flush())
            else:
                self.selector.unregister(1)

    def hold_back(self) -> None:
        """Leave the ranks' pipes alone while the launcher does not keep up, and no longer."""
        if self.launcher.full == self.paused:
            return
        self.paused = self.launcher.full
        if not self.paused:
            self.tell_late_reports()
        for descriptor in self.pipes:
            if self.paused:
                self.selector.unregister(descriptor)
            else:
                self.selector.register(descriptor, selectors.EVENT_READ, self.hear_output)

    # -- the end

    def abandon(self, reason: str) -> None:
        """Stop on our own account; the launcher hears why, if it still listens."""
        if self.kill_at is None:
            self.launcher.tell(event="stopping", reason=reason)
            self.launcher.patience_seconds = ABANDONED_SECONDS
            grace = min(self.order["grace_seconds"], ORPHAN_GRACE_SECONDS)
            self.stop(int(signal.SIGTERM), grace)

    def stop(self, signum: int, grace_seconds: float) -> None:
        """Ask the ranks to end, and set the time when they are made to; never a later one."""
        kill_at = time.monotonic() + grace_seconds
        first = self.kill_at is None
        self.kill_at = kill_at if self.kill_at is None else min(self.kill_at, kill_at)
        if grace_seconds > 0 and (first or signum != signal.SIGTERM):
            self.last_signal = signum
            for rank in self.ranks.values():
                rank.tell(signum)

    def end_everything(self, now: float) -> None:
        """Wait for the ranks; then SIGTERM and SIGKILL for all they started; torchrun comes last.

        The shims see how their ranks end, and have a moment to tell, before they go as well.
        """
        assert self.kill_at is not None
        if now < self.kill_at and any(not rank.ended for rank in self.ranks.values()):
            return
        known = {self.torchrun, *(rank.shim for rank in self.ranks.values())}
        left = descendants(os.getpid())
        strays = [process for process in left if process.pid not in known]
        if self.killing_since is None:
            if self.strays_have_time(strays, now):
                return
            self.killing_since = now
        if not strays and not self.shims_have_time(now):
            strays = left
        for process in strays:
            kill(process)
        self.reap()
        if not left or now - self.killing_since > KILL_SECONDS:
            self.survivors = [f"{process.pid} ({process.name})" for process in left]
            self.done = True

    def strays_have_time(self, strays: list[Process], now: float) -> bool:
        """Whether somebody may still end on a SIGTERM."""
        assert self.kill_at is not None
        if not strays:
            return False
        if self.strays_asked_at is None:
            self.strays_asked_at = now
            for process in strays:
                send_signal(process.pid, signal.SIGTERM)
        return now < min(self.kill_at, self.strays_asked_at + STRAY_GRACE_SECONDS)

    def shims_have_time(self, now: float) -> bool:
        """Whether a shim may still tell how its rank ended."""
        assert self.killing_since is not None
        unheard = any(not rank.ended for rank in self.ranks.values())
        return unheard and now - self.killing_since < SHIM_GRACE_SECONDS

    def drain(self) -> None:
        """Pass on what is left in the pipes: nobody writes to them any more."""
        self.hear_reports(self.reports.fileno())
        self.tell_late_reports()
        for descriptor, (kind, local) in self.pipes.items():
            data = read_some(descriptor)
            while data:
                self.launcher.send(kind, local, data)
                if self.launcher.full:
                    self.launcher.flush_all()
                data = read_some(descriptor)


class LocalRank:
    """What the agent knows of one rank: its shim, and the command that the shim started."""

    def __init__(self, connection: socket.socket, shim: int, pid: int) -> None:
        """`shim` and `pid` are process ids."""
        self.connection = connection
        self.shim = shim
        self.pid = pid
        self.ended = False
        self.told = False

    def tell(self, signum: int) -> None:
        """Ask the command to end, unless it did by itself: 0 is no signal."""
        if signum and not self.ended and look_up(self.pid):
            self.told = True
            send_signal(self.pid, signum)


class Launcher:
    """The two streams between agent and launcher; neither is ever waited for."""

    def __init__(self) -> None:
        """Takes over what Python may have read ahead while it read this program."""
        os.set_blocking(0, False)
        os.set_blocking(1, False)
        self.heard_at = time.monotonic()
        self.gone = False
        self.patience_seconds = KILL_SECONDS
        self.arrived = bytearray()
        self.waiting: list[bytes] = []
        self.waiting_bytes = 0
        with contextlib.suppress(BlockingIOError):
            stdin: io.BufferedReader = sys.stdin.buffer  # type: ignore[assignment]
            self.arrived += stdin.read1(READ_BYTES)

    @property
    def full(self) -> bool:
        """Whether so much waits for the launcher that no more should be taken in."""
        return self.waiting_bytes > BACKLOG_BYTES

    def announce(self) -> None:
        """Say where the frames begin."""
        self.write(MARKER)

    def tell(self, local: int = NOBODY, **event: Any) -> None:
        """Send an event."""
        self.send(EVENT, local, json.dumps(event).encode())

    def send(self, kind: int, local: int, payload: bytes) -> None:
        """Send one frame, as soon as there is room for it."""
        self.write(HEADER.pack(kind, local, len(payload)) + payload)

    def write(self, data: bytes) -> None:
        """Write bytes as soon as there is room for them."""
        if not self.gone:
            self.waiting.append(data)
            self.waiting_bytes += len(data)
            self.flush()

    def flush(self) -> None:
        """Write what the launcher takes now."""
        try:
            while self.waiting:
                written = os.write(1, self.waiting[0])
                self.waiting_bytes -= written
                if written < len(self.waiting[0]):
                    self.waiting[0] = self.waiting[0][written:]
                else:
                    self.waiting.pop(0)
        except BlockingIOError:
            pass
        except OSError:  # nobody reads: the lease is over, whatever standard input says
            self.gone = True
            self.waiting, self.waiting_bytes = [], 0

    def flush_all(self) -> None:
        """Write all that waits, unless the launcher takes nothing for too long."""
        deadline = time.monotonic() + self.patience_seconds
        while self.waiting and not self.gone and time.monotonic() < deadline:
            before = self.waiting_bytes
            self.flush()
            if self.waiting_bytes < before:
                deadline = time.monotonic() + self.patience_seconds
            time.sleep(0.002)

    def first_order(self) -> dict[str, Any] | None:
        """Wait for the order that says what to do; None when the stream ends before it."""
        while not self.gone:
            for order in self.orders():
                return order
            time.sleep(0.005)
        return None

    def orders(self) -> Iterator[dict[str, Any]]:
        """The orders that have arrived: JSON, each with its length on a line before it."""
        try:
            data = read_some(0)
        except OSError:
            data = b""
        if data:
            self.heard_at = time.monotonic()
            self.arrived += data
        self.gone = self.gone or data == b""
        while b"\n" in self.arrived:
            head, _, rest = self.arrived.partition(b"\n")
            if len(rest) < int(head):
                return
            self.arrived = rest[int(head) :]
            yield json.loads(bytes(rest[: int(head)]))


class UsageMeter:
    """How busy this host is."""

    def __init__(self, every_seconds: float) -> None:
        """The first measurement starts now."""
        self.every_seconds = every_seconds
        self.next_at = 0.0
        self.idle, self.total = cpu_times()
        self.gpus: dict[str, dict[str, int]] = {}
        self.rest = b""

    def due(self, now: float) -> bool:
        """Whether it is time to measure again."""
        return now >= self.next_at

    def measure(self, now: float) -> dict[str, Any]:
        """CPU as a fraction of all cores since the last time, memory in bytes, GPUs."""
        self.next_at = now + self.every_seconds
        idle, total = cpu_times()
        passed = max(1, total - self.total)
        cpu = 1 - (idle - self.idle) / passed
        self.idle, self.total = idle, total
        memory_total, memory_free = memory()
        return {
            "cpu": round(min(max(0.0, cpu), 1.0), 3),  # the kernel's count of idle time may fall
            "memory": max(0, memory_total - memory_free),
            "memory_total": memory_total,
            "gpus": [self.gpus[index] for index in sorted(self.gpus)],
        }

    def take_gpus(self, data: bytes) -> None:
        """Lines of nvidia-smi: index, percent busy, MiB used, MiB in all."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            index, *values = [field.strip() for field in line.decode("ascii", "replace").split(",")]
            if len(values) == 3 and all(value.isdigit() for value in values):
                busy, used, total = map(int, values)
                self.gpus[index] = {"busy": min(busy, 100), "memory": used, "memory_total": total}


def report_in(data: bytes) -> dict[str, Any]:
    """The report that a rank sent, with an integer as its rank; an empty one when it is none."""
    with contextlib.suppress(ValueError, RecursionError):
        report = json.loads(data) if len(data) <= REPORT_BYTES else None
        if isinstance(report, dict) and isinstance(report.get("rank"), int):
            return report
    return {}


# -- the shim


def shim(scratch: str) -> int:
    """Run one rank's command for torchrun, which hears of nothing but a good end."""
    parent = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    for signum in HANDLED:
        signal.signal(signum, lambda number, frame: None)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.connect(f"{scratch}/control")
    local = int(os.environ["LOCAL_RANK"])
    pid = start_command(scratch, local, control)
    say(control, event="started", local=local, shim=os.getpid(), pid=pid)
    code, by = watch_command(pid, parent, reading, control, local)
    kill_descendants()
    say(control, event="ended", local=local, code=code, signal=by)
    if code or by:  # torchrun would end the others: the launcher decides that, so wait for it
        control.recv(1)  # the agent never writes: it ends us, or it is gone
        abandon_rank(control)
    return 0


def start_command(scratch: str, local: int, control: socket.socket) -> int:
    """Start the command on the rank's own pipes; its process id."""
    with open(f"{scratch}/command.json", "rb") as file:
        command = json.loads(file.read())
    out, err = (open_fifo(f"{scratch}/{local}.{name}", control) for name in ("out", "err"))
    with open_null() as null:
        pid = spawn(
            command["command"],
            dict(os.environ),
            command["workdir"],
            (null, out, err),
            signal.SIGKILL,
        )
    os.close(out)
    os.close(err)
    return pid


def open_fifo(path: str, control: socket.socket) -> int:
    """The writing end of one of the agent's pipes; not waited for, in case the agent is gone."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        abandon_rank(control)
    os.set_blocking(descriptor, True)
    return descriptor


def watch_command(
    pid: int, parent: int, signals: int, control: socket.socket, local: int
) -> tuple[int, int]:
    """Wait for the command's end: its code and signal. Kill it when agent or torchrun is gone."""
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        selector.register(control, selectors.EVENT_READ)
        while True:
            for child, status in reaped():
                if child == pid:
                    return exit_status(status)
            if os.getppid() != parent:
                abandon_rank(control)
            for key, _ in selector.select():
                if key.fd != signals:
                    abandon_rank(control)  # the agent never writes: its end has closed
                asked = set(os.read(signals, 4096)) - {int(signal.SIGCHLD)}
                if asked and os.getppid() == parent:
                    say(control, event="asked-to-stop", local=local, signal=min(asked))


def abandon_rank(control: socket.socket) -> NoReturn:
    """Nobody watches over this rank any more: end it and whatever it started."""
    kill_descendants()
    control.setblocking(False)
    if receive(control) == b"":  # the agent is gone, and its folder is nobody's now
        remove_folder(os.path.dirname(os.path.abspath(__file__)))
    os._exit(1)


def say(control: socket.socket, **message: Any) -> None:
    """Tell the agent; when it is gone, so is the reason to go on."""
    try:
        control.send(json.dumps(message).encode())
    except OSError:
        abandon_rank(control)


def kill_descendants() -> None:
    """SIGKILL for everything below this process, until nothing is left or nothing more helps."""
    deadline = time.monotonic() + KILL_SECONDS
    left = descendants(os.getpid())
    while left and time.monotonic() < deadline:
        for process in left:
            kill(process)
        for _ in reaped():
            pass
        time.sleep(0.005)
        left = descendants(os.getpid())


# -- after an agent that could not clean up itself


def sweep(scratch: str) -> list[str]:
    """End what is left of a run whose agent was lost; the names of what could not be ended.

    Ranks and torchrun carry the path of the agent's folder in their environment, the process ids
    of the agent and its guard are in there. What runs in a container ends with it. Whoever asks
    has the path from a process: what is no path of an agent's folder is left alone.
    """
    if not is_scratch(scratch):
        return []
    in_container = is_ours(scratch) and os.path.exists(f"{scratch}/container")
    kept = remove_container(os.path.basename(scratch)) if in_container else []
    deadline = time.monotonic() + KILL_SECONDS
    agent, guard = identities_in(scratch)
    left = remains(scratch, agent, guard)
    while left and time.monotonic() < deadline:
        for process in left:  # to the guard come those whose parents we have just killed
            if len(left) == 1 or [process.pid, process.started] != guard:
                kill(process)
        time.sleep(0.02)
        left = remains(scratch, agent, guard)
    remove_folder(scratch)
    return [*kept, *(f"{process.pid} ({process.name})" for process in left)]


def remove_container(name: str) -> list[str]:
    """End a container with all that runs in it; its name, when it could not be ended."""
    import subprocess

    try:
        told = subprocess.run(
            ["docker", "rm", "--force", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=KILL_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return [f"container {name}"]
    gone = told.returncode == 0 or b"No such container" in told.stderr
    return [] if gone else [f"container {name}"]


def identities_in(scratch: str) -> tuple[list[int], list[int]]:
    """Who agent and guard of a run are, as `identity` has it; empty when nobody of us says so."""
    told: Any = None
    if is_ours(scratch):
        with contextlib.suppress(OSError, ValueError, RecursionError):
            told = json.loads(read_plain(f"{scratch}/agent.pid", IDENTITY_BYTES))
    if not isinstance(told, list) or not all(type(number) is int for number in told[:4]):
        return [], []
    return told[:2], told[2:4]


def is_scratch(path: str) -> bool:
    """Whether a path is that of an agent's private folder: /tmp/rackrun-RUN-NODE."""
    run, _, node = path[len(SCRATCH) :].rpartition("-")
    is_hex = len(run) == 32 and not set(run) - set("0123456789abcdef")
    return path.startswith(SCRATCH) and is_hex and node.isascii() and node.isdecimal()


def is_ours(scratch: str) -> bool:
    """Whether a private folder was made by this account: anybody may use such a name in /tmp."""
    if not is_scratch(scratch):
        return False
    try:
        found = os.lstat(scratch)
    except OSError:
        return False
    private = stat.S_ISDIR(found.st_mode) and found.st_mode & 0o777 == 0o700
    return private and found.st_uid == os.getuid()


def read_plain(path: str, most_bytes: int) -> bytes:
    """The content of a plain file; raises OSError for links, pipes and what is longer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > most_bytes:
            raise OSError(errno.EINVAL, "is no file of ours", path)
        return file.read(most_bytes)


def remains(scratch: str, *known: list[int]) -> list[Process]:
    """The living processes of a run: those that are known or marked, and whatever is below them.

    A mark counts on processes of this account only: anybody may set any variable.
    """
    mark = f"RACKRUN_REPORTS={scratch}/reports".encode()
    ours = [
        process
        for process in all_processes()
        if process.pid != os.getpid()
        and ([process.pid, process.started] in known or mark in environment_of(process.pid))
        and is_mine(process.pid)
    ]
    below = descendants(*(process.pid for process in ours))
    return list({process.pid: process for process in (*ours, *below)}.values())


def is_mine(pid: int) -> bool:
    """Whether this account started a process; it may run as root for another one (setuid)."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"Uid:"):
                return int(line.split()[1]) == os.getuid()
    return False


def environment_of(pid: int) -> list[bytes]:
    """The variables a process of ours was started with; empty for those of others."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read().split(b"\0")
    except OSError:
        return []


# -- processes


class Process:
    """A process as /proc shows it; `started` tells it from a later one with the same pid."""

    def __init__(self, pid: int, name: str, state: str, parent: int, started: int) -> None:
        """`state` is a letter, `started` is in ticks since boot."""
        self.pid = pid
        self.name = name
        self.state = state
        self.parent = parent
        self.started = started


def look_up(pid: int) -> Process | None:
    """The process with this id, or None when there is none, or only its remains."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return None
    name, _, fields = text.partition("(")[2].rpartition(")")
    values = fields.split()
    if values[0] in "ZX":
        return None
    return Process(pid, name, values[0], int(values[1]), int(values[19]))


def all_processes() -> Iterator[Process]:
    """Everything that runs on this machine."""
    for name in os.listdir("/proc"):
        process = look_up(int(name)) if name.isdigit() else None
        if process is not None:
            yield process


def descendants(*roots: int) -> list[Process]:
    """Everything that processes started, and what that started in turn."""
    children: dict[int, list[Process]] = {}
    for process in all_processes():
        children.setdefault(process.parent, []).append(process)
    found: list[Process] = []
    parents = list(roots)
    while parents:
        born = children.get(parents.pop(), [])
        found += born
        parents += [process.pid for process in born]
    return found


def identity(pid: int) -> list[int]:
    """What stays unique when process ids are used again: the id and the start time."""
    process = look_up(pid)
    return [pid, process.started if process else 0]


def is_connected(pid: int, port: int) -> bool:
    """Whether a process, or one that it started, has a connection to or from a port."""
    sockets = connections(port)
    return bool(sockets) and any(
        socket_of(f"/proc/{one}/fd/{number}") in sockets
        for one in (pid, *(process.pid for process in descendants(pid)))
        for number in numbers_in(f"/proc/{one}/fd")
    )


def connections(port: int) -> set[str]:
    """The sockets of this host, as links in /proc name them, that are connected at this port."""
    found = set()
    for family in ("tcp", "tcp6"):
        with contextlib.suppress(OSError), open(f"/proc/net/{family}") as file:
            for line in file.readlines()[1:]:
                _, here, there, state, *_, inode = line.split()[:10]
                ports = [int(address.rpartition(":")[2], 16) for address in (here, there)]
                if state == ESTABLISHED and port in ports:
                    found.add(f"socket:[{inode}]")
    return found


def socket_of(link: str) -> str:
    """What a descriptor is open on; empty when it has been closed."""
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""


def numbers_in(folder: str) -> list[str]:
    """The names in a folder of /proc; none when the process is gone."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def state_of(pid: int) -> str:
    """The letter of a process's state: R, S, D, T for stopped; empty when it is gone."""
    process = look_up(pid)
    return process.state if process else ""


def kill(process: Process) -> None:
    """SIGKILL, if the process id still belongs to this process."""
    now = look_up(process.pid)
    if now is not None and now.started == process.started:
        send_signal(process.pid, signal.SIGKILL)


def send_signal(pid: int, signum: int) -> None:
    """Send a signal, and make a stopped process take it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signum)
        os.kill(pid, signal.SIGCONT)


def spawn(
    argv: list[str],
    environment: dict[str, str],
    workdir: str,
    streams: tuple[int, int, int],
    death_signal: int,
) -> int:
    """Start a program in a session of its own, which gets `death_signal` when we die; its pid."""
    parent = os.getpid()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        return pid
    try:
        os.setsid()
        for signum in HANDLED:  # ours would take what is meant for the program
            signal.signal(signum, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, death_signal)
        if os.getppid() == parent:
            os.chdir(workdir)
            os.execvpe(argv[0], argv, environment)
    except OSError as error:
        os.write(2, f"rackrun: cannot start {argv[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def reaped() -> Iterator[tuple[int, int]]:
    """The children that have ended since the last look: process id and raw status."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            yield pid, status


def exit_status(status: int) -> tuple[int, int]:
    """A raw status as code and signal; one of the two is 0."""
    return (0, os.WTERMSIG(status)) if os.WIFSIGNALED(status) else (os.WEXITSTATUS(status), 0)


# -- the machine


def prctl(option: int, value: int) -> None:
    """Ask the kernel for something about this process."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl {option} refused")


def cpu_times() -> tuple[int, int]:
    """Idle and total time of all cores since boot, in ticks."""
    with open("/proc/stat", "rb") as file:
        times = [int(field) for field in file.readline().split()[1:9]]
    return times[3] + times[4], sum(times)


def memory() -> tuple[int, int]:
    """Bytes of memory in all, and bytes that a program could still get."""
    with open("/proc/meminfo", "rb") as file:
        sizes = {line.split()[0]: int(line.split()[1]) for line in file}
    return sizes[b"MemTotal:"] << 10, sizes.get(b"MemAvailable:", sizes[b"MemFree:"]) << 10


def free_descriptors() -> int:
    """How many files and sockets this process may still open."""
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(numbers_in("/proc/self/fd"))


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since boot."""
    with contextlib.suppress(OSError), open("/proc/vmstat", "rb") as file:
        for line in file:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return 0


def read_some(descriptor: int) -> bytes | None:
    """What can be read now; None when nothing can, b"" at the end."""
    try:
        return os.read(descriptor, READ_BYTES)
    except BlockingIOError:
        return None


def receive(connection: socket.socket) -> bytes | None:
    """The next message; None when there is none yet, b"" when the other side is gone."""
    try:
        return connection.recv(READ_BYTES)
    except BlockingIOError:
        return None
    except OSError:
        return b""


def lock(path: str, shared: bool) -> int:
    """Lock a file, or raise OSError: the descriptor holds the lock until this process ends.

    Whoever ends removes the file, so a lock counts only if the file is still the one of that name.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < deadline:
        descriptor = open_lock(path)
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)
        time.sleep(0.05)
    raise BlockingIOError("another run holds this host; type: ./run-ssh --check HOSTS")


def remove_lock(path: str, descriptor: int) -> None:
    """Remove the file of a lock that we hold, and that nobody shares, and be done with it."""
    with contextlib.suppress(OSError):  # others share it, or it is another user's file
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            os.unlink(path)
    os.close(descriptor)


def remove_free_locks(locks: list[tuple[str, bool]]) -> None:
    """Remove the files of locks that a killed agent has left, and that nobody holds by now."""
    for path, _ in locks:
        with contextlib.suppress(OSError):
            remove_lock(path, os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK))


def open_lock(path: str) -> int:
    """Open a file that everybody may lock and only its owner may change; nothing else will do.

    Somebody else may have put a link there, or a pipe, whose opening waits for another end.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    while True:
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(path, flags)
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                return descriptor
            os.close(descriptor)
            raise OSError(errno.EINVAL, "is no plain file; have it removed", path)
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL)
            os.fchmod(descriptor, 0o644)  # whatever the umask is
            return descriptor


def remove_folder(path: str) -> None:
    """Remove a private folder of ours and all that is in it; other folders stay."""
    import shutil  # costs as much as the start of Python, and is needed at the end only

    if is_ours(path):
        shutil.rmtree(path, ignore_errors=True)


def write_file(path: str, data: bytes) -> None:
    """Write a new file that only we can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with open(descriptor, "wb") as file:
        file.write(data)


@contextlib.contextmanager
def open_null() -> Iterator[int]:
    """The null device, for a program that gets no input."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    sys.exit(shim(os.path.dirname(os.path.abspath(__file__))))
