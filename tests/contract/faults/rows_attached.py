"""Faults of runs over SSH that the launcher supervises: what is hurt, and what must come of it."""

import signal

from tests.lab.fault import CHECKPOINT_SECONDS, HANG_SECONDS, LEASE_SECONDS, Fault

SOON, LOST, STOP, HANG = 9.0, LEASE_SECONDS + 9.0, CHECKPOINT_SECONDS + 5.0, HANG_SECONDS + 17.0
RETRY = ("--max-restarts", "1")
GOES_ON = {"codes": (0,), "cause": "done", "rank_seconds": 3.0, "seconds": 12.0}
GONE, SILENT = "its agent ended unexpectedly", "{victim}: silent for 3 s"


def sends(part, name):
    """Return what sends a signal to one process of each part of `agent+shim`."""
    return lambda run: run.send(part, name)


def row(part, names, codes, cause, seconds=SOON, short="", **more):
    """Return a row for each signal to a part; codes None: 128 and the signal."""
    return [
        Fault(
            f"{part}-{name}",
            codes or (128 + signal.Signals[f"SIG{name}"],),
            cause.replace("SIG?", f"SIG{name}"),
            seconds,
            sends(part, name),
            short=name in short.split(),
            **more,
        )
        for name in names.split()
    ]


def goes_on(name, hurt, **more):
    """Return a row for what a run survives."""
    return Fault(name, hurt=hurt, **{**GOES_ON, **more})


def survives(part, names, **more):
    """Return a row for each signal to a part whose end the run survives."""
    return [goes_on(f"{part}-{name}", sends(part, name), **more) for name in names.split()]


def misdeed(name, codes, cause, seconds=SOON, **more):
    """Return a row for what a rank does by itself."""
    return Fault(f"rank-does-{name}", codes, cause, seconds, misdeed=name, **more)


def launcher(names, codes, cause, seconds, moment="step", **more):
    """Return a row for signals to the launcher, some time apart."""

    def hurt(run):
        run.send("launcher", *names.split("-"))

    name = f"{'launcher' if moment == 'step' else moment}-{names}"
    return Fault(name, codes, cause, seconds, hurt, moment=moment, **more)


def long_stop(run):
    """Stop the launcher until the hosts have ended by themselves."""
    run.pause("launcher", LEASE_SECONDS * 2)


def end_daemons(run):
    """End what a rank has hidden by two forks and an empty environment."""
    run.send_to(run.processes("daemon"), "KILL")


PROCESSES = [
    *row("rank", "KILL SEGV ABRT BUS", None, "{victim}: killed by SIG?", short="KILL"),
    *row("rank", "USR2 ALRM HUP", None, "{victim}: killed by SIG?"),
    *row("rank", "TERM INT", None, "{victim}: exit code 1"),
    *row("rank", "STOP", (75,), "stopped by a signal", HANG, short="STOP"),
    *survives("loader", "KILL TERM INT SEGV STOP"),
    *survives("daemon", "KILL"),
    *row("shim", "KILL SEGV ABRT", (75, 137), "{victim}: killed by SIG", short="KILL"),
    *row("shim", "TERM INT HUP", (75, 137), "{victim}"),
    *row("shim", "STOP", (75,), "the shim of rank", HANG),
    *row("torchrun", "KILL", (75,), "torchrun was killed by SIG?", short="KILL"),
    *row("torchrun", "TERM INT HUP SEGV ABRT", (75,), "torchrun was killed by SIG?"),
    *row("torchrun", "STOP", (75,), "torchrun stopped by a signal", HANG),
    *row("agent", "KILL SEGV ABRT", (75,), GONE, LOST, short="KILL"),
    *row("agent", "TERM INT HUP", (75,), "the agent got SIG?", LOST),
    *row("agent", "STOP", (75,), SILENT, LOST, short="STOP"),
    # Neither of those whose child a daemon becomes is left, and nothing marks it.
    *row("agent+shim", "KILL", (75,), GONE, LOST, heal=end_daemons),
    *row("torchrun+agent+launcher", "KILL", (-9,), "", SOON, short="KILL"),
    *row("session", "KILL TERM HUP", (75,), "the connection broke", short="KILL"),
    Fault(
        "session-STOP",
        (75,),
        SILENT,
        LOST,
        sends("session", "STOP"),
        lambda run: run.send("session", "KILL"),
    ),
    Fault(
        *("pythons-killed", (75, 137), "{victim}", LOST, lambda run: run.kill_pythons()),
        end_daemons,
    ),
    goes_on(
        "any-killed",
        lambda run: run.send("all", "KILL"),
        codes=(0, 75, 137),
        cause="",
        weight=4,
    ),
]
MISDEEDS = [
    misdeed("exit-7", (7,), "exit code 7"),
    misdeed("exit-65", (65,), "no such shard"),
    misdeed("exit-255", (255,), "exit code 255"),
    misdeed("exit-0", (1,), "had ended with 0", HANG),
    misdeed("exit-9-of-stubborn", (9,), "exit code 9", short=True),
    misdeed("raise", (1,), "ZeroDivisionError: integer division", short=True),
    misdeed("linger", (1,), "ValueError: xxx", short=True),
    misdeed("abort", (134,), "killed by SIGABRT at "),
    misdeed("segv", (139,), "killed by SIGSEGV"),
    misdeed("kill-itself", (137,), "killed by SIGKILL"),
    misdeed("kill-group", (137,), "killed by SIGKILL"),
    misdeed("hang", (75,), "no progress", HANG),
    misdeed("stop-itself", (75,), "stopped by a signal", HANG),
    *(
        misdeed(name, **{**GOES_ON, "seconds": 15.0, "short": name == "noise"})
        for name in ("reports", "flood", "noise", "long-line", "escapes")
    ),
    Fault(
        *("rank-ends-first", (0,), "done", 12.0),
        command=("sh", "-c", "test $RANK = 0 || sleep 2"),
    ),
    Fault("command-unknown", (127,), "no-such-program", SOON, command=("no-such-program",)),
]
LAUNCHER = [
    launcher("INT", (130,), "Ctrl-C", STOP, weight=3, short=True),
    launcher("INT-INT", (130,), "Ctrl-C", SOON, weight=3, short=True),
    launcher("INT-TERM-INT", (130, 143), "stopped by", SOON),
    launcher("TERM", (143,), "SIGTERM", STOP, weight=2),
    launcher("HUP", (129,), "SIGHUP", STOP, weight=2),
    launcher("KILL", (-9,), "", SOON, weight=3),
    launcher("QUIT", (-3,), "", SOON),
    launcher("TSTP-CONT", **GOES_ON),
    Fault(
        "stop", (130,), "stopped by ./run-ssh stop", STOP, lambda run: run.type("stop"), short=True
    ),
    # Where both connections have ended before their last frames are read, all hosts count as lost.
    Fault(
        *("launcher-stopped-long", (75,), "no heartbeat|its agent ended|no host could be reached"),
        *(SOON, long_stop),
        short=True,
    ),
    goes_on("launcher-stopped-short", lambda run: run.pause("launcher", 1.0)),
]


def cut_off_and_interrupt(run):
    """Pull the cable, and type Ctrl-C twice."""
    run.pull_cable()
    run.send("launcher", "INT", "INT")


def plug_in_and_stop(run):
    """Bring the link up, and type what the launcher has said to."""
    run.plug_cable()
    run.type("stop")


ONE_IN_TWENTY = ("-m", "statistic", "--mode", "random", "--probability", "0.05")
RESET = ("--reject-with", "tcp-reset")
UNPLUGGED = {"heal": lambda run: run.plug_cable(), "loses_host": True}
HOSTS_AND_NETWORK = [
    Fault(
        *("rank-outgrows-memory", (137,), "the host is out of memory", SOON),
        lambda run: run.let_outgrow_memory(),
        lambda run: run.lift_memory_limit(),
        short=True,
    ),
    goes_on("host-stopped-short", lambda run: run.pause("all", 1.0)),
    Fault(
        *("host-stopped-long", (75,), SILENT, LOST + LEASE_SECONDS),
        lambda run: run.pause("all", LEASE_SECONDS * 2),
        weight=2,
    ),
    Fault(
        *("cable-pulled", (75,), SILENT, LOST, lambda run: run.pull_cable()),
        **UNPLUGGED,
        weight=3,
        short=True,
    ),
    Fault(
        *("cable-pulled-INT-INT", (130,), "Ctrl-C", SOON, cut_off_and_interrupt),
        plug_in_and_stop,
        loses_host=True,
        options=("--lease-seconds", "15", "--checkpoint-seconds", "60"),
        short=True,
    ),
    goes_on("cable-flaps", lambda run: run.flap(), seconds=15.0, weight=2),
    goes_on(
        "packets-lost",
        lambda run: run.reject(*ONE_IN_TWENTY, "-j", "DROP"),
        heal=lambda run: run.allow(),
        seconds=30.0,
    ),
    goes_on("link-slow", lambda run: run.hosts.slow_down(run.number, 200), seconds=30.0),
    Fault(
        *("one-way", (75,), SILENT, LOST),
        lambda run: run.reject("-s", "10.77.0.1", "-j", "DROP"),
        lambda run: run.allow(),
        loses_host=True,
    ),
    Fault(
        *("session-reset", (75,), "{victim}", LOST),
        lambda run: run.reject("-p", "tcp", "-s", "10.77.0.1", "-j", "REJECT", *RESET),
        lambda run: run.allow(),
        loses_host=True,
    ),
    Fault(
        *("power-cut", (75,), SILENT, LOST, lambda run: run.cut_power(), lambda run: run.boot()),
        loses_host=True,
        weight=3,
    ),
    Fault("reboot", (75,), "{victim}", LOST, lambda run: run.reboot(), loses_host=True, weight=2),
    goes_on("tmp-full", lambda run: run.fill_tmp(), heal=lambda run: run.empty_tmp()),
]
RESTARTS = [
    goes_on("restart-rank-KILL", sends("rank", "KILL"), seconds=25.0, options=RETRY, weight=2),
    goes_on("restart-agent-KILL", sends("agent", "KILL"), seconds=25.0, options=RETRY, short=True),
    goes_on(
        "restart-on-one",
        lambda run: run.cut_power(),
        heal=lambda run: run.boot(),
        seconds=45.0,
        options=(*RETRY, "--min-hosts", "1"),
        loses_host=True,
        weight=2,
    ),
    goes_on(
        "restart-without-a-host-that-comes-back",
        lambda run: run.cut_off_until_restart(),
        seconds=45.0,
        options=(*RETRY, "--min-hosts", "1"),
        short=True,
    ),
]
BEFORE_PYTHON = {"INT": (-2, 1), "TERM": (-15,), "HUP": (-1,), "INT-INT": (-2, 1)}
"""How Python itself ends at a signal before it runs our code; 1: with its own traceback."""
AT_END = {**dict.fromkeys(BEFORE_PYTHON, ()), "INT-INT": (-2,)}
"""The second Ctrl-C may meet a Python that is about to end."""


def at_start(names, code, short="", **more):
    """Return rows for signals to the launcher at each moment of the start."""
    return [
        launcher(
            *(names, (code, *(BEFORE_PYTHON[names] if moment == "spawn" else AT_END[names]))),
            *("Ctrl-C|interrupted|stopped by", CHECKPOINT_SECONDS + 8.0),
            moment=moment,
            short=moment in short.split(),
            **more,
        )
        for moment in ("spawn", "login", "plan", "ranks")
    ]


ANY_CODE = {"codes": (0, 69, 75, 77, 78, 137), "cause": "", "seconds": 45.0, "rank_seconds": 1.0}
START = [
    *at_start("INT", 130, "plan"),
    *at_start("TERM", 143),
    *at_start("HUP", 129),
    *at_start("INT-INT", 130, "login", weight=2),
    Fault(
        *("login-KILL", (-9,), "", 8.0, sends("launcher", "KILL")),
        moment="login",
        weight=2,
        short=True,
    ),
    Fault(
        *("login-cable-INT-INT", (130,), "interrupted|Ctrl-C", SOON, cut_off_and_interrupt),
        **UNPLUGGED,
        moment="login",
        short=True,
    ),
    Fault("login-any-killed", hurt=sends("all", "KILL"), moment="login", weight=3, **ANY_CODE),
    Fault(
        "login-cable-pulled",
        hurt=lambda run: run.pull_cable(),
        moment="login",
        weight=2,
        **UNPLUGGED,
        **ANY_CODE,
    ),
    Fault(
        "login-reboot",
        hurt=lambda run: run.reboot(),
        moment="login",
        loses_host=True,
        weight=2,
        **ANY_CODE,
    ),
]
ROWS = [*PROCESSES, *MISDEEDS, *LAUNCHER, *HOSTS_AND_NETWORK, *RESTARTS, *START]
